"""Own runs sharpen the calibration of their trainer and GPU, for other models too."""

from dataclasses import replace

import numpy as np
import pytest

from planner.calibration.fit import fingerprint
from planner.calibration.intervals import time_spread
from planner.calibration.kernels import KernelShape, KernelTiming, alone, shape_seconds
from planner.calibration.update import KernelRun, learn
from planner.columns import LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement

SLOWER = 1.25


def job(model: str = "llama3-8b", **layout: object) -> Job:
    training = {"seq_len": 8192, "global_batch_size": 64}
    return read_job(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
            "training": training,
            "layout": layout,
        }
    )


def predicted(asked: Job, calibration: object = None) -> float:
    pricer = Pricer.build(asked.model, asked.cluster, asked.training, calibration)  # type: ignore[arg-type]
    return float(pricer.price(LayoutBatch.from_layouts([asked.layout])).step_seconds[0])


def measurement(name: str, asked: Job, factor: float = SLOWER, **fields: object) -> Measurement:
    numbers = {"rung": "probed", "step_seconds": factor * predicted(asked), **fields}
    return Measurement(
        id=name,
        created_at="2026-01-01T00:00:00+00:00",
        job=asked,
        measured=Measured.model_validate(numbers),
    )


RUNS = [measurement("a", job()), measurement("b", job(ac="full")), measurement("c", job(tp=2))]


def test_a_slower_machine_is_learnt_and_serves_another_model() -> None:
    learnt = learn(shipped_calibration(), RUNS)
    other = job("qwen3-8b")
    before, after = predicted(other), predicted(other, learnt)
    assert 1.10 * before < after < 1.02 * SLOWER * before
    assert learnt.id.startswith(f"{shipped_calibration().id}+3-")


@pytest.mark.parametrize("percent", [-30, -14, 8, 14, 40])
def test_one_run_of_a_stack_that_is_uniformly_off_corrects_the_rest(percent: int) -> None:
    """The rest, other models and layouts, is then off by less than 27% of it."""
    shipped = shipped_calibration()
    off = 1.0 + percent / 100.0
    learnt = learn(shipped, [measurement("a", job(), off)])
    for other in (job(ac="full"), job(tp=2), job("qwen3-8b"), job("llama3-8b", compile=True)):
        rest = np.log(off * predicted(other) / predicted(other, learnt))
        assert abs(rest) < 0.27 * abs(np.log(off)), other.layout


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_layout_that_is_far_off_moves_no_other_and_waits_for_a_second(factor: float) -> None:
    shipped = shipped_calibration()
    far = [measurement("a", job(), factor), measurement("b", job(), factor)]
    near = [measurement("c", job(tp=2), 1.05)]
    others = (job(ac="full"), job("qwen3-8b"))
    for lone in ([*far, *near], [*far, measurement("e", job(tp=2), factor**-0.5)]):
        learnt = learn(shipped, lone)
        for other in others:
            assert predicted(other, learnt) == pytest.approx(predicted(other), rel=0.05)
        told = estimate_job(job(ac="full"), learnt).learned
        assert told is not None
        assert f"{factor:.2f} times its prediction waits for a second one" in told.statement
    both = learn(shipped, [*far, measurement("e", job(ac="full"), factor)])
    assert not both.waiting
    for other in others:
        assert predicted(other, both) == pytest.approx(factor * predicted(other), rel=0.15)


FLOAT8: dict[str, object] = {"precision": "float8-rowwise", "compile": True}


