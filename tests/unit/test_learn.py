"""Own runs sharpen the calibration of their trainer and GPU, for other models too."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.fit import fingerprint
from planner.calibration.intervals import time_spread
from planner.calibration.kernels import KernelShape, KernelTiming, alone, shape_seconds
from planner.calibration.update import KernelRun, learn
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from tests.conftest import job_values
from tests.pricing import priced, pricer_of
from tests.pricing import step_seconds as predicted

SLOWER = 1.25
HOPPER, NEW_FAMILY = "h100-sxm-80gb", "mi300x-192gb"  # no training run on the latter was measured
SHIPPED = shipped_calibration()


def job(model: str = "llama3-8b", **layout: object) -> Job:
    return read_job(job_values(model, HOPPER, 8, 8192, 64, layout=layout))


def spread_of(asked: Job, calibration: Calibration) -> float:
    pricer, batch = priced(asked, calibration)
    return float(time_spread(pricer, batch, pricer.price(batch)).sd[0])


def measurement(name: str, asked: Job, factor: float = SLOWER, **fields: object) -> Measurement:
    numbers = {"rung": "probed", "step_seconds": factor * predicted(asked), **fields}
    measured = Measured.model_validate(numbers)
    return Measurement(id=name, created_at="2026-01-01T00:00:00Z", job=asked, measured=measured)


def waits(asked: Job, calibration: Calibration, factor: float) -> bool:
    """Whether the plan says that a layout so far off waits for a second one."""
    told = estimate_job(asked, calibration).learned
    return f"{factor:.2f} times its prediction waits for a second one" in told.statement


RUNS = [measurement("a", job()), measurement("b", job(ac="full")), measurement("c", job(tp=2))]


def test_a_slower_machine_is_learnt_and_serves_and_makes_surer_another_model() -> None:
    learnt, other = learn(SHIPPED, RUNS), job("qwen3-8b")
    before, after = predicted(other), predicted(other, learnt)
    assert 1.10 * before < after < 1.02 * SLOWER * before
    assert learnt.id.startswith(f"{SHIPPED.id}+3-")
    assert spread_of(other, learnt) < spread_of(other, SHIPPED)


@pytest.mark.parametrize("percent", [-30, -14, 8, 14, 40])
def test_one_run_of_a_stack_that_is_uniformly_off_corrects_the_rest(percent: int) -> None:
    """The rest, other models and layouts, is then off by less than 27% of it."""
    off = 1.0 + percent / 100.0
    learnt = learn(SHIPPED, [measurement("a", job(), off)])
    for other in (job(ac="full"), job(tp=2), job("qwen3-8b"), job("llama3-8b", compile=True)):
        rest = np.log(off * predicted(other) / predicted(other, learnt))
        assert abs(rest) < 0.27 * abs(np.log(off)), other.layout


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_layout_that_is_far_off_moves_no_other_and_waits_for_a_second(factor: float) -> None:
    far = [measurement(name, job(), factor) for name in "ab"]
    others = (job(ac="full"), job("qwen3-8b"))
    for near in (1.05, factor**-0.5):
        learnt = learn(SHIPPED, [*far, measurement("c", job(tp=2), near)])
        for other in others:
            assert predicted(other, learnt) == pytest.approx(predicted(other), rel=0.05)
        assert waits(job(ac="full"), learnt, factor)
    both = learn(SHIPPED, [*far, measurement("e", job(ac="full"), factor)])
    assert not both.waiting
    for other in others:
        assert predicted(other, both) == pytest.approx(factor * predicted(other), rel=0.15)


FLOAT8, EXPERTS = {"precision": "float8-rowwise", "compile": True}, "deepseek-v2-lite"


@pytest.mark.parametrize("factor", [0.6, 2.0])
def test_the_first_layout_of_a_dense_unit_moves_that_unit_alone_however_far(factor: float) -> None:
    plain, rest = job("qwen3-8b"), job("qwen3-8b", tp=2, **FLOAT8)
    far = measurement("d", job(**FLOAT8), factor)
    learnt = learn(SHIPPED, [far])
    assert predicted(rest, learnt) == pytest.approx(factor * predicted(rest, SHIPPED), rel=0.15)
    assert predicted(plain, learnt) == pytest.approx(predicted(plain, SHIPPED), rel=1e-9)
    near = [measurement("n", job(), 1.05), measurement("m", job(tp=2), 1.05)]
    known, both = learn(SHIPPED, near), learn(SHIPPED, [*near, far])
    assert predicted(plain, both) == pytest.approx(predicted(plain, known), rel=1e-9)
    # a unit's sum of offsets is as sure as one run makes it, the other units' no surer
    titan = ("torchtitan", "hopper", "torchtitan on h100-sxm-80gb")
    units = [f"{titan[-1]}, {name}, dense" for name in ("float8-rowwise", "bf16")]
    sd = [float(learnt.offsets(*titan, [unit]).covariance[0, 0]) ** 0.5 for unit in units]
    assert sd[0] < 0.06
    assert sd[1] == pytest.approx(np.hypot(SHIPPED.stack_sd, SHIPPED.unit_sd))


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0])
def test_one_far_layout_of_a_unit_with_experts_waits_for_a_second(factor: float) -> None:
    """Published runs with experts differ within a unit by more than units do."""
    other = job(EXPERTS, tp=2)
    runs = [measurement(ac, job(EXPERTS, ac=ac), factor) for ac in ("selective-op", "full")]
    learnt, both = learn(SHIPPED, runs[:1]), learn(SHIPPED, runs)
    assert predicted(other, learnt) == pytest.approx(predicted(other, SHIPPED), rel=1e-9)
    assert learnt.own_runs == {}
    assert waits(other, learnt, factor)
    assert predicted(other, both) == pytest.approx(factor * predicted(other), rel=0.15)
    near = learn(SHIPPED, [measurement("n", job(EXPERTS), 1.1)])
    assert predicted(other, near) > 1.05 * predicted(other)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_far_layouts_with_experts_move_dense_ones_little_and_widen_them(factor: float) -> None:
    experts = [measurement(ac, job(EXPERTS, ac=ac), factor) for ac in ("selective-op", "full")]
    learnt, mine, qwen = learn(SHIPPED, experts), job(EXPERTS, tp=2), job("qwen3-8b")
    assert predicted(mine, learnt) == pytest.approx(factor * predicted(mine), rel=0.15)

    def width(one: Job, calibration: Calibration) -> float:
        return float(np.ptp(np.log(estimate_job(one, calibration).interval.step_seconds)))

    for other in (job(), qwen):
        assert abs(np.log(predicted(other, learnt) / predicted(other))) < 0.2
        assert width(other, learnt) > 1.5 * width(other, SHIPPED)
    dense = [measurement(f"tp {tp}", job(tp=tp), factor) for tp in (1, 2)]
    both = learn(SHIPPED, [*experts, *dense])
    assert predicted(qwen, both) == pytest.approx(factor * predicted(qwen), rel=0.15)


def test_what_one_run_teaches_is_shown_and_stays_with_its_stack() -> None:
    learnt = learn(SHIPPED, [measurement("a", job(), 1.08)])
    told = estimate_job(job(ac="full"), learnt).learned
    assert (told.runs, told.runs_alike) == (1, 0)
    assert told.factor == pytest.approx(1.08, abs=0.03)
    assert told.statement == f"calibrated by 1 run of yours: x{told.factor:.2f}"
    other_format = estimate_job(job(precision="float8-rowwise", compile=True), learnt).learned
    assert (other_format.runs, other_format.runs_alike) == (0, 1)
    assert 1.0 < other_format.factor < told.factor
    assert estimate_job(job(ac="full")).learned is None
    elsewhere = read_job({**job().request, "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8}})
    assert estimate_job(elsewhere, learnt).learned is None
    # by the knobs alone, which one run moves by part
    moved = np.log(predicted(elsewhere, learnt) / predicted(elsewhere))
    assert abs(moved) < 0.5 * np.log(1.08)


def test_the_interval_after_own_runs_is_that_of_the_exact_conditional() -> None:
    """Knobs and offset are each as unsure as before, but hardly their sum: the layout that ran."""
    learnt = learn(SHIPPED, [measurement("a", job(), 1.08)])
    own, run = SHIPPED.own_run_sd, SHIPPED.run_sd
    shared = spread_of(job(), SHIPPED) ** 2 - run**2
    exact = np.sqrt(shared * own**2 / (shared + own**2) + run**2)
    assert spread_of(job(), learnt) == pytest.approx(exact, rel=0.15)


def test_a_second_import_goes_on_from_the_first() -> None:
    first = learn(SHIPPED, RUNS[:1])
    both, together = learn(first, RUNS[1:]), learn(SHIPPED, RUNS)
    (unit,) = both.own_runs
    assert (both.own_runs, together.own_runs) == ({unit: 3}, {unit: 3})
    assert predicted(job(), both) == pytest.approx(predicted(job(), together), rel=0.01)


def test_repeats_count_once_and_are_averaged() -> None:
    once = learn(SHIPPED, [measurement("a", job(), 1.2)])
    runs = [measurement("a", job(), 1.1), measurement("b", job(), 1.2**2 / 1.1)]
    noisy = learn(SHIPPED, runs)
    assert noisy.shifts == pytest.approx(once.shifts, abs=1e-9)
    assert noisy.id != once.id


def test_same_runs_same_calibration_whatever_their_order() -> None:
    first, second = learn(SHIPPED, RUNS), learn(SHIPPED, RUNS[::-1])
    assert first.id == second.id
    assert np.array_equal(first.shifts, second.shifts)


def test_what_tells_no_time_teaches_nothing() -> None:
    silent = [
        measurement("a", job(), status="oom"),
        measurement("b", job(), rung="emulated"),
        measurement("d", job(), rung="imitated"),
        Measurement(id="c", created_at="", job=job(), measured=Measured(rung="probed")),
    ]
    assert learn(SHIPPED, silent) is SHIPPED
    assert learn(SHIPPED, []) is SHIPPED


def test_another_trainer_moves_less_than_the_one_that_ran() -> None:
    learnt = learn(SHIPPED, RUNS)
    own = np.log(predicted(job(), learnt) / predicted(job()))
    foreign = on("a100-sxm-80gb", "llama3-8b", trainer="megatron")
    assert abs(np.log(predicted(foreign, learnt) / predicted(foreign))) < 0.5 * own
    assert learnt.fitted == SHIPPED.fitted


def test_runs_that_it_was_fitted_to_teach_nothing() -> None:
    two = {fingerprint(run.job, run.measured.step_seconds or 0.0) for run in RUNS[:2]}
    told = replace(SHIPPED, fitted=SHIPPED.fitted | two)
    assert learn(told, RUNS[:2]) is told
    assert learn(told, RUNS).id.startswith(f"{told.id}+1-")


def kernel_run(gpu: str, factor: float) -> KernelRun:
    """Products of a layer, so many times as slow as predicted alone."""
    machine = on(gpu, "llama3-8b")
    sizes = [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)]
    shapes = [KernelShape.of("gemm", m=m, n=n, k=k) for m, n, k in sizes]
    pairs = zip(shapes, shape_seconds(alone(pricer_of(machine)), shapes), strict=True)
    timings = tuple(KernelTiming(shape=s, seconds=factor * float(t)) for s, t in pairs)
    return KernelRun(job=machine, timings=timings)


def on(gpu: str, model: str = "qwen3-8b", **training: object) -> Job:
    return read_job(job_values(model, gpu, 8, 8192, 64, layout={}, **training))


def test_slow_products_alone_are_learnt_where_no_run_was_measured_and_hardly_elsewhere() -> None:
    moved = {}
    for gpu in (NEW_FAMILY, HOPPER):
        learnt = learn(SHIPPED, [], [kernel_run(gpu, SLOWER)])
        moved[gpu] = np.log(predicted(on(gpu), learnt) / predicted(on(gpu)))
    assert 0.05 < moved[NEW_FAMILY] < np.log(SLOWER)
    assert abs(moved[HOPPER]) < 0.02


def test_kernels_as_predicted_move_nothing_and_make_surer() -> None:
    job = on(NEW_FAMILY)
    learnt = learn(SHIPPED, [], [kernel_run(NEW_FAMILY, 1.0)])
    assert predicted(job, learnt) == pytest.approx(predicted(job), rel=1e-6)
    assert spread_of(job, learnt) < 0.95 * spread_of(job, SHIPPED)


def test_what_no_kernel_could_be_so_far_off_teaches_no_more_than_its_reach() -> None:
    job = on(NEW_FAMILY)
    taught = [learn(SHIPPED, [], [kernel_run(NEW_FAMILY, factor)]) for factor in (50.0, 1.25)]
    far, near = (predicted(job, calibration) for calibration in taught)
    assert predicted(job) < far < near


def test_the_newest_timing_of_a_kernel_counts_and_timings_name_the_calibration() -> None:
    slow, right = kernel_run(NEW_FAMILY, SLOWER), kernel_run(NEW_FAMILY, 1.0)
    learnt = learn(SHIPPED, [], [slow, right])
    assert predicted(on(NEW_FAMILY), learnt) == pytest.approx(predicted(on(NEW_FAMILY)), rel=1e-6)
    assert learnt.id.startswith(f"{SHIPPED.id}+0-")
    assert learnt.id != learn(SHIPPED, [], [slow]).id
    assert learn(SHIPPED, [], [KernelRun(job=on(NEW_FAMILY), timings=())]) is SHIPPED


def test_kernels_and_runs_teach_together() -> None:
    run = measurement("a", on(HOPPER, "llama3-8b"))
    both = learn(SHIPPED, [run], [kernel_run(HOPPER, SLOWER)])
    assert both.id.startswith(f"{SHIPPED.id}+1-")
    assert predicted(on(HOPPER), both) > 1.05 * predicted(on(HOPPER))
    assert both.place == 0.0
