"""Checkpoints, goodput, price and energy of whole runs: properties, a simulated twin, messages."""

import random
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibration.intervals import TimeSpread
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.run import goodput as run
from planner.cost.run import whole_run
from planner.intake.jobs import read_job
from planner.plan.explain import next_bottleneck, regret
from planner.specs.estimate import Estimate, TimeBreakdown
from planner.specs.job import SearchSpec
from planner.specs.plan_comparisons import Regret
from planner.specs.run import CheckpointMode, RunEstimate
from tests.conftest import job_values
from tests.pricing import priced

MODES: tuple[CheckpointMode, ...] = ("sync", "async", "async-pinned")
STEP = np.array([5.0])
Given = dict[str, Any]
PLAIN = job_values("llama3-8b", "h100-sxm-80gb", 64, 8192, 256)
AS_IT_IS: Given = {}


def case(
    cluster: Given = AS_IT_IS, training: Given = AS_IT_IS, **layout: Any
) -> tuple[Pricer, LayoutBatch]:
    given = {"cluster": cluster, "training": training}
    values = {key: {**PLAIN[key], **more} for key, more in given.items()}
    job = read_job({**PLAIN, **values, "layout": layout or {"dp_shard": 64}})
    return priced(job)


def answer(cluster: Given = AS_IT_IS, training: Given = AS_IT_IS) -> RunEstimate:
    """Of steps of 5 s, 4 s of which are compute."""
    pricer, batch = case(cluster, training)
    return whole_run.run_estimate(pricer, whole_run.run_columns(pricer, batch, STEP, 0.8 * STEP), 0)


def saving(interval_steps: int, mode: str) -> Given:
    return {"checkpoint": {"interval_steps": interval_steps, "mode": mode}}


def saves(mode: Any, *given: Given, **layout: Any) -> run.Saves:
    return run.save_costs(*case(*given, **layout), STEP, mode)


@pytest.mark.parametrize(("training", "layout", "per_parameter"), [
    ({}, {"dp_shard": 64}, 12.0),
    ({"optimizer": "adamw-bf16-states"}, {"dp_shard": 64}, 8.0),
    ({}, {"dp_shard": 64, "master_dtype": "bfloat16"}, 6.0),
    ({"trainer": "megatron"}, {"dp_shard": 64, "zero_stage": 1}, 14.0),
])  # fmt: skip
def test_bytes_saved_follow_optimizer_and_dtypes(
    training: Given, layout: Given, per_parameter: float
) -> None:
    pricer, batch = case(AS_IT_IS, training, **layout)
    found = run.save_costs(pricer, batch, STEP, "sync")
    assert found.saved_bytes[0] == pytest.approx(pricer.model.total_parameters() * per_parameter)
    assert found.gpu_bytes[0] * 64 == pytest.approx(found.saved_bytes[0], rel=1e-3)


def test_the_fullest_rank_decides_what_is_staged() -> None:
    found = saves("async", dp_shard=16, pp=4, zero_stage=2)
    mean = found.saved_bytes[0] / 64
    assert 1.05 * mean < found.gpu_bytes[0] < 1.5 * mean
    replicated = saves("async", dp_replicate=8, dp_shard=8)
    assert replicated.gpu_bytes[0] == pytest.approx(found.saved_bytes[0] / 8, rel=1e-3)


def test_seconds_of_a_save_by_hand() -> None:
    pricer, batch = case({"storage_bandwidth": "10 GB/s", "pcie_bandwidth": "50 GB/s"})
    total, prepare = pricer.model.total_parameters() * 12.0, run.PREPARE_SECONDS
    sync, paged, pinned = (run.save_costs(pricer, batch, STEP, mode) for mode in MODES)
    assert sync.blocking_seconds[0] == pytest.approx(prepare + total / 10e9)
    assert sync.upload_seconds[0] == 0.0
    copied = total / 64 / (50e9 * run.PAGEABLE_SHARE)
    assert paged.blocking_seconds[0] == pytest.approx(prepare + copied, rel=1e-3)
    assert paged.upload_seconds[0] == pytest.approx(total / 10e9)
    assert pinned.blocking_seconds[0] == pytest.approx(prepare)
    # A step shorter than the copy hides only itself: the optimizer must wait for the rest.
    hurried = run.save_costs(pricer, batch, np.array([0.01]), MODES[-1]).blocking_seconds[0]
    assert hurried == pytest.approx(prepare + total / 64 / 50e9 - 0.01, rel=1e-3)


def test_fast_storage_leaves_the_writers_as_the_limit() -> None:
    found = saves("sync", {"storage_bandwidth": "10 TB/s"})
    each = found.saved_bytes[0] / (64 * run.WRITER_BYTES_PER_SECOND)
    assert found.write_seconds[0] == pytest.approx(each)


