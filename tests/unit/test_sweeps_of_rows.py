"""Regret over sweeps: number one beside the rule of thumb, on rows made by hand and published."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibration.accuracy import Row
from planner.calibration.comparison import Compared, shipped_comparison
from planner.calibration.sweeps import (
    FEWEST_AGAINST_RULE,
    NOISE,
    AgainstRule,
    Sweep,
    against_rule,
    first_by,
    repeats,
    rule_of_thumb,
    sweeps,
)
from planner.columns import LayoutBatch
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.specs.job import Job
from tests.conftest import job_values


def row(layout: str, measured: float, predicted: float, **fields: Any) -> Compared:
    (base, *_) = shipped_comparison().rows
    labels = {**base.labels, "class": "dense"}
    same = {"labels": labels, "sweep": "one", "fits": True, "rule": (1.0,), "layout": layout}
    return replace(base, measured_seconds=measured, predicted_seconds=predicted, **same | fields)


def order(*layouts: dict[str, Any]) -> list[int]:
    """Indices of these layouts by the rule of thumb."""
    batch = LayoutBatch.from_layouts([job_of(layout=one).layout for one in layouts])
    return [int(place) for place in np.lexsort(rule_of_thumb(batch).T[::-1])]


def job_of(**given: Any) -> Job:
    return read_job(job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 16, **given))


@pytest.mark.parametrize(("earlier", "later"), [
    ({"tp": 1, "pp": 8}, {"tp": 2}),
    ({"pp": 1, "cp": 8}, {"pp": 2}),
    ({"cp": 1, "ac": "full"}, {"cp": 2}),
    ({"ac": "none", "micro_batch_size": 1}, {"ac": "selective-op", "micro_batch_size": 8}),
    ({"ac": "selective-op"}, {"ac": "full", "micro_batch_size": 8}),
    ({"micro_batch_size": 4, "ep": 8}, {"micro_batch_size": 2}),
    ({"tp": 8, "ac": "full"}, {"cpu_offload": True}),
])  # fmt: skip
def test_each_key_outweighs_those_after_it(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    assert order(later, earlier) == [1, 0]


def test_layouts_that_the_rule_does_not_tell_apart_all_come_first() -> None:
    keys = np.array([[1.0, 2.0], [1.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    assert first_by(keys).tolist() == [False, True, False, True]


def test_repeats_of_a_layout_are_averaged_and_the_picks_judged_by_what_was_measured() -> None:
    rows = [
        row("a", 1.0, 3.0, rule=(3.0,)), row("a", 4.0, 3.0, rule=(3.0,)),  # mean 2
        row("b", 3.0, 1.0, rule=(2.0,)), row("c", 2.5, 2.0, rule=(1.0,)),
        row("d", 3.5, 4.0, rule=(1.0,)),
    ]  # fmt: skip
    (sweep,) = sweeps(rows)
    assert len(sweep) == 4
    assert [sweep.regret(first) for first in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.0])
    assert sweep.regret_of_rule() == pytest.approx(0.5)  # the mean of c and d, over a
    assert sweeps(rows, 5) == []
    (everything, dense) = against_rule(rows)
    assert everything == AgainstRule(
        name="all", sweeps=1, number_one=pytest.approx(0.5), rule_of_thumb=pytest.approx(0.5),
        behind=0,
    )  # fmt: skip
    assert dense == replace(everything, name="dense")


def test_a_layout_that_does_not_fit_is_picked_by_neither_unless_none_fits() -> None:
    rows = [row("a", 9.0, 1.0, fits=False), row("b", 4.0, 2.0, rule=(2.0,)),
            row("c", 3.0, 3.0, rule=(3.0,))]  # fmt: skip
    (sweep,) = sweeps(rows)
    assert sweep.regret() == sweep.regret_of_rule() == pytest.approx(1.0 / 3.0)
    (unfit,) = sweeps([replace(one, fits=False) for one in rows])
    assert unfit.regret() == unfit.regret_of_rule() == pytest.approx(2.0)
    assert sweeps([replace(one, measured_seconds=None) for one in rows]) == []


def published() -> tuple[Compared, ...]:
    """Predicted without their source."""
    return shipped_comparison().left_out["group"]


def test_number_one_is_behind_the_rule_of_thumb_in_no_class_of_published_sweeps() -> None:
    found = against_rule(published())
    assert sum(one.sweeps for one in found[1:]) == found[0].sweeps >= 24
    assert len(found) >= 5
    behind = {one.name for one in found if one.number_one > one.rule_of_thumb + NOISE}
    assert behind == set()
    assert found[0].number_one < found[0].rule_of_thumb / 3.0


def test_number_one_is_behind_it_in_two_published_sweeps_and_these_are_named() -> None:
    """Not among repeats, and by 5 and 9%: what the model misses there is in docs/accuracy.md."""
    by_name = defaultdict(list)
    for one in published():
        by_name[one.sweep].append(one)
    behind = {
        min(one.id for one in rows)
        for rows in by_name.values()
        for sweep in sweeps(rows, FEWEST_AGAINST_RULE)
        if sweep.regret() > sweep.regret_of_rule() + NOISE
    }
    assert behind <= {"bs-045", "iev-005"}


def test_noise_is_less_than_repeats_of_one_layout_differ_by() -> None:
    logs = defaultdict(list)
    for one in published():
        if one.measured_seconds and "dense" in one.label("class"):
            logs[one.sweep, one.layout].append(np.log(one.measured_seconds))
    repeated = [np.array(runs) for runs in logs.values() if len(runs) > 1]
    free = sum(len(runs) - 1 for runs in repeated)
    deviation = (sum(((runs - runs.mean()) ** 2).sum() for runs in repeated) / free) ** 0.5
    assert free >= 30
    assert NOISE < deviation < 2.0 * NOISE


def test_ranks_of_a_sweep() -> None:
    (sweep,) = sweeps([row(name, s, s**2) for name, s in (("a", 1.0), ("b", 2.0), ("c", 3.0))])
    assert sweep.rank_correlation() == pytest.approx(1.0)
    assert Sweep.of([row("a", 1.0, 2.0), row("b", 2.0, 2.0)]).rank_correlation() == 0.0


def test_the_same_job_again_is_as_far_off_as_its_runs_are_apart() -> None:
    asked = (("q", 1.0), ("q", 4.0), ("r", 3.0), ("s", 2.0), ("s", 2.0))
    rows = [row("a", seconds, 1.0, question=question) for question, seconds in asked]
    found = repeats(rows)  # of 1 and 4 the mean is 2: once half of it, once twice
    assert [(one.name, one.jobs, one.rows) for one in found] == [("all", 2, 4), ("dense", 2, 4)]
    assert [one.off for one in found] == pytest.approx([(0.5 + 1.0) / 4.0] * 2)
    assert repeats(rows[2:3]) == []


def test_software_is_no_part_of_the_question() -> None:
    def asked(layout: dict[str, Any], **software: str) -> str:
        job = job_of(layout=layout, trainer="megatron", **software)
        return Row(job=job, estimate=estimate_job(job)).question

    one = asked({"dp_shard": 8})
    assert asked({"dp_shard": 8}, trainer_version="0.16", cuda_graphs="none") == one
    assert asked({"dp_shard": 4, "tp": 2}) != one
    longer = job_values("llama3-8b", "h100-sxm-80gb", 8, 4096, 16, layout={"dp_shard": 8})
    longer["training"]["trainer"] = "megatron"
    job = read_job(longer)
    assert Row(job=job, estimate=estimate_job(job)).question != one
