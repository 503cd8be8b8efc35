"""How a request is answered: directly, or by emulated ranks."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from planner.api.jobs.leases import Observer
from planner.api.jobs.probes import enqueue, probe_of_job, run_probe
from planner.api.jobs.study_probes import StudyProbes
from planner.api.wiring import Wiring
from planner.errors import ProbeError, SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.probes.campaign import PROXY_GPUS, Campaign, ProbeAnswer, ProbeRequest
from planner.probes.emulate import ranks_of_interest
from planner.probes.launch import Watch
from planner.probes.pools.protocol import Capacity
from planner.probes.protocol import (
    Environment,
    Failed,
    FailureKind,
    MeasuredRun,
    Outcome,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
    RankMemory,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.measurement import Measured, Measurement
from tests.conftest import job_values

World = Callable[[ProbeTask], Outcome]


def job(
    model: str, num_gpus: int, layout: dict[str, Any], *, seq_len: int = 4096, batch: int = 4
) -> dict[str, Any]:
    """Of TorchTitan 0.3, which shards in any layout: 0.2 computes in fp32 where TP is alone."""
    titan = {"trainer_version": "0.3.0", "chunked_loss": False}
    many = num_gpus * batch
    return job_values(model, "h100-sxm-80gb", num_gpus, seq_len, many, layout=layout, **titan)


EIGHT = job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"})
PIPELINED = job("llama3-70b", 64, {"dp_shard": 2, "tp": 8, "pp": 4, "ac": "full"}, batch=8)


class FakePool:
    """A pool whose runs come out as `world` says."""

    def __init__(self, devices: int, world: World) -> None:
        self.devices, self.world, self.tasks = devices, world, []

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        return Capacity(num_devices=self.devices, device="cuda", why_none="it has none")

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        self.tasks.append(task)
        return ProbeResult(
            task=task,
            outcome=self.world(task),
            environment=Environment(python="3", torch="2.11"),
            started_at="2026-11-21T12:00:00+00:00",
            wall_seconds=10.0,
            gpu_seconds=10.0 * task.num_processes(),
        )


def as_predicted(slower: float = 1.0) -> World:
    """Everything as the cost model says, times a constant factor; an emulated rank takes the busy
    seconds of its estimate.
    """

    def outcome(task: ProbeTask) -> Outcome:
        estimate, rank = estimate_job(task.parsed()), task.emulate_rank or 0
        whole = task.emulate_rank is None
        seconds = slower * float((estimate.step_seconds or 0.0) if whole else _busy(estimate))
        memory = RankMemory(
            rank=rank,
            peak_allocated_bytes=round(estimate.peak_allocated_bytes or 0.0) - rank,
            peak_reserved_bytes=round(estimate.peak_reserved_bytes or 0.0) - rank,
            device_used_bytes=round(estimate.device_bytes or 0.0) - rank,
        )
        each = [seconds * spread for spread in (0.99, 1.0, 1.01)]
        return MeasuredRun(
            step_seconds=None if task.fake_tensors else seconds,
            step_seconds_each=[] if task.fake_tensors else each,
            losses=[2.0], gradient_norms=[1.0], memory=[memory],
        )  # fmt: skip

    return outcome


def _busy(estimate: Estimate) -> float:
    assert estimate.time is not None
    names = ("compute", "host", "recompute", "optimizer", "other")
    return sum(getattr(estimate.time, f"{name}_seconds") for name in names)


def ask(values: dict[str, Any], pool: FakePool, **options: Any) -> ProbeAnswer:
    request, parsed = ProbeRequest.from_user({"job": values, **options})
    return Campaign.of(request, parsed, "probe-1", pool.capacity(parsed.cluster)).run(pool, Watch())


def numbers_of(answer: ProbeAnswer) -> Measured:
    return answer.measurements[0].measured


class TestLongSteps:
    """An 8B on 8 H100 with 4.2 million tokens a step: about 64 s a step."""

    JOB: ClassVar = job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"}, seq_len=8192, batch=64)

    def test_torchtitan_runs_two_smaller_batches_and_the_step_follows_from_both(self) -> None:
        pool = FakePool(8, as_predicted(1.1))
        answer = ask(self.JOB, pool, trainer="torchtitan")
        batches = [task.parsed().training.global_batch_size for task in pool.tasks]
        assert [task.id for task in pool.tasks] == ["probe-1-few", "probe-1-more"]
        assert batches == [16, 32]
        assert sum(task.time_limit_seconds for task in pool.tasks) == pytest.approx(600.0)
        numbers, estimate = numbers_of(answer), estimate_job(read_job(self.JOB))
        assert answer.measurements[0].job.training.global_batch_size == 512
        assert answer.measurements[0].id == "probe-1"
        assert numbers.step_seconds == pytest.approx(1.1 * estimate.step_seconds, rel=0.01)
        rate = estimate.tokens_per_second_per_gpu / 1.1
        assert numbers.tokens_per_second_per_gpu == pytest.approx(rate, rel=0.01)
        assert numbers.gpu_seconds == 160.0
        assert (numbers.model_extra or {})["timed_microbatches"] == [2, 4]

    def test_the_reference_program_which_ends_by_the_clock_runs_once(self) -> None:
        pool = FakePool(8, as_predicted())
        ask(self.JOB, pool)
        assert [(task.id, task.steps) for task in pool.tasks] == [("probe-1", 10)]

    def test_a_step_that_fits_runs_whole_and_is_repeated_as_often_as_fits(self) -> None:
        few = job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"}, seq_len=65536)
        for values, limit, whole in ((self.JOB, 3000.0, True), (few, 900.0, False)):
            pool = FakePool(8, as_predicted())
            ask(values, pool, trainer="torchtitan", time_limit_seconds=limit)
            (task,) = pool.tasks
            each = estimate_job(read_job(values)).step_seconds or 0.0
            assert ((task.warmup_steps, task.steps) == (3, 10)) is whole
            assert (task.warmup_steps + task.steps) * each < limit - 90.0
            assert task.warmup_steps >= 1

    def test_short_steps_are_repeated_until_clocks_have_settled(self) -> None:
        """A run of two seconds reads 4% fast; TorchTitan's number of steps is set at the start."""
        values = job("llama3.2-1b", 8, {"dp_shard": 8}, batch=1)
        pool = FakePool(8, as_predicted())
        ask(values, pool, trainer="torchtitan")
        each = estimate_job(read_job(values)).step_seconds or 0.0
        assert 20.0 <= pool.tasks[0].steps * each < 20.0 + each

    @pytest.mark.parametrize("trainer", ["torchtitan", "reference"])
    def test_a_limit_that_cannot_hold_them_says_so_before_the_start(self, trainer: str) -> None:
        pool = FakePool(8, as_predicted())
        with pytest.raises(ProbeError, match=r"3 steps .* do not fit into .*time_limit_seconds of"):
            ask(self.JOB, pool, trainer=trainer, time_limit_seconds=0.5)
        assert pool.tasks == []