@pytest.mark.parametrize("factor", [0.6, 2.0])
def test_the_first_layout_of_a_dense_unit_moves_that_unit_alone_however_far_it_is(
    factor: float,
) -> None:
    shipped, plain, rest = shipped_calibration(), job("qwen3-8b"), job("qwen3-8b", tp=2, **FLOAT8)
    far = measurement("d", job(**FLOAT8), factor)
    learnt = learn(shipped, [far])
    assert predicted(rest, learnt) == pytest.approx(factor * predicted(rest, shipped), rel=0.15)
    assert predicted(plain, learnt) == pytest.approx(predicted(plain, shipped), rel=1e-9)
    near = [measurement("n", job(), 1.05), measurement("m", job(tp=2), 1.05)]
    known, both = learn(shipped, near), learn(shipped, [*near, far])
    assert predicted(plain, both) == pytest.approx(predicted(plain, known), rel=1e-9)
    # a unit's sum of offsets is as sure as one run makes it, the other units' no surer
    titan = ("torchtitan", "hopper", "torchtitan on h100-sxm-80gb")
    units = [f"{titan[-1]}, {name}, dense" for name in ("float8-rowwise", "bf16")]
    sd = [float(learnt.offsets(*titan, [unit]).covariance[0, 0]) ** 0.5 for unit in units]
    assert sd[0] < 0.06
    assert sd[1] == pytest.approx(np.hypot(shipped.stack_sd, shipped.unit_sd))


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0])
def test_the_first_layout_of_a_unit_with_experts_waits_for_a_second_if_it_is_far_off(
    factor: float,
) -> None:
    """Published runs with experts differ within a unit by more than units do."""
    shipped, other = shipped_calibration(), job("deepseek-v2-lite", tp=2)
    runs = [measurement("d", job("deepseek-v2-lite"), factor),
            measurement("e", job("deepseek-v2-lite", ac="full"), factor)]  # fmt: skip
    learnt, both = learn(shipped, runs[:1]), learn(shipped, runs)
    assert predicted(other, learnt) == pytest.approx(predicted(other, shipped), rel=1e-9)
    assert learnt.own_runs == {}
    told = estimate_job(job("deepseek-v2-lite", tp=2), learnt).learned
    assert told is not None
    assert f"{factor:.2f} times its prediction waits for a second one" in told.statement
    assert predicted(other, both) == pytest.approx(factor * predicted(other), rel=0.15)
    near = learn(shipped, [measurement("n", job("deepseek-v2-lite"), 1.1)])
    assert predicted(other, near) > 1.05 * predicted(other)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_far_layouts_with_experts_move_dense_models_little_and_widen_them(
    factor: float,
) -> None:
    shipped = shipped_calibration()
    experts = [job("deepseek-v2-lite"), job("deepseek-v2-lite", ac="full")]
    learnt = learn(shipped, [measurement(one.layout.ac, one, factor) for one in experts])
    mine = job("deepseek-v2-lite", tp=2)
    assert predicted(mine, learnt) == pytest.approx(factor * predicted(mine), rel=0.15)

    def width(one: Job, calibration: Calibration) -> float:
        interval = estimate_job(one, calibration).interval
        assert interval is not None
        return float(np.log(interval.step_seconds[1] / interval.step_seconds[0]))

    for other in (job(), job("qwen3-8b")):
        assert abs(np.log(predicted(other, learnt) / predicted(other))) < 0.2
        assert width(other, learnt) > 1.5 * width(other, shipped)
    both = learn(
        shipped,
        [measurement(str(n), one, factor) for n, one in enumerate((*experts, job(), job(tp=2)))],
    )
    assert predicted(job("qwen3-8b"), both) == pytest.approx(
        factor * predicted(job("qwen3-8b")), rel=0.15
    )


def test_what_one_run_teaches_is_shown_and_stays_with_its_stack() -> None:
    learnt = learn(shipped_calibration(), [measurement("a", job(), 1.08)])
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
    shipped = shipped_calibration()
    learnt = learn(shipped, [measurement("a", job(), 1.08)])
    sd = {}
    for name, calibration in (("before", shipped), ("after", learnt)):
        pricer = Pricer.build(job().model, job().cluster, job().training, calibration)
        batch = LayoutBatch.from_layouts([job().layout])  # type: ignore[list-item]
        sd[name] = float(time_spread(pricer, batch, pricer.price(batch)).sd[0])
    own, run = shipped.own_run_sd, shipped.run_sd
    shared = sd["before"] ** 2 - run**2
    exact = np.sqrt(shared * own**2 / (shared + own**2) + run**2)
    assert sd["after"] == pytest.approx(exact, rel=0.15)


def test_a_second_import_goes_on_from_the_first() -> None:
    first = learn(shipped_calibration(), RUNS[:1])
    both, together = learn(first, RUNS[1:]), learn(shipped_calibration(), RUNS)
    (unit,) = both.own_runs
    assert (both.own_runs, together.own_runs) == ({unit: 3}, {unit: 3})
    assert predicted(job(), both) == pytest.approx(predicted(job(), together), rel=0.01)


def test_learning_makes_surer() -> None:
    asked = job("qwen3-8b")
    batch = LayoutBatch.from_layouts([asked.layout])
    spreads = []
    for calibration in (shipped_calibration(), learn(shipped_calibration(), RUNS)):
        pricer = Pricer.build(asked.model, asked.cluster, asked.training, calibration)
        spreads.append(float(time_spread(pricer, batch, pricer.price(batch)).sd[0]))
    assert spreads[1] < spreads[0]


def test_repeats_count_once_and_are_averaged() -> None:
    once = learn(shipped_calibration(), [measurement("a", job(), 1.2)])
    runs = [measurement("a", job(), 1.1), measurement("b", job(), 1.2**2 / 1.1)]
    noisy = learn(shipped_calibration(), runs)
    assert noisy.shifts == pytest.approx(once.shifts, abs=1e-9)
    assert noisy.id != once.id


def test_same_runs_same_calibration_whatever_their_order() -> None:
    first, second = learn(shipped_calibration(), RUNS), learn(shipped_calibration(), RUNS[::-1])
    assert first.id == second.id
    assert np.array_equal(first.shifts, second.shifts)


def test_what_tells_no_time_teaches_nothing() -> None:
    shipped = shipped_calibration()
    silent = [
        measurement("a", job(), status="oom"),
        measurement("b", job(), rung="emulated"),
        measurement("d", job(), rung="imitated"),
        Measurement(id="c", created_at="", job=job(), measured=Measured(rung="probed")),
    ]
    assert learn(shipped, silent) is shipped
    assert learn(shipped, []) is shipped