def test_staged_copies_need_host_memory() -> None:
    sync, staged = saves("sync"), saves("async")
    assert sync.host_bytes[0] == 0.0
    assert staged.host_bytes[0] == pytest.approx(8 * staged.gpu_bytes[0])
    offloaded, share = (
        saves("sync", dp_shard=64, cpu_offload=True, **given).host_bytes[0]
        for given in ({}, {"optimizer_offload_fraction": 0.25})
    )
    assert offloaded == pytest.approx(8 * staged.gpu_bytes[0] * 16 / 12)
    assert share == pytest.approx(0.25 * offloaded)


def test_too_little_host_memory_is_said() -> None:
    small = answer({"host_memory": "4 GiB"}, saving(500, "async"))
    assert not small.checkpoint.fits_host_memory
    assert any("host memory" in line and "mode sync" in line for line in small.warnings)
    assert answer({"host_memory": "64 GiB"}).warnings == []
    assert answer({"host_memory": "4 GiB"}, saving(500, "sync")).checkpoint.fits_host_memory
    left_open = answer({"host_memory": "4 GiB"})
    assert (left_open.checkpoint.mode, left_open.warnings) == ("sync", [])
    assert "sync saves at" in left_open.assumptions[0]
    assert "no room" in left_open.assumptions[0]


def test_upload_longer_than_the_interval_delays_the_next_save() -> None:
    slow = {"storage_bandwidth": "1 GB/s"}  # 96 GB: 96 s
    found = answer(slow, saving(10, "async"))
    assert found.checkpoint.delay_seconds == pytest.approx(found.checkpoint.upload_seconds - 50.0)
    assert any("training waits" in line for line in found.warnings)
    assert any("every 10 steps leaves" in line for line in found.warnings)
    assert answer(slow, saving(20, "async")).checkpoint.delay_seconds == 0.0
    assert answer(slow).checkpoint.delay_seconds == 0.0


def test_without_checkpoints_and_tokens_the_best_async_interval_and_a_trillion_are_said() -> None:
    found = answer()
    assert (found.checkpoint.given, found.checkpoint.mode) == (False, "async")
    assert found.checkpoint.interval_steps == found.checkpoint.optimal_interval_steps
    assert any("no training.checkpoint given" in line for line in found.assumptions)
    assert any("no training.total_tokens" in line for line in found.assumptions)
    assert (found.total_tokens, found.tokens) == (None, 1e12)
    stated = answer(training=saving(100, "sync"))
    kept = stated.checkpoint
    assert (kept.given, kept.mode, kept.interval_steps) == (True, "sync", 100)
    assert not any("training.checkpoint" in line for line in stated.assumptions)


def test_shares_sum_to_one() -> None:
    for hours in (1e-3, 1.0, 100.0, 50_000.0, 1e12):
        found = answer({"mtbf_gpu_hours": hours})
        parts = (found.goodput, found.saving_share, found.lost_share, found.restarting_share)
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= -1e-9


def test_a_job_that_fails_faster_than_it_saves_stays_finite() -> None:
    found = answer({"mtbf_gpu_hours": 1e-6})
    assert 0.0 < found.goodput < 1e-6
    assert np.isfinite(found.time_to_train_seconds)
    assert np.isfinite(found.co2_grams)
    assert any("interruption every" in line for line in found.warnings)
    assert RunEstimate.model_validate_json(found.model_dump_json()) == found


TRAININGS = st.just(AS_IT_IS) | st.builds(saving, st.integers(1, 5000), st.sampled_from(MODES))


def two_of(least: float, most: float) -> Any:
    """Two values, the larger one first."""
    pairs = st.lists(st.floats(least, most), min_size=2, max_size=2, unique=True)
    return pairs.map(lambda pair: sorted(pair, reverse=True))


@given(two_of(1.0, 1e7), TRAININGS)
def test_more_failures_never_raise_goodput(hours: list[float], training: Given) -> None:
    rare, frequent = (answer({"mtbf_gpu_hours": value}, training) for value in hours)
    assert frequent.goodput <= rare.goodput * (1 + 1e-12)
    assert frequent.time_to_train_seconds >= rare.time_to_train_seconds * (1 - 1e-12)


@given(two_of(1e8, 1e13), TRAININGS)
def test_more_storage_bandwidth_is_never_slower(bandwidths: list[float], training: Given) -> None:
    fast, slow = (answer({"storage_bandwidth": value}, training) for value in bandwidths)
    assert fast.time_to_train_seconds <= slow.time_to_train_seconds * (1 + 1e-12)
    assert fast.cost <= slow.cost * (1 + 1e-12)