class TestDirect:
    def test_what_fits_runs_as_it_is(self) -> None:
        pool = FakePool(8, as_predicted(1.1))
        (measurement,) = ask(EIGHT, pool, steps=7, seed=3).measurements
        (task,) = pool.tasks
        assert (task.id, task.steps, task.seed, task.emulate_rank) == ("probe-1", 7, 3, None)
        measured = measurement.measured
        assert (measurement.id, measured.rung, measured.steps) == ("probe-1", "probed", 3)

    def test_a_failure_measures_nothing_and_memory_that_ran_out_does(self) -> None:
        hang = Failed(kind=FailureKind.HANG, rank=3, message="waited")
        full = OutOfMemory(rank=2, attempted_bytes=5, allocated_bytes=6, message="out")
        answer = ask(EIGHT, FakePool(8, lambda task: hang))
        assert (answer.measurements, answer.failed is not None) == ((), True)
        answer = ask(EIGHT, FakePool(8, lambda task: full))
        assert (numbers_of(answer).status, answer.failed is not None) == ("oom", True)

    @pytest.mark.parametrize(("devices", "values", "words"), [
        (0, EIGHT, "no NVIDIA GPU to probe on: it has none; use --emulate"),
        (4, PIPELINED, "the layout needs 64 GPUs, this machine has 4; use --emulate")])  # fmt: skip
    def test_a_pool_that_cannot_hold_the_layout_says_what_would_do(
        self, devices: int, values: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ProbeError, match=words):
            ask(values, FakePool(devices, as_predicted()))