def test_another_trainer_moves_less_than_the_one_that_ran() -> None:
    learnt = learn(shipped_calibration(), RUNS)
    own = np.log(predicted(job(), learnt) / predicted(job()))
    training = {"seq_len": 8192, "global_batch_size": 64, "trainer": "megatron"}
    foreign = read_job(
        {
            "model": "llama3-8b",
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
            "training": training,
            "layout": {},
        }
    )
    assert abs(np.log(predicted(foreign, learnt) / predicted(foreign))) < 0.5 * own
    assert replace(learnt, id="x").fitted == shipped_calibration().fitted


def test_runs_that_it_was_fitted_to_teach_nothing() -> None:
    calibration = shipped_calibration()
    told = replace(
        calibration,
        fitted=calibration.fitted
        | {fingerprint(run.job, run.measured.step_seconds or 0.0) for run in RUNS[:2]},
    )
    assert learn(told, RUNS[:2]) is told
    assert learn(told, RUNS).id.startswith(f"{told.id}+1-")


NEW_FAMILY = "mi300x-192gb"  # no training run on it was measured


def kernel_run(gpu: str, factor: float) -> KernelRun:
    """Products of a layer, so many times as slow as predicted alone."""
    machine = on(gpu, "llama3-8b")
    sizes = [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)]
    shapes = [KernelShape.of("gemm", m=m, n=n, k=k) for m, n, k in sizes]
    pricer = Pricer.build(machine.model, machine.cluster, machine.training)
    seconds = shape_seconds(alone(pricer), shapes)
    return KernelRun(
        job=machine,
        timings=tuple(
            KernelTiming(shape=s, seconds=factor * float(t))
            for s, t in zip(shapes, seconds, strict=True)
        ),
    )


def on(gpu: str, model: str = "qwen3-8b") -> Job:
    training = {"seq_len": 8192, "global_batch_size": 64}
    return read_job(
        {"model": model, "cluster": {"gpu": gpu, "num_gpus": 8}, "training": training, "layout": {}}
    )


def test_slow_products_alone_are_learnt_where_no_run_was_measured_and_hardly_where_many_were() -> (
    None
):
    moved = {}
    for gpu in (NEW_FAMILY, "h100-sxm-80gb"):
        learnt = learn(shipped_calibration(), [], [kernel_run(gpu, SLOWER)])
        moved[gpu] = np.log(predicted(on(gpu), learnt) / predicted(on(gpu)))
    assert 0.05 < moved[NEW_FAMILY] < np.log(SLOWER)
    assert abs(moved["h100-sxm-80gb"]) < 0.02


def test_kernels_as_predicted_move_nothing_and_make_surer() -> None:
    job = on(NEW_FAMILY)
    learnt = learn(shipped_calibration(), [], [kernel_run(NEW_FAMILY, 1.0)])
    assert predicted(job, learnt) == pytest.approx(predicted(job), rel=1e-6)
    spreads = []
    for calibration in (shipped_calibration(), learnt):
        pricer = Pricer.build(job.model, job.cluster, job.training, calibration)
        batch = LayoutBatch.from_layouts([job.layout])  # type: ignore[list-item]
        spreads.append(float(time_spread(pricer, batch, pricer.price(batch)).sd[0]))
    assert spreads[1] < 0.95 * spreads[0]


def test_what_no_kernel_could_be_so_far_off_teaches_no_more_than_its_reach() -> None:
    job = on(NEW_FAMILY)
    far, near = (
        predicted(job, learn(shipped_calibration(), [], [kernel_run(NEW_FAMILY, factor)]))
        for factor in (50.0, 1.25)
    )
    assert predicted(job) < far < near


def test_the_newest_timing_of_a_kernel_counts_and_timings_name_the_calibration() -> None:
    slow, right = kernel_run(NEW_FAMILY, SLOWER), kernel_run(NEW_FAMILY, 1.0)
    learnt = learn(shipped_calibration(), [], [slow, right])
    assert predicted(on(NEW_FAMILY), learnt) == pytest.approx(predicted(on(NEW_FAMILY)), rel=1e-6)
    assert learnt.id.startswith(f"{shipped_calibration().id}+0-")
    assert learnt.id != learn(shipped_calibration(), [], [slow]).id
    silent = [KernelRun(job=on(NEW_FAMILY), timings=())]
    assert learn(shipped_calibration(), [], silent) is shipped_calibration()


def test_kernels_and_runs_teach_together() -> None:
    run = measurement("a", on("h100-sxm-80gb", "llama3-8b"))
    both = learn(shipped_calibration(), [run], [kernel_run("h100-sxm-80gb", SLOWER)])
    assert both.id.startswith(f"{shipped_calibration().id}+1-")
    assert predicted(on("h100-sxm-80gb"), both) > 1.05 * predicted(on("h100-sxm-80gb"))
    assert both.place == 0.0
