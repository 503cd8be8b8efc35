"""How a request is answered: directly, by emulated ranks, or by scaled-down proxy runs,
with the error that is claimed.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from planner.errors import ProbeError, SpecError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.rules import violations
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Estimate
from planner.specs.measurement import Measured
from probes.campaign import Campaign, ProbeAnswer, ProbeRequest
from probes.emulate import ranks_of_interest
from probes.launch import Watch
from probes.pools.capacity import Capacity
from probes.preflight import Need
from probes.protocol import (
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
from probes.proxy_runs import MEDIAN_FACTOR, extrapolate, fewer_layers, period, plan_proxy_runs

World = Callable[[ProbeTask], Outcome]


def job(
    model: str, num_gpus: int, layout: dict[str, Any], *, seq_len: int = 4096, batch: int = 4
) -> dict[str, Any]:
    """Of TorchTitan 0.3, which shards in any layout: 0.2 computes in fp32 where TP is alone."""
    training = {
        "seq_len": seq_len,
        "global_batch_size": num_gpus * batch,
        "trainer_version": "0.3.0",
        "chunked_loss": False,
    }
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus},
        "training": training,
        "layout": layout,
    }


class FakePool:
    """A pool whose runs come out as `world` says."""

    name = "fake"

    def __init__(self, devices: int, world: World) -> None:
        self.devices, self.world, self.tasks = devices, world, []

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        return Capacity(num_devices=self.devices, device="cuda", why_none="it has none")

    def check(self, need: Need, *, wait: bool = True) -> None:
        """Nothing is missing."""

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

    tasks: list[ProbeTask]


def as_predicted(slower: float = 1.0, bigger: float = 1.0) -> World:
    """Everything as the cost model says, times constant factors; an emulated rank takes the busy
    seconds of its estimate.
    """

    def outcome(task: ProbeTask) -> Outcome:
        estimate = estimate_job(task.parsed())
        seconds = (
            _busy(estimate)
            if task.emulate_rank is not None
            else float(estimate.step_seconds or 0.0)
        )
        rank = task.emulate_rank or 0
        memory = RankMemory(
            rank=rank,
            peak_allocated_bytes=_bytes(estimate.peak_allocated_bytes, bigger) - rank,
            peak_reserved_bytes=_bytes(estimate.peak_reserved_bytes, bigger) - rank,
            device_used_bytes=_bytes(estimate.device_bytes, bigger) - rank,
        )
        each = [seconds * slower * spread for spread in (0.99, 1.0, 1.01)]
        return MeasuredRun(
            step_seconds=None if task.fake_tensors else seconds * slower,
            step_seconds_each=[] if task.fake_tensors else each,
            tokens_per_second_per_gpu=None,
            mfu=None,
            losses=[2.0],
            gradient_norms=[1.0],
            memory=[memory],
        )

    return outcome


def _busy(estimate: Estimate) -> float:
    assert estimate.time is not None
    parts = estimate.time
    return (
        parts.compute_seconds
        + parts.host_seconds
        + parts.recompute_seconds
        + parts.optimizer_seconds
        + parts.other_seconds
    )


def _bytes(value: float | None, factor: float) -> int:
    assert value is not None
    return round(value * factor)


def ask(values: dict[str, Any], pool: FakePool, **options: Any) -> ProbeAnswer:
    request, parsed = ProbeRequest.from_user({"job": values, **options})
    return Campaign.of(request, parsed, "probe-1", pool.capacity(parsed.cluster)).run(pool, Watch())


def numbers_of(answer: ProbeAnswer) -> Measured:
    return answer.measurements[0].measured


class TestDirect:
    def test_what_fits_runs_as_it_is(self) -> None:
        pool = FakePool(8, as_predicted(1.1))
        answer = ask(job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"}), pool, steps=7, seed=3)
        assert [(task.id, task.steps, task.seed, task.emulate_rank) for task in pool.tasks] == [
            ("probe-1", 7, 3, None)
        ]
        (measurement,) = answer.measurements
        assert (measurement.id, measurement.measured.rung, measurement.measured.steps) == (
            "probe-1",
            "probed",
            3,
        )

    def test_a_failure_measures_nothing_and_memory_that_ran_out_does(self) -> None:
        failed = FakePool(8, lambda task: Failed(kind=FailureKind.HANG, rank=3, message="waited"))
        answer = ask(job("llama3-8b", 8, {"dp_shard": 8}), failed)
        assert (answer.measurements, answer.failed is not None) == ((), True)
        full = FakePool(
            8, lambda task: OutOfMemory(rank=2, attempted_bytes=5, allocated_bytes=6, message="out")
        )
        answer = ask(job("llama3-8b", 8, {"dp_shard": 8}), full)
        assert (numbers_of(answer).status, answer.failed is not None) == ("oom", True)

    def test_no_device_at_all_is_one_line(self) -> None:
        with pytest.raises(
            ProbeError, match="no NVIDIA GPU to probe on: it has none; use --emulate"
        ):
            ask(job("llama3-8b", 8, {"dp_shard": 8}), FakePool(0, as_predicted()))


class TestEmulated:
    def test_a_rank_of_each_kind_of_stage(self) -> None:
        def ranks(layout: dict[str, Any], num_gpus: int, **cluster: Any) -> tuple[int, ...]:
            values = job("llama3-70b", num_gpus, layout)
            values["cluster"] |= cluster
            parsed = read_job(values)
            assert parsed.layout is not None
            return ranks_of_interest(parsed.layout, parsed.cluster)

        assert ranks({"dp_shard": 32, "tp": 8}, 256) == (0,)
        assert ranks({"dp_shard": 8, "tp": 8, "pp": 4}, 256) == (0, 128, 192)
        assert ranks({"dp_shard": 2, "tp": 8, "pp": 2}, 32) == (0, 16)
        order = ["tp", "pp", "cp", "dp_shard", "dp_replicate"]
        assert ranks({"dp_shard": 8, "tp": 8, "pp": 4}, 256, rank_order=order) == (0, 16, 24)

    def test_what_it_does_not_wait_for_comes_from_the_model_and_says_so(self) -> None:
        values = job("llama3-70b", 64, {"dp_shard": 2, "tp": 8, "pp": 4, "ac": "full"}, batch=8)
        pool = FakePool(1, as_predicted())
        answer = ask(values, pool, emulate=True)
        assert [task.emulate_rank for task in pool.tasks] == [0, 32, 48]
        numbers, estimate = numbers_of(answer), estimate_job(read_job(values))
        extra = numbers.model_extra or {}
        assert numbers.step_seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
        assert extra["measured_seconds"] == pytest.approx(_busy(estimate))
        assert extra["from_model"]["communication_seconds"] == pytest.approx(
            sum(estimate.time.exposed_communication_seconds.values())
        )
        assert (numbers.rung, numbers.peak_reserved_bytes) == (
            "emulated",
            _bytes(estimate.peak_reserved_bytes, 1.0),
        )
        assert numbers.gpu_seconds == 30.0
        assert numbers.tokens_per_second_per_gpu == pytest.approx(
            estimate.tokens_per_second_per_gpu
        )

    def test_slower_compute_stretches_the_bubble_too(self) -> None:
        values = job("llama3-70b", 64, {"dp_shard": 2, "tp": 8, "pp": 4, "ac": "full"}, batch=8)
        estimate = estimate_job(read_job(values))
        numbers = numbers_of(ask(values, FakePool(1, as_predicted(2.0)), emulate=True))
        assert (numbers.model_extra or {})["from_model"]["bubble_seconds"] == pytest.approx(
            2 * estimate.time.bubble_seconds
        )

    def test_without_a_gpu_there_is_memory_and_no_time(self) -> None:
        pool = FakePool(0, as_predicted())
        numbers = numbers_of(
            ask(job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"}), pool, emulate=True)
        )
        assert (pool.tasks[0].fake_tensors, pool.tasks[0].device) == (True, "cpu")
        assert (numbers.step_seconds, numbers.tokens_per_second_per_gpu) == (None, None)
        assert numbers.peak_allocated_bytes


BIG = [
    ("llama3-8b", 64, {"dp_shard": 64, "ac": "full"}, 1),
    ("llama3-8b", 32, {"dp_replicate": 4, "dp_shard": 8, "ac": "full"}, 8),
    ("llama3-70b", 256, {"dp_shard": 32, "tp": 8, "ac": "full"}, 8),
    ("llama3-70b", 512, {"dp_shard": 16, "tp": 8, "pp": 4, "ac": "full"}, 32),
    ("mixtral-8x7b", 64, {"dp_shard": 64, "ep": 8, "ac": "full"}, 8),
    ("gemma2-9b", 64, {"dp_shard": 64, "ac": "full"}, 1),
    ("deepseek-v2-lite", 64, {"dp_shard": 64, "ep": 8, "ac": "full"}, 8),
]


class TestImitated:
    @pytest.mark.parametrize(
        ("model", "num_gpus", "layout", "devices"),
        [BIG[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in BIG[1:])],
    )
    def test_small_runs_are_legal_fit_and_differ_by_equal_layers(
        self, model: str, num_gpus: int, layout: dict[str, Any], devices: int
    ) -> None:
        big = read_job(job(model, num_gpus, layout))
        proxy = plan_proxy_runs(big, devices)
        for small in proxy.runs:
            assert violations(small.layout, small.model, small.cluster, small.training) == []
            assert small.cluster.num_gpus <= devices
            assert estimate_job(small).fits
            assert (small.layout.tp, small.layout.cp, small.layout.pp, small.layout.ac) == (
                big.layout.tp,
                big.layout.cp,
                big.layout.pp,
                big.layout.ac,
            )
            here, there = (
                one.training.global_batch_size / (one.layout.dp_degree if one.layout else 1)
                for one in (small, big)
            )
            assert here == there
        depths = [small.model.num_hidden_layers for small in proxy.runs] + [
            big.model.num_hidden_layers
        ]
        assert all(
            (deeper - shallower) % period(big.model) == 0 for shallower, deeper in pairwise(depths)
        )
        for shallower, deeper in pairwise(proxy.runs):
            added = [
                kind for kind in deeper.model.layer_kinds()[shallower.model.num_hidden_layers :]
            ]
            assert set(added) <= set(big.model.layer_kinds()[-period(big.model) :])

    @pytest.mark.parametrize(
        ("model", "num_gpus", "layout", "devices"),
        [BIG[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in BIG[1:])],
    )
    def test_in_a_world_like_the_model_it_is_right_within_its_own_error(
        self, model: str, num_gpus: int, layout: dict[str, Any], devices: int
    ) -> None:
        values = job(model, num_gpus, layout)
        numbers = numbers_of(ask(values, FakePool(devices, as_predicted())))
        estimate, claimed = (
            estimate_job(read_job(values)),
            (numbers.model_extra or {})["relative_error"],
        )
        for key in ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"):
            error = abs(getattr(numbers, key) / getattr(estimate, key) - 1.0)
            assert error <= 2 * claimed[key] + 1e-9, (key, error, claimed[key])
            assert claimed[key] < 0.35, (key, claimed[key])
        assert numbers.rung == "imitated"

    def test_slower_compute_shows_in_full(self) -> None:
        values = job("llama3-8b", 32, {"dp_replicate": 4, "dp_shard": 8, "ac": "full"})
        estimate = estimate_job(read_job(values))
        numbers = numbers_of(ask(values, FakePool(8, as_predicted(1.3))))
        assert estimate.step_seconds is not None
        proxy = plan_proxy_runs(read_job(values), 8)
        small = estimate_job(proxy.runs[0]).step_seconds
        assert small is not None
        between_replicas = estimate.step_seconds - small  # no run shows it: the model adds it
        assert numbers.step_seconds == pytest.approx(1.3 * small + between_replicas, rel=0.01)

    def test_noise_is_magnified_by_the_distance(self) -> None:
        # On one node: what more nodes add is the model's own doubt, and drowns the noise.
        values = job("llama3-8b", 8, {"dp_shard": 8, "ac": "full"})
        values["training"] |= {"trainer_version": "0.2.2"}
        proxy = plan_proxy_runs(read_job(values), 1)
        assert len(proxy.runs) == 2

        def claimed(spread: float) -> float:
            runs = []
            for small in proxy.runs:
                seconds = estimate_job(small).step_seconds
                assert seconds is not None
                runs.append(
                    Measured(step_seconds=seconds, step_seconds_sd=spread * seconds, steps=10)
                )
            guess = extrapolate(proxy, runs, ["a", "b"])
            assert guess.peak_allocated_bytes is None
            return float((guess.model_extra or {})["relative_error"]["step_seconds"])

        assert claimed(0.2) > 2 * claimed(0.0) > 0
        of_one_run = 0.2 * MEDIAN_FACTOR / math.sqrt(10)
        assert claimed(0.2) ** 2 - claimed(0.0) ** 2 > (1.2 * of_one_run) ** 2

    def test_its_small_runs_are_measurements_of_their_own(self) -> None:
        answer = ask(
            job("llama3-8b", 64, {"dp_shard": 64, "ac": "full"}), FakePool(1, as_predicted())
        )
        whole, *small = answer.measurements
        assert (whole.id, whole.job.cluster.num_gpus, len(small)) == ("probe-1", 64, 2)
        assert [one.measured.rung for one in small] == ["probed", "probed"]
        assert [one.job.model.num_hidden_layers for one in small] == [
            one["num_layers"] for one in (whole.measured.model_extra or {})["imitated_by"]
        ]
        assert "proxy runs on 1 of 64 GPUs, 32 layers by" in answer.notes[0]

    def test_a_small_run_out_of_memory_says_nothing_of_the_big_one(self) -> None:
        pool = FakePool(
            1, lambda task: OutOfMemory(rank=0, attempted_bytes=1, allocated_bytes=1, message="out")
        )
        answer = ask(job("llama3-8b", 64, {"dp_shard": 64, "ac": "full"}), pool)
        assert (answer.measurements, answer.failed is not None) == ((), True)

    def test_asked_for_it_imitates_where_the_pool_holds_the_layout_too(self) -> None:
        values = job("llama3-8b", 32, {"dp_replicate": 4, "dp_shard": 8, "ac": "full"})
        pool = FakePool(64, as_predicted())
        answer = ask(values, pool, imitate_gpus=12)
        assert [task.parsed().cluster.num_gpus for task in pool.tasks] == [8], (
            "the largest legal size within it"
        )
        whole, small = answer.measurements
        assert (whole.measured.rung, whole.job.cluster.num_gpus) == ("imitated", 32)
        (by,) = (whole.measured.model_extra or {})["imitated_by"]
        assert (by["measurement"], by["num_gpus"]) == (small.id, 8)
        few = FakePool(4, as_predicted())
        ask(values, few, imitate_gpus=12)
        assert {task.parsed().cluster.num_gpus for task in few.tasks} == {4}, (
            "the pool is a limit too"
        )

    @pytest.mark.parametrize(("num_gpus", "few"), [(4, "4 GPUs or fewer"), (1, "1 GPU")])
    def test_what_cannot_be_imitated_on_so_few_says_so(self, num_gpus: int, few: str) -> None:
        values = job("mixtral-8x7b", 64, {"dp_shard": 64, "ep": 8, "ac": "full"})
        with pytest.raises(
            ProbeError, match=f"no smaller layout on {few} resembles fsdp 64 · ep 8"
        ):
            ask(values, FakePool(64, as_predicted()), imitate_gpus=num_gpus)

    @pytest.mark.parametrize(
        ("layout", "asked", "words"),
        [
            (
                {"dp_shard": 8, "tp": 8},
                {"imitate_gpus": 64},
                "must be fewer than the layout's 64 GPUs; leave it out",
            ),
            (
                {"dp_shard": 8, "tp": 8},
                {"imitate_gpus": 8, "emulate": True},
                "cannot be combined with emulate",
            ),
            ({"dp_shard": 8, "tp": 8}, {"imitate_gpus": 0}, "must be at least 1"),
            (
                {"dp_shard": 8, "tp": 8},
                {"imitate_gpus": 7},
                "cannot hold one replica: tp x cp x pp is 8; use at least 8",
            ),
            (
                {"dp_shard": 4, "tp": 4, "cp": 2, "pp": 2},
                {"imitate_gpus": 8},
                "tp x cp x pp is 16; use at least 16",
            ),
            (
                {"tp": 8, "pp": 8},
                {"imitate_gpus": 8},
                "tp x cp x pp is 64; leave it out to run the layout itself",
            ),
        ],
    )
    def test_an_impossible_wish_is_one_fault(
        self, layout: dict[str, Any], asked: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(SpecError) as raised:
            ProbeRequest.from_user({"job": job("llama3-70b", 64, layout, batch=8), **asked})
        (fault,) = raised.value.faults
        assert fault.field == "imitate_gpus"
        assert words in str(fault)

    def test_model_parallelism_that_is_too_wide_cannot_be_imitated(self) -> None:
        with pytest.raises(
            ProbeError, match="the layout needs 64 GPUs, this machine has 4; use --emulate"
        ):
            ask(job("llama3-70b", 64, {"dp_shard": 8, "tp": 8}), FakePool(4, as_predicted()))

    def test_fewer_layers_keep_windows_and_dense_layers_in_place(self) -> None:
        gemma = read_job(job("gemma2-9b", 8, {"dp_shard": 8}))
        assert period(gemma.model) == 2
        assert fewer_layers(gemma, 4).model.layer_kinds() == gemma.model.layer_kinds()[:4]
        deepseek = read_job(job("deepseek-v2-lite", 8, {"dp_shard": 8}))
        assert [kind.moe for kind in fewer_layers(deepseek, 3).model.layer_kinds()] == [
            False,
            True,
            True,
        ]
