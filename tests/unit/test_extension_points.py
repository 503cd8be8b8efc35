"""One of each extension point, added from outside: one file and one line, and it works."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

import planner
from planner import rules
from planner.api.cli.typed import complete_pool
from planner.api.jobs.probes import check_ready, enqueue, probe_of_job, run_all
from planner.api.settings import Settings
from planner.api.wiring import wire
from planner.calibration import kernels as shapes
from planner.columns import LayoutBatch
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.precision import PRECISIONS, Precision, Recipe
from planner.probes import pools, trainers
from planner.probes.evidence import Evidence
from planner.probes.launch import Launcher, LaunchSettings, Watch
from planner.probes.pools.local import LocalPool, LocalSettings
from planner.probes.pools.protocol import Capacity, Pool, PoolSettings
from planner.probes.protocol import Environment, MeasuredRun, ProbeResult, ProbeTask, RankMemory
from planner.probes.trainers import Program
from planner.probes.trainers.reference import ReferenceTrainer
from planner.rules.base import Rule, under
from planner.samplers import SAMPLERS, Sampler
from planner.schedules import SCHEDULES, Runtime, Schedule, ScheduleRule
from planner.schedules.one_f_one_b import OneFOneB
from planner.specs.cluster import ClusterSpec
from planner.study.ask_tell import run
from planner.study.ledger import Budget, StudySettings
from planner.study.study import ProbeStudy
from planner.trainers.base import TrainerRules
from planner.trainers.fsdp import FSDP
from planner.trainers.registry import TRAINERS
from tests.conftest import ROOT, SHORT_OF_MEMORY, job_values, needed, ran
from tests.unit.probing_cases import Machine, small

PROBE_JOB = job_values("debug-tiny", "cpu", 2, 64, 4, layout={"dp_shard": 2, "ac": "none"})


def measured(seconds: float, losses: list[float], norms: list[float], memory: list[Any]) -> Any:
    """What a probe of one step has found."""
    return MeasuredRun(
        step_seconds=seconds, step_seconds_each=[seconds], losses=losses, gradient_norms=norms,
        memory=memory,
    )  # fmt: skip


@pytest.fixture
def rented_pool(monkeypatch: pytest.MonkeyPatch) -> str:
    """A pool of another kind, registered by one line. It answers every probe with 0.5 s a step."""

    class RentedPool(Pool):
        def __init__(self, region: str) -> None:
            self.region = region

        @classmethod
        def open(cls, settings: PoolSettings, option: str | None) -> Self:
            return cls(option or "anywhere")

        def capacity(self, cluster: ClusterSpec) -> Capacity:
            return Capacity(num_devices=4, device="cpu", spans_nodes=True)

        def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
            memory = RankMemory(rank=0, peak_allocated_bytes=2**20, peak_reserved_bytes=2**21)
            return ProbeResult(
                task=task, outcome=measured(0.5, [2.0], [1.0], [memory]),
                environment=Environment(python="3.11"), started_at="2026-01-01T00:00:00+00:00",
                wall_seconds=1.0, gpu_seconds=2.0, notes=[f"rented in {self.region}"],
            )  # fmt: skip

    monkeypatch.setattr(pools, "BACKENDS", dict(pools.BACKENDS))
    pools.register("rented[:REGION]", RentedPool)
    return "rented:north"


def test_pool(rented_pool: str, tmp_path: Path) -> None:
    wiring = wire(Settings(database_url=f"sqlite:///{tmp_path / 'planner.db'}"))
    asked = probe_of_job({"job": PROBE_JOB, "pool": rented_pool}, allow_files=False)
    check_ready(wiring, asked)
    (record,) = enqueue(wiring, asked, max_attempts=1, ours=True)
    (ended,) = run_all(wiring, [record], {record.id: Watch()})
    assert (ended.state, ended.pool) == ("done", rented_pool)
    assert wiring.measurements.get(str(ended.measurement_id)).measured.step_seconds == 0.5
    assert complete_pool("ren") == ["rented", "rented:"]
    with pytest.raises(SpecError, match="rented or rented:REGION"):
        wiring.pool("cloud")


def test_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that chooses the largest of many, timed on the CPU as a probe times it."""
    torch = needed("torch")
    from planner.probes import kernels
    from planner.probes.kernels.base import Prepared
    from planner.probes.micro import KernelProgram

    def prepare(shape: shapes.KernelShape, device: Any) -> Prepared:
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
        shapes.KernelShape.from_dict({**wanted, "sizes": {"rows": 8}})