def saves_of(blocking: float, upload: float, write: float) -> run.Saves:
    one = np.ones(1)
    seconds = {"blocking_seconds": blocking * one, "upload_seconds": upload * one}
    held = dict.fromkeys(("saved_bytes", "gpu_bytes", "host_bytes"), one)
    return run.Saves(**held, **seconds, write_seconds=write * one, sync=one < 0)


@given(
    blocking=st.floats(0.05, 500.0),
    upload=st.floats(0.0, 300.0),
    mtbf=st.floats(100.0, 1e6),
    step=st.floats(0.5, 60.0),
)
def test_the_optimal_interval_minimises_the_waste(
    blocking: float, upload: float, mtbf: float, step: float
) -> None:
    found, steps_of = saves_of(blocking, upload, upload), np.array([step])
    best = run.progress(found, steps_of, mtbf, None)
    center, within = int(best.optimal_steps[0]), int(upload / step)
    others = {1, 2, center - 1, center + 1, center // 2, center * 2, within, within + 1}
    for steps in others - {0}:
        goodput = run.progress(found, steps_of, mtbf, steps).goodput[0]
        assert goodput <= best.goodput[0] * (1 + 1e-9), steps


def test_work_since_the_last_finished_upload_is_lost_too() -> None:
    slow, fast = (
        run.progress(saves_of(1.0, upload, 90.0), 2 * STEP, 9000.0, 30).lost[0]
        for upload in (90.0, 0.0)
    )
    assert slow - fast == pytest.approx(90 / 9000, rel=0.1)


def test_daly_is_close_to_the_exact_optimum_and_newton_is_there() -> None:
    blocking, mtbf = np.array([0.1, 5.0, 60.0, 300.0]), np.array([1e6, 1440.0 * 60, 3600.0, 900.0])
    exact = run.best_interval_seconds(blocking, mtbf)
    np.testing.assert_allclose(run.daly_interval_seconds(blocking, mtbf), exact, rtol=5e-3)
    np.testing.assert_allclose(1.0 - exact / mtbf, np.exp(-(exact + blocking) / mtbf), rtol=1e-9)


def _simulated(useful: float, blocked: float, upload: float, mtbf: float, restart: float) -> float:
    """The twin: failures drawn one by one; a restart resumes from the last uploaded save."""
    chance = random.Random(7)
    done, wall, period = 0.0, 0.0, useful + blocked
    for _ in range(40_000):
        alive = chance.expovariate(1.0 / mtbf)
        wall += alive
        done += max(0, int((alive - upload) // period)) * useful
        while (again := chance.expovariate(1.0 / mtbf)) < restart:
            wall += again
        wall += restart
    return done / wall


@pytest.mark.parametrize(
    ("useful", "blocked", "up"), [(300.0, 30.0, 0.0), (300.0, 3.0, 120.0), (120.0, 3.0, 100.0)]
)
def test_goodput_agrees_with_simulated_failures(useful: float, blocked: float, up: float) -> None:
    mtbf, restart = 7200.0, 600.0
    columns = (np.array([value]) for value in (useful, blocked, mtbf, restart + up))
    simulated = _simulated(useful, blocked, up, mtbf, restart)
    assert run.goodput(*columns)[0] == pytest.approx(simulated, abs=0.006)


def test_time_price_and_energy_follow_from_tokens() -> None:
    one, two = (answer(training={"total_tokens": tokens}) for tokens in (1e11, 2e11))
    assert one.total_tokens == one.tokens == 1e11
    assert one.tokens_per_second == pytest.approx(256 * 8192 / 5.0 * one.goodput)
    assert one.time_to_train_seconds == pytest.approx(1e11 / one.tokens_per_second)
    assert one.gpu_hours == pytest.approx(64 * one.time_to_train_seconds / 3600)
    assert one.cost == pytest.approx(2.5 * one.gpu_hours)
    joules = one.mean_watts_per_gpu * 64 * one.time_to_train_seconds
    assert one.energy_joules == pytest.approx(joules)
    assert one.expected_failures == pytest.approx(one.gpu_hours / 50_000)
    for name in ("time_to_train_seconds", "cost", "energy_joules", "co2_grams"):
        assert getattr(two, name) == pytest.approx(2 * getattr(one, name)), name


def test_price_carbon_and_power_limit_count() -> None:
    base = answer()
    assert answer({"price_per_gpu_hour": 5.0}).cost == pytest.approx(2 * base.cost)
    assert answer({"carbon_intensity": 44.5}).co2_grams == pytest.approx(base.co2_grams / 10)
    assert answer({"power_limit": "350 W"}).energy_joules < 0.75 * base.energy_joules
    idle, busy = (whole_run.run_columns(*case(), STEP, np.array([s])) for s in (1.0, 5.0))
    assert idle.bill.joules[0] < busy.bill.joules[0]


def test_columns_equal_single_rows() -> None:
    pricer, first = case(dp_shard=64)
    _, second = case(dp_shard=16, pp=4, zero_stage=2)
    rows = LayoutBatch.concatenate([second, second, first])
    both = whole_run.run_columns(pricer, rows, np.array([7.0, 7.0, 5.0]), np.full(3, 4.0))
    for row, (batch, step) in enumerate(((second, 7.0), (second, 7.0), (first, 5.0))):
        alone = whole_run.run_columns(pricer, batch, np.array([step]), np.array([4.0]))
        assert whole_run.run_estimate(pricer, both, row) == whole_run.run_estimate(pricer, alone, 0)


def regret_of(scores: list[float], errors: np.ndarray, objective: str) -> Regret | None:
    return regret(np.array(scores), errors, SearchSpec.model_validate({"objective": objective}), 6)


def independent(count: int, sd: float) -> np.ndarray:
    """Covariance of deviations that layouts do not share, beside one that all of them do."""
    return covariance(TimeSpread(loadings=np.full((1, count), 0.3), own_sd=np.full(count, sd)))


def covariance(spread: TimeSpread) -> np.ndarray:
    """Of layouts whose own errors have nothing in common."""
    return spread.loadings.T @ spread.loadings + np.diag(spread.own_sd**2)


def test_regret_of_two_layouts_in_closed_form() -> None:
    # Two equal predictions: either is better with one half. z of the difference: log(1.1) / (0.067
    #     sqrt 2) = 1.006, Q = 0.157.
    even = regret_of([1.0, 1.0], independent(2, 0.067), "throughput")
    apart = regret_of([1.0, 1.1], independent(2, 0.067), "cost")
    assert even.probability_other_better == pytest.approx(0.5, abs=0.03)
    assert apart.probability_other_better == pytest.approx(0.157, abs=0.02)
    # E max(0, sd z) = sd / sqrt(2 pi) with sd = 0.067 sqrt 2.
    # (of the logarithm; of the share itself, E exp(max(0, sd z)) - 1 = e^(sd^2 / 2) Q(-sd) + 1/2 -
    # 1).
    sd = 0.067 * np.sqrt(2)
    share = np.exp(sd**2 / 2) * NormalDist().cdf(sd) - 0.5
    assert even.expected_share == pytest.approx(share, rel=0.05)
    assert np.log1p(even.share_95) == pytest.approx(1.6449 * 0.067 * np.sqrt(2), rel=0.06)
    assert even.time_sd == pytest.approx(np.hypot(0.3, 0.067))
    assert even.correlation == pytest.approx(0.3**2 / (0.3**2 + 0.067**2), abs=0.01)
    assert "cheapest" in apart.statement
    assert regret_of([1.0], independent(1, 0.1), "throughput") is None
    assert regret_of([1.0, 2.0], independent(2, 0.1), "memory") is None


def test_regret_holds_if_eigenvectors_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = np.random.default_rng(1).normal(size=(6, 6)) * 0.05
    given = np.linspace(1.0, 1.05, 6).tolist(), loads @ loads.T + 0.001 * np.eye(6), "throughput"
    found, before = np.linalg.eigh, regret_of(*given)

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = found(matrix)
        return values, vectors * (-1.0) ** np.arange(len(values))

    monkeypatch.setattr(np.linalg, "eigh", turned)
    assert regret_of(*given).statement == before.statement


def test_what_layouts_load_on_alike_is_no_regret() -> None:
    loadings = (np.array([row]) for row in ([0.2, 0.2, 0.2], [0.2, -0.2, 0.0]))
    errors = (covariance(TimeSpread(loadings=row, own_sd=np.zeros(3))) for row in loadings)
    same, different = (regret_of([1.0, 1.03, 1.08], one, "time") for one in errors)
    assert same.expected_share == same.probability_other_better == 0.0
    assert different.expected_share > 0.03


def _estimate(**exposed: float) -> Estimate:
    none = dict.fromkeys(("recompute_seconds", "optimizer_seconds", "other_seconds"), 0.0)
    waits = {"tp": 2.0, "fsdp": 0.0, **exposed}
    time = TimeBreakdown(
        compute_seconds=6.0, exposed_communication_seconds=waits, bubble_seconds=1.0, **none
    )
    named = {"model_version": "t", "calibration_id": "t"}
    return Estimate(valid=True, violations=[], step_seconds=time.total(), time=time, **named)


def test_next_bottleneck_is_the_second_largest_cost() -> None:
    sentence = next_bottleneck(_estimate())
    assert sentence.startswith("without tensor-parallel communication a step would take 7 s")
    assert "(1.29 times as fast)" in sentence
    assert sentence.endswith("the largest loss would then be the pipeline bubble, 14%")
    sentence = next_bottleneck(_estimate(fsdp=1.5))
    assert sentence.endswith("be FSDP gathers and scatters, 18%")
