"""Kernels as a rung: which are worth timing, what a timing says, what is not asked again."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.kernels import KernelTiming
from planner.calibration.update import KernelRun, learn
from planner.cost.machine.knobs import KNOBS, PLACE
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.study.candidates import Candidates, enumerate_candidates
from planner.study.kernel_timings import ALONE, TOGETHER, StudyKernels
from planner.study.ledger import StudySettings
from planner.study.micro_probes import ObservedEffect
from planner.study.posterior import StudyPosterior
from planner.study.study import MicroResult, ProbeStudy
from tests.pricing import priced_space
from tests.unit.probing_cases import REQUEST

UNCOVERED = "mi300x-192gb"  # no training run on its family was measured


def searched(gpu: str) -> tuple[Pricer, Candidates]:
    job = read_job({**REQUEST, "cluster": {"gpu": gpu, "num_gpus": 8}})
    pricer, space = priced_space(job)
    return pricer, enumerate_candidates(pricer, space)


@pytest.fixture(scope="module")
def found() -> tuple[Pricer, Candidates]:
    return searched(UNCOVERED)


@pytest.fixture(scope="module")
def candidates(found: tuple[Pricer, Candidates]) -> Candidates:
    return found[1]


@pytest.fixture(scope="module")
def kernels(found: tuple[Pricer, Candidates]) -> StudyKernels:
    return StudyKernels.of(*found)


def timings(kernels: StudyKernels, kind: str, factor: float) -> list[KernelTiming]:
    """Kernels of a kind, so many times as slow as predicted alone."""
    return [
        KernelTiming(shape=shape, seconds=factor * seconds)
        for shape, seconds in kernels.alone.items()
        if shape.kind == kind
    ]


def posterior_of(
    candidates: Candidates, observed: tuple[ObservedEffect, ...] = ()
) -> StudyPosterior:
    """What a study that has heard of these effects expects at first."""
    study = ProbeStudy(candidates, StudySettings(observed=observed))
    return study.knowledge.posterior()


def test_a_launch_holds_what_no_timing_covers(kernels: StudyKernels) -> None:
    probes = kernels.probes([], num_gpus=1, start_seconds=10.0)
    (alone,) = (probe for probe in probes if probe.name == ALONE)
    assert {"gemm bf16", "attention bf16"} <= {look.name for look in alone.effects}
    assert {shape.num_gpus for shape in alone.kernels} == {1}
    assert 10.0 < alone.gpu_seconds < 40.0
    assert kernels.probes(list(kernels.used), num_gpus=8, start_seconds=10.0) == ()
    some = [shape for shape in kernels.used if shape.kind != "attention"]
    (rest,) = kernels.probes(some, num_gpus=1, start_seconds=10.0)
    assert {look.name for look in rest.effects} == {"attention bf16"}


def test_collectives_go_together_and_cost_all_their_gpus(kernels: StudyKernels) -> None:
    """The shipped directions hardly move collectives in a node, so here they are made to."""
    network = np.zeros((1, len(KNOBS)))
    network[0, PLACE["intra_node"]] = 0.5
    found = replace(kernels, directions=network).probes([], num_gpus=8, start_seconds=10.0)
    together = next(probe for probe in found if probe.name == TOGETHER)
    gpus = max(shape.num_gpus for shape in together.kernels)
    assert 2 <= gpus <= 8
    assert together.gpu_seconds > gpus * 10.0


def test_slow_products_slow_layouts(kernels: StudyKernels, candidates: Candidates) -> None:
    after = posterior_of(candidates, kernels.observed(timings(kernels, "gemm", 1.2)))
    moved = after.log_seconds - posterior_of(candidates).log_seconds
    assert 0.03 < moved.mean() < np.log(1.2)
    assert (moved > 0.0).all()
    assert np.ptp(moved) > 0.0, "not all by the same"


def test_products_that_training_runs_have_seen_say_little_more() -> None:
    """On Hopper: faster ones alone only mean that a step costs them more."""
    pricer, candidates = searched("h100-sxm-80gb")
    kernels = StudyKernels.of(pricer, candidates)
    after = posterior_of(candidates, kernels.observed(timings(kernels, "gemm", 1.2)))
    assert np.abs(after.log_seconds - posterior_of(candidates).log_seconds).max() < 0.01


def test_as_predicted_is_news_too(kernels: StudyKernels, candidates: Candidates) -> None:
    observed = kernels.observed(timings(kernels, "attention-backward", 1.0))
    assert [one.log_ratio for one in observed] == pytest.approx([0.0])
    narrowed, wide = (posterior_of(candidates, seen).time.variance for seen in (observed, ()))
    assert (narrowed <= wide + 1e-12).all()
    assert (narrowed < 0.99 * wide).any()


def test_what_the_calibration_has_learnt_is_no_news(
    found: tuple[Pricer, Candidates], kernels: StudyKernels
) -> None:
    pricer, candidates = found
    told = timings(kernels, "gemm", 1.2)
    job = read_job({**REQUEST, "cluster": {"gpu": UNCOVERED, "num_gpus": 8}})

    def taught_by(*some: KernelTiming) -> StudyKernels:
        learnt = learn(pricer.calibration, [], [KernelRun(job=job, timings=some)])
        here = Pricer.build(pricer.model, pricer.cluster, pricer.training, learnt)
        return StudyKernels.of(here, candidates)

    after, partly = taught_by(*told), taught_by(told[0])
    assert after.observed(told) == ()
    assert partly.observed(told[1:]) != (), "nobody knows of the first"
    assert partly.observed(told) == (), "others of the kind are off by what the first was off by"
    assert after.observed(timings(kernels, "attention", 1.2)) != ()


def test_a_timing_of_no_candidates_kernel_says_nothing(kernels: StudyKernels) -> None:
    shape = next(shape for shape in kernels.used if shape.kind == "gemm")
    other = replace(shape, sizes=tuple((name, 7 * size) for name, size in shape.sizes))
    assert kernels.observed([KernelTiming(shape=other, seconds=1.0)]) == ()


def divided(candidates: Candidates) -> Candidates:
    """Predicted almost alike, and apart by the calibration's directions."""
    close = np.log(10.0) + 1e-4 * np.arange(len(candidates))
    return replace(candidates, prior=replace(candidates.prior, log_seconds=close))


def test_kernels_that_could_decide_go_first(kernels: StudyKernels, candidates: Candidates) -> None:
    probes = kernels.probes([], num_gpus=1, start_seconds=10.0)
    study = ProbeStudy(divided(candidates), StudySettings(micro_probes=probes))
    asked = study.ask()
    assert (asked.fidelity, asked.micro) == ("micro", probes[0])
    assert "could change the winner" in asked.reason
    study.tell(asked, MicroResult(observed=(), gpu_seconds=9.0, message="torch is missing"))
    following = study.ask()
    assert following.fidelity == "probed", "what failed is not asked twice"
    assert study.spent.gpu_seconds == 9.0
    resumed = ProbeStudy(divided(candidates), StudySettings(gpu_seconds_before=9.0))
    assert resumed.spent.gpu_seconds == 9.0