class TestEmulated:
    def test_a_rank_of_each_kind_of_stage(self) -> None:
        def ranks(num_gpus: int, layout: dict[str, Any], **cluster: Any) -> tuple[int, ...]:
            values = job("llama3-70b", num_gpus, layout)
            values["cluster"] |= cluster
            parsed = read_job(values)
            assert parsed.layout is not None
            return ranks_of_interest(parsed.layout, parsed.cluster)

        assert ranks(256, {"dp_shard": 32, "tp": 8}) == (0,)
        assert ranks(256, {"dp_shard": 8, "tp": 8, "pp": 4}) == (0, 128, 192)
        assert ranks(32, {"dp_shard": 2, "tp": 8, "pp": 2}) == (0, 16)
        order = ["tp", "pp", "cp", "dp_shard", "dp_replicate"]
        assert ranks(256, {"dp_shard": 8, "tp": 8, "pp": 4}, rank_order=order) == (0, 16, 24)

    def test_what_it_does_not_wait_for_comes_from_the_model_and_says_so(self) -> None:
        pool = FakePool(1, as_predicted())
        numbers = numbers_of(ask(PIPELINED, pool, emulate=True))
        assert [task.emulate_rank for task in pool.tasks] == [0, 32, 48]
        estimate, extra = estimate_job(read_job(PIPELINED)), numbers.model_extra or {}
        assert numbers.step_seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
        assert extra["measured_seconds"] == pytest.approx(_busy(estimate))
        exposed = sum(estimate.time.exposed_communication_seconds.values())
        assert extra["from_model"]["communication_seconds"] == pytest.approx(exposed)
        assert numbers.rung == "emulated"
        assert numbers.peak_reserved_bytes == round(estimate.peak_reserved_bytes)
        # NCCL's buffers of three groups, which one rank alone never makes
        buffers = extra["communicator_bytes"]
        assert buffers == pytest.approx(3 * 256 * 2**20)
        device = round(estimate.device_bytes) + buffers
        assert numbers.device_bytes == pytest.approx(device, abs=1.0)
        assert numbers.gpu_seconds == 30.0
        rate = estimate.tokens_per_second_per_gpu
        assert numbers.tokens_per_second_per_gpu == pytest.approx(rate)

    def test_slower_compute_stretches_the_bubble_too(self) -> None:
        estimate = estimate_job(read_job(PIPELINED))
        numbers = numbers_of(ask(PIPELINED, FakePool(1, as_predicted(2.0)), emulate=True))
        bubble = (numbers.model_extra or {})["from_model"]["bubble_seconds"]
        assert bubble == pytest.approx(2 * estimate.time.bubble_seconds)

    def test_without_a_gpu_there_is_memory_and_no_time(self) -> None:
        pool = FakePool(0, as_predicted())
        numbers = numbers_of(ask(EIGHT, pool, emulate=True))
        assert (pool.tasks[0].fake_tensors, pool.tasks[0].device) == (True, "cpu")
        assert (numbers.step_seconds, numbers.tokens_per_second_per_gpu) == (None, None)
        assert numbers.peak_allocated_bytes


def test_a_request_that_an_older_release_stored_is_read() -> None:
    values = {"job": EIGHT, "steps": 7, PROXY_GPUS: 4}
    request, read = ProbeRequest.of_record(values)
    assert (request.steps, read.cluster.num_gpus) == (7, 8)
    with pytest.raises(SpecError, match=PROXY_GPUS):  # nobody can ask for it now
        ProbeRequest.from_user(values)


def test_a_proxy_run_that_an_older_release_queued_is_not_made_whole(wiring: Wiring) -> None:
    asked = probe_of_job({"job": EIGHT}, allow_files=False)
    (record,) = enqueue(wiring, asked, max_attempts=1, ours=True)
    older = replace(record, request={**record.request, PROXY_GPUS: 4})
    pool = FakePool(8, as_predicted())
    ended = run_probe(wiring, older, Watch(), pool=pool)
    assert (ended.state, pool.tasks) == ("failed", [])
    assert "proxy runs are made no more" in (ended.message or "")


def test_what_an_older_release_extrapolated_teaches_a_study_nothing(wiring: Wiring) -> None:
    own = read_job(EIGHT)
    numbers = Measured(status="ok", rung="imitated", step_seconds=4.0, gpu_seconds=9.0)
    made = "2026-01-01T00:00:00+00:00"
    wiring.measurements.add([Measurement(id="m-1", created_at=made, job=own, measured=numbers)])
    claimed: Any = SimpleNamespace(record=SimpleNamespace(asked_by=None, id="plan-1"))
    probes = StudyProbes(wiring=wiring, job=own, observer=Observer(), claimed=claimed)
    assert list(probes.measured_before()) == []
    record: Any = SimpleNamespace(request={}, measurement_id="m-1")
    found = probes._measurement(record)
    assert found is not None
    assert (found.measured.step_seconds, found.measured.gpu_seconds) == (None, 9.0)
