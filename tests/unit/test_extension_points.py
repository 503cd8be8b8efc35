"""One of each extension point, added from outside: one file and one line, and it works."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

import planner
from planner.columns import LayoutBatch
from planner.errors import SpecError
from planner.schedules import SCHEDULES, Runtime, Schedule, ScheduleRule
from planner.schedules.one_f_one_b import OneFOneB
from planner.specs.cluster import ClusterSpec
from planner.trainers.registry import TRAINERS
from tests.conftest import needed

# ---- pool ----------------------------------------------------------------------------------------

PROBE_JOB: dict[str, Any] = {
    "model": "debug-tiny", "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"seq_len": 64, "global_batch_size": 4}, "layout": {"dp_shard": 2, "ac": "none"},
}  # fmt: skip


@pytest.fixture
def rented_pool(monkeypatch: pytest.MonkeyPatch) -> str:
    """A pool of another kind, registered by one line. It answers every probe with 0.5 s a step."""
    from probes import pools
    from probes.launch import Watch
    from probes.outcome import bare_environment
    from probes.pools.capacity import Capacity
    from probes.pools.protocol import PoolSettings
    from probes.preflight import Need
    from probes.protocol import Measured, ProbeResult, ProbeTask, RankMemory

    class RentedPool:
        name: ClassVar[str] = "rented"
        reads_files: ClassVar[bool] = False

        def __init__(self, region: str) -> None:
            self.region = region

        @classmethod
        def open(cls, settings: PoolSettings, option: str | None) -> Self:
            return cls(option or "anywhere")

        def capacity(self, cluster: ClusterSpec) -> Capacity:
            return Capacity(num_devices=4, device="cpu", spans_nodes=True, fake_tensors=False)

        def check(self, need: Need, *, wait: bool = True) -> None:
            pass

        def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
            memory = RankMemory(rank=0, peak_allocated_bytes=2**20, peak_reserved_bytes=2**21)
            outcome = Measured(
                step_seconds=0.5,
                step_seconds_each=[0.5],
                tokens_per_second_per_gpu=None,
                mfu=None,
                losses=[2.0],
                gradient_norms=[1.0],
                memory=[memory],
            )
            return ProbeResult(
                task=task,
                outcome=outcome,
                environment=bare_environment(None),
                started_at="2026-01-01T00:00:00+00:00",
                wall_seconds=1.0,
                gpu_seconds=2.0,
                notes=[f"rented in {self.region}"],
            )

    monkeypatch.setattr(pools, "BACKENDS", dict(pools.BACKENDS))
    pools.register("rented[:REGION]", RentedPool)
    return "rented:north"


def test_pool(rented_pool: str, tmp_path: Path) -> None:
    from api.cli.typed import complete_pool
    from api.jobs.probes import ask_job, check_ready, enqueue, run_all
    from api.settings import Settings
    from api.wiring import wire
    from planner.errors import ProbeError, SpecError
    from probes.launch import Watch

    settings = Settings(database_url=f"sqlite:///{tmp_path / 'planner.db'}")
    wiring = wire(settings)
    asked = ask_job({"job": PROBE_JOB, "pool": rented_pool}, allow_files=False)
    check_ready(wiring, asked)
    (record,) = enqueue(wiring, asked, max_attempts=1, ours=True)
    (ended,) = run_all(wiring, [record], {record.id: Watch()})
    assert (ended.state, ended.pool) == ("done", rented_pool)
    measured = wiring.measurements.get(str(ended.measurement_id)).measured
    assert measured.step_seconds == 0.5
    assert complete_pool("ren") == ["rented", "rented:"]
    with pytest.raises(SpecError, match="rented or rented:REGION"):
        wiring.pool("cloud")
    emulated = ask_job({"job": PROBE_JOB, "pool": "rented", "emulate": True}, allow_files=False)
    with pytest.raises(ProbeError, match="cannot emulate one rank without a GPU"):
        check_ready(wiring, emulated)


# ---- kernel --------------------------------------------------------------------------------------


def test_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that chooses the largest of many, timed on the CPU as a probe times it."""
    torch = needed("torch")
    from planner.calibration import kernels as shapes
    from probes import kernels
    from probes.kernels.base import Prepared
    from probes.micro import KernelProgram
    from probes.protocol import ProbeTask

    def prepare(shape: shapes.Shape, device: Any) -> Prepared:
        x = torch.randn(shape["rows"], shape["width"], device=device)
        return Prepared(run=lambda: torch.topk(x, 2), moved_bytes=4.0 * x.numel())

    monkeypatch.setattr(kernels, "KERNELS", dict(kernels.KERNELS))
    monkeypatch.setattr(shapes, "SIZES", dict(shapes.SIZES))
    kernels.register("top-2", prepare, sizes=("rows", "width"))
    wanted = {"kind": "top-2", "dtype": "float32", "sizes": {"rows": 8, "width": 64}}
    task = ProbeTask(id="probe-1", job=PROBE_JOB, device="cpu", kernels=[wanted])
    (row,) = KernelProgram(task).measure().timings or []
    assert (row["status"], row["kind"], row["sizes"]) == ("ok", "top-2", wanted["sizes"])
    assert row["seconds"] > 0.0
    with pytest.raises(ValueError, match="sizes of a top-2 are rows, width"):
        shapes.Shape.from_dict({**wanted, "sizes": {"rows": 8}})


