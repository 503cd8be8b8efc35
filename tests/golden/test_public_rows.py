"""Every published row gets an answer, and the errors over all of them never grow beyond what is
committed in accuracy_floor.json.

    python -m tests.golden.test_public_rows [--loosen]     writes today's figures; refuses to raise
    one unless told to
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.api.cli.accuracy import read_rows
from planner.calibration.accuracy import Row, Summary, summarise
from planner.calibration.classes import class_of, interval_score
from planner.calibration.comparison import OwnRuns
from planner.calibration.held_out import Fitted
from planner.calibration.report import complete
from planner.calibration.sweeps import against_rule, sweeps
from planner.cost.machine.shipped import shipped_calibration
from planner.precision import PRECISIONS
from tests.golden.rows import PUBLIC, published
from tests.unit.test_replay import OURS, TRIVIAL, demands, replay

from replay_report import out_of_memory, quantile_to_goal, regret_at  # isort: skip
from replay_sweeps import sweeps_of  # isort: skip

pytestmark = pytest.mark.slow

FLOOR = Path(__file__).with_name("accuracy_floor.json")
SLACK = 0.002
# Rows as published that no run can have had, or that leave out what a layout needs; the answer to
# each is a refusal that names the field. They stay among the rows and count as unanswered.
REFUSED = {
    "mbx-273": "ep", "dgx-244": "virtual_stages", "dgx-245": "virtual_stages",
}  # fmt: skip


def summary_of(rows: list[Row], name: str) -> Summary:
    return summarise([row.compared(seen=True) for row in rows], name)


def figures(rows: list[Row], fitted: Fitted, out: list[Row]) -> dict[str, float]:
    """Mean absolute relative errors of step time and memory, first as predicted without the row's
    source, then in sample; the same over units, and of the rest of a unit after own runs; by how
    much 90% intervals hold more or less than 90% of a unit; regret of the first pick; runs out of
    memory that are called a fit, and runs that did fit and are refused.

    out: the rows as predicted without their source.
    """
    unseen, everything = summary_of(out, "left out"), summary_of(rows, "all")
    after = fitted.after_own_runs()
    errors = {
        "left_out_all": unseen.time,
        "left_out_complete": summary_of(complete(out), "complete").time,
        "step_time_all": everything.time,
        "step_time_complete": summary_of(complete(rows), "complete").time,
        "allocated": everything.allocated,
        "allocated_complete": summary_of(complete(rows), "complete").allocated,
        "reserved": everything.reserved,
    }
    compared = [row.compared(seen=True) for row in out]
    (beside, *_) = against_rule(compared)
    shares = {
        "left_out_units": unseen.units.mape,
        "left_out_units_median": unseen.units.median,
        "left_out_units_coverage_off": abs(unseen.units.coverage - 0.9),
        "after_1_own_run": OwnRuns.mean(list(after[1].values())).error,
        "after_4_own_runs": OwnRuns.mean(list(after[4].values())).error,
        "regret_at_1": float(np.mean([sweep.regret() for sweep in sweeps(compared)])),
        "regret_at_1_over_the_rule_of_thumb": beside.number_one / beside.rule_of_thumb,
        "missed_oom": float(everything.out_of_memory_missed),
        "refused": everything.refused / len(rows),
    }
    return {name: round(found.mape, 4) for name, found in errors.items() if found is not None} | {
        k: round(v, 4) for k, v in (shares | interval_figures(out)).items()
    }


def by_class(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows that measured a step, by `calibration.classes.class_of`."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.estimate.valid and row.measured_seconds:
            found.setdefault(class_of(row.job.model, row.job.cluster.gpu.family), []).append(row)
    return found


def interval_figures(out: list[Row]) -> dict[str, float]:
    """By class the mean interval score, and by how much intervals hold more or less than 90%."""
    found = {}
    for name, members in sorted(by_class(out).items()):
        summary = summary_of(members, name)
        found[f"interval_score, {name}"] = summary.interval_score
        found[f"coverage_off, {name}"] = abs(summary.coverage - 0.9)
    return found


def worse(ours: dict[str, float], committed: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Figures above the committed ones by more than SLACK, as (now, committed)."""
    both = {name: (ours[name], limit) for name, limit in committed.items()}
    return {name: (now, limit) for name, (now, limit) in both.items() if now > limit + SLACK}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found, malformed = read_rows(PUBLIC.read_text())
    assert malformed == []
    return found


@pytest.fixture(scope="module")
def fitted(rows: list[Row]) -> Fitted:
    return Fitted.find(rows, shipped_calibration())


@pytest.fixture(scope="module")
def out(rows: list[Row], fitted: Fitted) -> list[Row]:
    """The rows as predicted without their source."""
    return fitted.left_out(rows, "group")


def test_every_row_is_answered(rows: list[Row]) -> None:
    assert [row.job.id for row in rows] == [*published()]
    assert len(rows) >= 784
    refused = {
        row.job.id: [violation.field for violation in row.estimate.violations]
        for row in rows
        if not row.estimate.valid
    }
    assert refused == {name: [field] for name, field in REFUSED.items()}
    assert summary_of(rows, "all").unanswered == len(REFUSED)


