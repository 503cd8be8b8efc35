"""Kernels as a rung: what is worth timing, what a timing says of candidates, and what is not asked again."""

from dataclasses import replace

import numpy as np
import pytest

from planner.search.probing.candidates import Candidates
from planner.search.probing.kernels import ALONE, TOGETHER, Kernels, Timing
from planner.search.probing.study import MicroResult, ProbeStudy, Settings
from tests.unit.probing_cases import searched, small


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels.of(searched()[0], small())


def timings(kernels: Kernels, kind: str, factor: float) -> list[Timing]:
    """Kernels of a kind, so many times as slow as predicted."""
    return [Timing(shape=shape, seconds=factor * use.seconds) for shape, use in kernels.used.items() if shape.kind == kind]


def test_a_launch_holds_what_no_timing_covers(kernels: Kernels) -> None:
    (alone,) = (probe for probe in kernels.probes([], num_gpus=1, start_seconds=10.0) if probe.name == ALONE)
    assert {"gemm bf16", "attention bf16"} <= {look.name for look in alone.looks}
    assert {shape.num_gpus for shape in alone.kernels} == {1}
    assert 10.0 < alone.gpu_seconds < 40.0
    assert kernels.probes(list(kernels.used), num_gpus=8, start_seconds=10.0) == ()
    some = [shape for shape in kernels.used if shape.kind != "attention"]
    (rest,) = kernels.probes(some, num_gpus=1, start_seconds=10.0)
    assert {look.name for look in rest.looks} == {"attention bf16"}


def test_collectives_go_together_and_cost_all_their_gpus(kernels: Kernels) -> None:
    """Directions of the shipped calibration hardly move collectives within a node, so here they are made to."""
    loud = {shape: (2.0 if shape.kind == "collective" else 1.0) * use.seconds for shape, use in kernels.used.items()}
    found = replace(kernels, moved=(loud,)).probes([], num_gpus=8, start_seconds=10.0)
    together = next(probe for probe in found if probe.name == TOGETHER)
    gpus = max(shape.num_gpus for shape in together.kernels)
    assert 2 <= gpus <= 8
    assert together.gpu_seconds > gpus * 10.0


def test_slow_products_make_layouts_slower_that_spend_their_step_in_them(kernels: Kernels) -> None:
    candidates = small()
    study = ProbeStudy(candidates, Settings(observed=kernels.observed(timings(kernels, "gemm", 1.2))))
    before = ProbeStudy(candidates, Settings()).knowledge.beliefs()
    moved = study.knowledge.beliefs().log_seconds - before.log_seconds
    doubt = np.sqrt(before.time.variance(np.arange(len(candidates))))
    assert moved.mean() > 0.05 * doubt.mean(), "a calibration that is sure moves little"
    assert (moved > 0.0).all()
    assert np.ptp(moved) > 0.0, "not all by the same"


def test_as_predicted_is_news_too(kernels: Kernels) -> None:
    observed = kernels.observed(timings(kernels, "attention-backward", 1.0))
    assert [one.log_ratio for one in observed] == pytest.approx([0.0])
    rows = np.arange(len(small()))
    narrowed, wide = (ProbeStudy(small(), Settings(observed=seen)).knowledge.beliefs().time.variance(rows) for seen in (observed, ()))
    assert (narrowed <= wide + 1e-12).all()
    assert (narrowed < 0.99 * wide).any()


def test_a_timing_of_no_candidates_kernel_says_nothing(kernels: Kernels) -> None:
    shape = next(shape for shape in kernels.used if shape.kind == "gemm")
    other = replace(shape, sizes=tuple((name, 7 * size) for name, size in shape.sizes))
    assert kernels.observed([Timing(shape=other, seconds=1.0)]) == ()


def divided(candidates: Candidates) -> Candidates:
    """Predicted almost alike, and apart by the calibration's directions."""
    close = np.log(10.0) + 1e-4 * np.arange(len(candidates))
    return replace(candidates, prior=replace(candidates.prior, log_seconds=close))


def test_the_study_asks_for_them_first_where_they_could_change_the_winner(kernels: Kernels) -> None:
    probes = kernels.probes([], num_gpus=1, start_seconds=10.0)
    study = ProbeStudy(divided(small()), Settings(micro_probes=probes))
    asked = study.ask()
    assert asked is not None
    assert (asked.rung, asked.micro) == ("micro", probes[0])
    assert "could change the winner" in asked.reason
    study.tell(asked, MicroResult(observed=(), gpu_seconds=9.0, message="torch is missing"))
    following = study.ask()
    assert following is not None
    assert following.rung == "probed", "what failed is not asked twice"
    assert study.spent.gpu_seconds == 9.0
    resumed = ProbeStudy(divided(small()), Settings(micro_probes=(), gpu_seconds_before=9.0))
    assert resumed.spent.gpu_seconds == 9.0