def test_program_of_a_probe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A trainer that says what to start and reads its own log, run under the real guardian."""

    class Stopwatch(ReferenceTrainer):
        times_kernels: ClassVar[bool] = False

        def program(self, task: ProbeTask) -> Program:
            (tmp_path / "step.py").write_text("print('step took 0.25 s')\n")
            return Program(target=str(tmp_path / "step.py"), arguments=(), single=True)

        def outcome(self, task: ProbeTask, folder: Path, evidence: Evidence) -> Any:
            seconds = float(evidence.log.split("took ")[1].split()[0])
            return measured(seconds, [], [], []), Environment(python="3.11")

    asked = {**PROBE_JOB, "probe": {"trainer": "stopwatch"}}
    with pytest.raises(SpecError, match="use 'reference' or 'torchtitan'"):
        read_job(asked)
    monkeypatch.setattr(trainers, "TRAINERS", dict(trainers.TRAINERS))
    request.addfinalizer(lambda: trainers.PROBE_TRAINERS.remove("stopwatch"))
    trainers.register("stopwatch", Stopwatch)
    assert read_job(asked).probe is not None
    local = LocalSettings(leases=tmp_path / "leases", machine=str(tmp_path), cpu_slots=2)
    pool = LocalPool(Launcher(LaunchSettings(folder=tmp_path / "probes")), local)
    result = pool.run(ProbeTask(id="probe-1", job=PROBE_JOB, device="cpu", trainer="stopwatch"))
    assert isinstance(result.outcome, MeasuredRun), result
    assert result.outcome.step_seconds == 0.25


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


JOB: dict[str, Any] = job_values("llama3-8b", "h100-sxm-80gb", 16, 4096, 48)
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
    (broken,) = planner.estimate({**JOB, "layout": odd}).violations
    rule = "Even1F1B needs an even number of microbatches, not 3"
    assert (broken.field, broken.rule) == ("micro_batch_size", rule)


@pytest.fixture
def seeds() -> Iterator[list[int]]:
    """Registers Optuna's quasi-random sampler; the list gets the seed of each that is made."""
    made: list[int] = []

    def make(seed: int, startup: int) -> Any:
        from optuna.samplers import QMCSampler

        made.append(seed)
        return QMCSampler(seed=seed, warn_independent_sampling=False)

    SAMPLERS.add(Sampler(name="quasi-random", make=make))
    yield made
    SAMPLERS.remove("quasi-random")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_sampler(seeds: list[int]) -> None:
    """`recommend` samples splits with recomputation by it, and a study proposes what it samples."""
    search = {**SHORT_OF_MEMORY["search"], "sampler": "quasi-random", "seed": 3}
    plan = planner.recommend({**SHORT_OF_MEMORY, "search": search})
    assert (plan.searched.study["sampler"], seeds) == ("quasi-random", [3])
    assert plan.searched.study["trials"] > 0

    candidates = small()
    machine = Machine.wrong_by(candidates, 0.1)
    settings = StudySettings(
        sampler="quasi-random", seed=5, budget=Budget(probes=4, gpu_seconds=1e12), tolerance=-1.0
    )
    result = run(candidates, settings, machine.run)
    assert (result.spent.probes, seeds) == (4, [3, 5])
    reasons = [trial.user_attrs["reason"] for trial in result.study.trials]
    assert all(reason.startswith("quasi-random's choice") for reason in reasons), reasons


@pytest.fixture
def with_trainer() -> Iterator[TrainerRules]:
    """A trainer of somebody else: FSDP2 that recomputes everything and trains in one precision."""
    trainer = replace(
        FSDP, name="ours", title="Our trainer", ac="full", precisions=frozenset({"bf16", "half8"}),
        searched_precisions=("half8",), searched_ac=("full",),
    )  # fmt: skip
    TRAINERS.add(trainer)
    yield trainer
    TRAINERS.remove(trainer.name)


@pytest.fixture
def with_precision() -> Iterator[Precision]:
    """An fp8 recipe that costs nothing to quantise."""
    recipe = Recipe(name="half8", peak="fp8", gain_key="gemm_fp8", experts="")
    precision = Precision(torchao=recipe, needs=("fp8",), kernel_rows=frozenset({"hopper"}))
    PRECISIONS.add(precision)
    yield precision
    PRECISIONS.remove(precision.name)


FIXED = {
    "pp": 1, "tp": 1, "cp": 1, "dp_replicate": 1, "micro_batch_size": 1, "zero_stage": 3,
    "compile": False, "sequence_parallel": False,
}  # fmt: skip


def test_trainer(with_trainer: TrainerRules) -> None:
    plan = planner.recommend(job_of(with_trainer.name, search={"fix": FIXED}))
    assert {entry.layout.ac for entry in plan.ranked} == {"full"}
    assert plan.ranked[0].layout.precision == "bf16", "nobody registered the other one"


def test_precision(with_precision: Precision, with_trainer: TrainerRules) -> None:
    plan = planner.recommend(job_of(with_trainer.name, search={"fix": FIXED}))
    assert plan.ranked[0].layout.precision == with_precision.name, "nothing is faster"


def job_of(trainer: str, version: str | None = None, **more: Any) -> dict[str, Any]:
    training = {**JOB["training"], "trainer": trainer, "trainer_version": version}
    return {**JOB, "training": training, **more}