# ---- schedule ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvenOneFOneB(OneFOneB):
    """1F1B that asks for an even number of microbatches."""

    name: str = "Even1F1B"
    runtimes: frozenset[Runtime] = frozenset({"torch"})
    search_order: int = 15
    published: bool = False

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        even = ScheduleRule(
            field="micro_batch_size",
            rule="Even1F1B needs an even number of microbatches, not {m}",
            remedy="halve micro_batch_size",
            holds=lambda pp, v, m: m % 2 == 0,
        )
        return (*super().rules(runtime), even)


JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"seq_len": 4096, "global_batch_size": 48},
}
PIPELINE = {"pp": 2, "tp": 4, "dp_shard": 2, "micro_batch_size": 1}


@pytest.fixture
def added() -> Iterator[Schedule]:
    schedule = EvenOneFOneB()
    SCHEDULES.add(schedule)
    yield schedule
    SCHEDULES.remove(schedule.name)


def test_recommend_tries_a_schedule_from_outside(added: Schedule) -> None:
    fixed = {**PIPELINE, "pp_schedule": added.name, "cp": 1, "ac": "full", "precision": "bf16"}
    winner = planner.recommend({**JOB, "search": {"fix": fixed}}).ranked[0].layout
    assert winner.pp_schedule == added.name
    assert winner.virtual_stages == 1
    assert LayoutBatch.from_layouts([winner]).row(0) == winner


def test_it_is_priced_and_played_out_by_its_own_order(added: Schedule) -> None:
    ours, theirs = (
        planner.estimate({**JOB, "layout": {**PIPELINE, "pp_schedule": name}})
        for name in (added.name, "1F1B")
    )
    # torch runs an order that it does not know with the runtime of the looped schedules
    assert ours.step_seconds == pytest.approx(theirs.step_seconds, rel=0.01)
    assert ours.memory == theirs.memory


def test_its_runtime_its_order_and_its_rules_are_its_own(added: Schedule) -> None:
    assert TRAINERS["torchtitan"].schedules[:2] == ("1F1B", added.name)
    assert added.name not in TRAINERS["megatron"].schedules
    odd = {**PIPELINE, "pp_schedule": added.name, "micro_batch_size": 8}
    broken = planner.estimate({**JOB, "layout": odd}).violations
    assert [(fault.field, fault.rule) for fault in broken] == [
        ("micro_batch_size", "Even1F1B needs an even number of microbatches, not 3")
    ]


def test_without_it_the_name_is_unknown() -> None:
    with pytest.raises(SpecError, match="did you mean"):
        planner.estimate({**JOB, "layout": {**PIPELINE, "pp_schedule": "Even1F1B"}})
