"""The proof by replay: truths are what they say, strategies play by the rules, demands hold."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, job_values, one_fast, slow

sys.path.insert(0, str(ROOT / "benchmarks"))

import landscapes
import replay
import replay_studies
from replay_report import document, out_of_memory, quantile_to_goal
from replay_runs import OURS, TRIVIAL
from replay_strategies import FAMILY_KNOWN, STRATEGIES, Truth
from replay_sweeps import own_sweeps

SMALL = "8B on 8 H100"
TIE = 1e-4  # a hundredth of a percent of the best step
QUICK = sorted(set(STRATEGIES) - {FAMILY_KNOWN, "gp", "gp-as-shipped"})


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of_landscape(landscapes.generate(SMALL, 0.10, 3), 0.01)


@pytest.mark.parametrize("error", one_fast(0.10, 0.05, 0.30))
def test_a_landscape_is_as_far_from_the_model_as_it_says(error: float) -> None:
    lands = [landscapes.generate(SMALL, error, seed) for seed in range(12)]
    differences = [land.log_seconds - land.candidates.prior.log_seconds for land in lands]
    own = error * np.sqrt(1.0 - landscapes.COMMON_SHARE)
    spreads = [float(difference.std()) for difference in differences]
    assert spreads == pytest.approx([own] * 12, rel=0.03)
    common = np.std([difference.mean() for difference in differences])
    assert 0.4 < common / (error * np.sqrt(landscapes.COMMON_SHARE)) < 1.7


def test_landscapes_are_repeatable_and_differ_by_seed() -> None:
    first, again, other = (landscapes.generate(SMALL, 0.3, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.log_seconds, again.log_seconds)
    assert np.array_equal(first.memory_ratio, again.memory_ratio)
    shapes = [land.log_seconds - land.candidates.prior.log_seconds for land in (first, other)]
    assert abs(np.corrcoef(shapes)[0, 1]) < 0.95


@pytest.mark.slow
def test_the_laws_are_another_model() -> None:
    """They neither copy the cost model nor are far from any machine: ranks agree by a part."""
    pricer, candidates = landscapes.prepared(SMALL)
    zeros = np.zeros(len(landscapes.COEFFICIENTS) + 9)
    laws = landscapes.log_law(pricer, candidates.batch, zeros, 0.0)
    difference = laws - candidates.prior.log_seconds
    assert 0.03 < difference.std() < 0.4
    ranks = [np.argsort(np.argsort(column)) for column in (laws, candidates.prior.log_seconds)]
    assert 0.2 < np.corrcoef(ranks)[0, 1] < 0.97


def test_a_survey_of_ones_own_is_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_sweeps(tmp_path) == ()
    rows = [
        survey_row("none", step_seconds=1.0),
        survey_row("full", step_seconds=1.3),
        survey_row("selective-op", status="oom"),
        survey_row("none", rung="emulated", step_seconds=0.1),
        survey_row("none", step_seconds=1.1),  # tried again: this one counts
        survey_row("none", seq_len=2048, step_seconds=1.0),  # alone, so no sweep
    ]
    (tmp_path / "own-h200.runs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (sweep,) = own_sweeps(tmp_path)
    assert sorted(np.exp(sweep.log_seconds)) == pytest.approx([1.1, 1.3, np.inf])
    assert sweep.out_of_memory.sum() == 1
    monkeypatch.setitem(replay.FIXED, replay.OWN, lambda: (sweep,))
    (run,) = replay.play([replay.OWN], [OURS], 2, lambda line: None)
    assert 1 <= run.to_goal <= 3


def survey_row(ac: str, seq_len: int = 4096, **numbers: Any) -> dict[str, Any]:
    measured = {"status": "ok", "rung": "probed", **numbers}
    row = job_values("llama3.2-1b", "h200-sxm-141gb", 1, seq_len, 2, layout={"ac": ac})
    row["cluster"]["gpus_per_node"] = 1
    return {**row, "id": f"{ac} {measured['rung']} {seq_len}", "group": "own", "measured": measured}


def probes(truth: Truth, name: str, count: int) -> Iterator[tuple[int, Any]]:
    """What a strategy asks for, and the answer."""
    ask, rng = STRATEGIES[name](truth.candidates, 0, count), np.random.default_rng(0)
    answer = None
    for _ in range(count):
        row = next(ask) if answer is None else ask.send(answer)
        answer = truth.probe(row, rng)
        yield row, answer


@pytest.mark.parametrize("name", ["random", OURS, *slow(*sorted({*QUICK} - {"random", OURS}))])
def test_strategies_ask_for_candidates_they_have_not_tried(name: str, truth: Truth) -> None:
    rows = [row for row, _ in probes(truth, name, 6)]
    assert 0 <= min(rows) <= max(rows) < len(truth.candidates)
    assert len(set(rows)) == 6 or name == "cost-model"


def test_best_first_follows_the_model_alone(truth: Truth) -> None:
    prior = truth.candidates.prior
    rows = list(STRATEGIES[TRIVIAL](truth.candidates, 0, 5))
    assert rows == list(np.flatnonzero(prior.oom_probability <= 0.05)[:5])


def test_history_pruning_skips_what_its_rules_decide(truth: Truth) -> None:
    x, ran = truth.candidates.batch, list[int]()
    names = [name for name, _ in x.columns() if name != "micro_batch_size"]
    for row, answer in probes(truth, "history-pruning", 40):
        for other in ran:
            if all(getattr(x, name)[row] == getattr(x, name)[other] for name in names):
                assert x.micro_batch_size[row] > x.micro_batch_size[other]
        if answer.status == "ok":
            ran.append(row)


def test_a_run_counts_regret_against_the_best_that_fits(truth: Truth) -> None:
    run = replay.replay(truth, TRIVIAL, 0, replay.GENERATED[1])
    rows = list(STRATEGIES[TRIVIAL](truth.candidates, 0, replay.PROBES))
    best = truth.log_seconds[~truth.out_of_memory].min()
    seconds = np.where(truth.out_of_memory[rows], np.inf, truth.log_seconds[rows])
    expected = np.expm1(np.minimum.accumulate(seconds) - best)
    assert run.regret == pytest.approx(expected)
    reached = np.flatnonzero(expected <= 0.02).tolist()
    assert run.to_goal == min(reached, default=replay.PROBES) + 1


def demands(kinds: list[str], strategies: list[str], seeds: int) -> dict[str, Any]:
    runs = replay.play(kinds, strategies, seeds, lambda line: None)
    return {name: [run for run in runs if run.strategy == name] for name in strategies}


def surely_worse(ours: list[Any], others: list[Any], probes: int) -> bool:
    """Whether the mean regret on the same truths is larger by more than two standard errors."""
    pairs = {(run.truth, run.seed): run.regret[probes - 1] for run in others}
    more = np.array([run.regret[probes - 1] - pairs[run.truth, run.seed] for run in ours])
    return bool(more.mean() > 2.0 * more.std(ddof=1) / np.sqrt(len(more)) + TIE)


def test_worse_is_told_from_chance() -> None:
    ours, same, better = (
        [
            SimpleNamespace(truth="truth", seed=seed, regret=(regret + 0.01 * (seed % 3),))
            for seed in range(9)
        ]
        for regret in (0.10, 0.10, 0.05)
    )
    assert surely_worse(ours, better, 1)
    assert not surely_worse(ours, same, 1)
    assert not surely_worse(better, ours, 1)


@pytest.mark.slow
def test_demands_on_generated_landscapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "JOBS", [SMALL, "13B on 64 A100", "70B on 128 H200"])
    for kind in replay.GENERATED:
        by = demands([kind], [OURS, TRIVIAL], 3)
        assert out_of_memory(by[OURS]) <= 0.05
        for probes in range(1, replay.PROBES + 1):
            assert not surely_worse(by[OURS], by[TRIVIAL], probes), (kind, probes)
        if not kind.endswith("30%"):
            assert quantile_to_goal(0.5)(by[OURS]) <= 3


@pytest.mark.slow
@pytest.mark.xfail(reason="in seven: 12 of 90 take over five, nine may", strict=True)
def test_nine_of_ten_generated_landscapes_in_five_probes() -> None:
    (kind,) = (kind for kind in replay.GENERATED if kind.endswith("error 10%"))
    assert quantile_to_goal(0.9)(demands([kind], [OURS], replay.SEEDS)[OURS]) <= 5


def test_the_page_says_reached_and_missed(truth: Truth) -> None:
    runs = [
        replay.replay(truth, name, seed, replay.GENERATED[1])
        for name in (OURS, TRIVIAL, "random")
        for seed in range(3)
    ]
    page = document(runs)
    assert "| random | 3 |" in page
    assert "generated, error 10%" in page
    assert "reached" in page
    fields = [{name: getattr(run, name) for name in run.__slots__} for run in runs]
    late = [type(run)(**{**own, "to_goal": 13}) for run, own in zip(runs, fields, strict=True)]
    assert "**missed**" in document(late)
    assert ">12" in document(late)


def test_the_committed_page_is_of_these_strategies() -> None:
    page = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    for name in STRATEGIES:
        assert f"| {name} |" in page
    for kind in (replay.MEASURED, *replay.GENERATED):
        assert f"## {kind[0].upper()}{kind[1:]}" in page
    assert (ROOT / "docs" / "replay.svg").read_text(encoding="utf-8").startswith("<?xml")


STUDIES = [(0, 0.01, -1.0), (1, 0.10, -1.0), (2, 0.10, 0.01)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "noise", "tolerance"), STUDIES)
def test_studies_stand_by_what_they_measured(seed: int, noise: float, tolerance: float) -> None:
    truth = Truth.of_landscape(landscapes.generate(SMALL, 0.30, seed), noise)
    played = replay_studies.play(truth, seed, probes=6, tolerance=tolerance)
    assert played.told
    assert replay_studies.violations(played) == []
    swapped = dataclasses.replace(played.outcome, ranked=played.outcome.ranked[::-1])
    reversed_ = dataclasses.replace(played, outcome=swapped, events=played.events[::-1])
    broken = replay_studies.violations(reversed_)
    assert any("answer" in line for line in broken), "another answer would be told"


@pytest.mark.parametrize("off", replay_studies.SURPRISES)
def test_what_nobody_measured_is_measured_second_and_found(off: float) -> None:
    """Of layouts that are all 10% faster, or 15% slower, than the model says."""
    truth, pair = replay_studies.surprising(SMALL, 1, off)
    played = replay_studies.play(truth, 1, probes=6, tolerance=-1.0, pair=pair)
    assert replay_studies.violations(played) == []
    times = [seconds for _, seconds in played.told[:2]]
    answer = played.outcome.ranked[0].row
    assert truth.log_seconds[answer] <= np.log(min(times)) + 3 * truth.noise_sd
    without = dataclasses.replace(played, told=[played.told[0], *played.told[2:]])
    words = "what nobody measured was not measured after number 1"
    assert replay_studies.violations(without) == [words]