def most_mfu(row: Row) -> float:
    """The MFU of a step that does nothing but the recipe's products, at the recipe's own peak.

    MFU counts over the dense bf16 peak in every format. Four published NVFP4 runs of Llama 3.1 405B
    on GB200 measured 1.13 to 1.24 of it.
    """
    peaks = row.job.cluster.gpu.peak_flops_per_second
    own = peaks[PRECISIONS[row.job.layout.precision].torchao.peak]
    return own / (peaks.get("bf16") or peaks["fp16"])


def test_every_answer_is_whole(rows: list[Row]) -> None:
    for row in rows:
        e = row.estimate
        if row.job.id in REFUSED:
            assert (e.time, e.memory, e.step_seconds, e.interval) == (None,) * 4, row.job.id
            continue
        assert e.time.total() == pytest.approx(e.step_seconds, rel=1e-9), row.job.id
        assert 0 < e.step_seconds < math.inf, row.job.id
        assert 0 < e.tokens_per_second_per_gpu < math.inf, row.job.id
        assert 0 < e.peak_allocated_bytes <= e.peak_reserved_bytes <= e.device_bytes < math.inf
        assert e.mfu is None or 0 < e.mfu < most_mfu(row), row.job.id
        most = max(stage.peak_reserved_bytes for stage in e.memory.stages)
        assert most == pytest.approx(e.peak_reserved_bytes), row.job.id


def test_errors_do_not_grow(rows: list[Row], fitted: Fitted, out: list[Row]) -> None:
    committed = json.loads(FLOOR.read_text(encoding="utf-8"))
    ours = figures(rows, fitted, out)
    assert ours.keys() == committed.keys()
    assert worse(ours, committed) == {}, (
        "an improvement elsewhere does not pay for this; see the module's docstring"
    )


def test_intervals_beat_a_table_of_three_widths(out: list[Row]) -> None:
    """Half widths of log seconds that one reads off docs/accuracy.md: what a user without any
    intervals of ours would take."""
    ours, table = [], []
    for name, members in by_class(out).items():
        width = 0.45 if "experts" in name else 0.15 if "Hopper" in name else 0.25
        misses = np.log([row.measured_seconds / row.estimate.step_seconds for row in members])
        table.append(interval_score(misses, np.full(len(misses), width)))
        ours.append(np.full(len(misses), summary_of(members, name).interval_score))
    assert np.concatenate(ours).mean() < np.concatenate(table).mean()


def test_the_model_beats_forty_percent_of_the_peak(rows: list[Row]) -> None:
    everything = summary_of(rows, "all")
    assert everything.time.rows == everything.baseline.rows > 350
    assert everything.time.mape < everything.baseline.mape / 3


def test_published_sweeps_are_predicted_without_their_source(out: list[Row]) -> None:
    sweeps = sweeps_of(out)
    assert len(sweeps) >= 25
    assert any(sweep.out_of_memory.any() for sweep in sweeps)
    misses = (s.log_seconds - s.candidates.prior.log_seconds for s in sweeps)
    ran = [~s.out_of_memory for s in sweeps]
    errors = np.concatenate([miss[kept] for miss, kept in zip(misses, ran, strict=True)])
    assert np.isfinite(errors).all()
    assert np.sqrt(np.mean(errors**2)) > 0.09
    for sweep in sweeps:
        assert len(sweep.candidates) >= 3
        assert (~sweep.out_of_memory).sum() >= 2
        assert np.isfinite(sweep.best_log_seconds())


def test_few_probes_find_the_best_of_published_sweeps(
    out: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replay.FIXED, replay.MEASURED, lambda: sweeps_of(out))
    by = demands([replay.MEASURED], [OURS, TRIVIAL], 1)
    assert quantile_to_goal(0.5)(by[OURS]) <= 3
    assert quantile_to_goal(0.9)(by[OURS]) <= 5
    assert out_of_memory(by[OURS]) <= 0.05
    # Two of 45 sweeps are behind. Number one, the first run, takes no number format that no other
    # source ran: NVFP4 on GB200 (mbx-173) was 32% faster. One finds its best, 2.3% faster, at the
    # sixth run instead of the fourth.
    for probes in range(1, replay.PROBES + 1):
        behind = 0.008 if probes == 1 else 0.001
        assert regret_at(probes)(by[OURS]) <= regret_at(probes)(by[TRIVIAL]) + behind


def test_a_figure_that_grows_is_named() -> None:
    assert worse({"a": 0.1021, "b": 0.05}, {"a": 0.10, "b": 0.05}) == {"a": (0.1021, 0.10)}
    assert worse({"a": 0.1019}, {"a": 0.10}) == {}


def main(loosen: bool) -> int:
    rows = read_rows(PUBLIC.read_text())[0]
    fitted = Fitted.find(rows, shipped_calibration())
    ours = figures(rows, fitted, fitted.left_out(rows, "group"))
    committed = json.loads(FLOOR.read_text(encoding="utf-8")) if FLOOR.exists() else {}
    higher = {name for name, value in ours.items() if value > committed.get(name, math.inf)}
    raised = {name: (ours[name], committed[name]) for name in ours if name in higher}
    if raised and not loosen:
        print(
            f"higher than committed (now, committed): {raised}; pass --loosen and say why in the "
            "commit"
        )
        return 1
    FLOOR.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    print(ours)
    return 0


if __name__ == "__main__":
    sys.exit(main("--loosen" in sys.argv[1:]))