@pytest.mark.parametrize(("job", "words"), [
    ({**JOB, "layout": {**PIPELINE, "pp_schedule": "Even1F1B"}}, "did you mean"),
    ({**JOB, "search": {"sampler": "quasi-random"}}, r"use one of cost-model, tpe, .*random"),
    (job_of("ours"), "no trainer of this name"),
])  # fmt: skip
def test_what_nobody_registered_is_an_error(job: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        (planner.estimate if "layout" in job else planner.recommend)(job)
    with pytest.raises(SpecError, match="no sampler of this name"):
        ProbeStudy(small(), StudySettings(sampler="quasi-random"))


@pytest.mark.parametrize("trainer", [name for name in TRAINERS])
def test_precisions_that_trainers_lack_are_refused(with_precision: Precision, trainer: str) -> None:
    layout = {"dp_shard": 16, "precision": with_precision.name, "ac": "full"}
    found = planner.estimate(job_of(trainer, layout=layout)).violations
    assert any(f"in {with_precision.name}" in fault.rule for fault in found)


def test_precision_is_refused_on_a_gpu_without_kernels(
    with_precision: Precision, with_trainer: TrainerRules
) -> None:
    machine = {"gpu": "b200-sxm-180gb", "num_gpus": 16}
    layout = {"dp_shard": 16, "precision": with_precision.name}
    job = job_of(with_trainer.name, cluster=machine, layout=layout)
    rules = [one.rule for one in planner.estimate(job).violations if one.field == "precision"]
    assert rules == ["b200-sxm-180gb has no kernels for half8 in any library"]


def test_trainer_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for the releases of one trainer, which a search obeys and an estimate explains."""
    rule = Rule(
        key="TorchTitan 0.3 compiles", field="compile", broken=lambda compile: ~compile,
        applies=under("torchtitan", since="0.3"),
        rule=lambda x, c: "is off", remedy=lambda x, c: "switch it on",
    )  # fmt: skip
    monkeypatch.setattr(rules, "FEATURE_RULES", (*rules.FEATURE_RULES, rule))
    layout = {"dp_shard": 16, "compile": False}
    releases = {("torchtitan", "0.3.0"): True, ("torchtitan", "0.2.2"): False}
    for (trainer, version), broken in {**releases, ("megatron", None): False}.items():
        found = planner.estimate(job_of(trainer, version, layout=layout)).violations
        assert ("is off" in [fault.rule for fault in found]) is broken
    search = {"fix": {**FIXED, "ac": "full", "compile": [False, True]}}
    plan = planner.recommend(job_of("torchtitan", "0.3.0", search=search))
    assert all(entry.layout.compile for entry in plan.ranked)


GPU_FILE = """
{family: hopper, vendor: nvidia, memory: 120 GiB, memory_bandwidth: 4 TB/s, num_sms: 132,
 peak_flops: {fp32: 67 TFLOP/s, tf32: 494 TFLOP/s, bf16: 989 TFLOP/s, fp16: 989 TFLOP/s},
 power_limit: 700 W, nominal_power: 700 W, nvls: true, context: 0.75 GiB,
 scale_up: {gpus: 8, bandwidth: 450 GB/s, latency: 1 us, topology: switch},
 scale_out: {bandwidth: 400 Gb/s, latency: 5 us, topology: switch},
 pcie_bandwidth: 64 GB/s, host_memory_per_gpu: 256 GiB, mtbf_gpu_hours: 50000,
 price_per_gpu_hour: 2.5, sources: {memory: a test}}
"""
MODEL_FILE = """
{model_type: llama, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16,
 num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, source: a test}
"""
CLUSTER_FILE = "{gpu: new-gpu, num_gpus: 8, gpus_per_node: 8, source: a test}"
CATALOGUE = {
    "gpus/new-gpu.yaml": GPU_FILE,
    "models/new-model.yaml": MODEL_FILE,
    "clusters/new-cluster.yaml": CLUSTER_FILE,
}
ASK = """
import json, sys, planner
job = json.loads(sys.argv[1])
plan = planner.recommend(job)
print(json.dumps([plan.job["model"], plan.ranked[0].estimate.step_seconds]))
"""


def test_catalogue(tmp_path: Path) -> None:
    """One file, no line: `recommend` plans with a model, and a cluster of a GPU, by their names."""
    shutil.copytree(
        ROOT / "planner", tmp_path / "planner", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, text in CATALOGUE.items():
        (tmp_path / "planner" / "catalog" / name).write_text(text, encoding="utf-8")
    search = {"fix": {"pp": 1, "tp": 1, "cp": 1, "precision": "bf16"}, "top_k": 1}
    job = job_values("new-model", "h100-sxm-80gb", 8, 2048, 64, search=search)
    asked = json.dumps({**job, "cluster": "new-cluster"})
    own = {"PYTHONPATH": str(tmp_path)}
    done = ran(sys.executable, "-c", ASK, asked, cwd=tmp_path, env=own)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] > 0.0
