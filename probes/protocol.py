"""Inputs and outputs of a probe.

A probe is one short run of one layout. `ProbeTask` is the JSON file that torchrun's program reads;
`ProbeResult` is the JSON file that its rank 0 writes (the runner writes it when no rank could). Out
of memory and failures are results, not exceptions.
No torch here: the runner, the pools and the replay import this module, and so does the program.
"""

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from statistics import stdev
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.calibration.kernels import KernelShape
from planner.intake.jobs import read_job
from planner.probes.folder import FOUND
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job, ProbeTrainerName
from planner.specs.measurement import Measured, Measurement, Rung

Device = Literal["cuda", "cpu"]


def device_of(cluster: ClusterSpec) -> Device:
    """The kind of device that a probe of a job on this cluster runs on."""
    return "cpu" if cluster.gpu.name == "cpu" else "cuda"


class FailureKind(StrEnum):
    """Why a probe gave no numbers."""

    INVALID_LAYOUT = "invalid-layout"  # the trainer rejected it
    TIMEOUT = "timeout"  # the probe's own time limit
    HANG = "hang"  # a collective never returned (watchdog)
    NON_FINITE_LOSS = "non-finite-loss"
    KILLED = "killed"  # a worker died by a signal (host out of memory, kill -9)
    IMPORT = "import-error"  # a package is missing or of the wrong version
    PORT = "port-in-use"
    LOST_GPU = "lost-gpu"  # Xid, fallen off the bus
    FOREIGN = "foreign"  # another process has the GPU or its memory
    LOST_NODE = "lost-node"  # a host of the pool went away under it
    PREEMPTED = "preempted"  # the pool took its devices for somebody else
    REQUEUED = "requeued"  # the batch system put its job back into the queue
    ALLOCATION_ENDED = "allocation-ended"  # the job that it ran in came to its time limit
    LAUNCH = "launch-failure"  # the batch system did not start it on all of its nodes
    INTERRUPTED = "interrupted"  # the runner was asked to stop
    CRASH = "crash"  # anything else, with its traceback


# the pool took the probe's devices from it, which says nothing of the layout
TAKEN_AWAY = frozenset(
    {FailureKind.LOST_NODE, FailureKind.PREEMPTED, FailureKind.REQUEUED}
    | {FailureKind.ALLOCATION_ENDED, FailureKind.LAUNCH}
)


class ProbeTask(BaseModel):
    """One run.

    job: a mapping as `read_job` takes it, with its layout.
    trainer: the program that trains.
    device: `cuda` (NCCL) or `cpu` (gloo).
    emulate_rank: runs this rank of the layout in one process with torch's fake process group.
    fake_tensors: memory and counts only (FakeTensorMode).
    warmup_steps: steps before timing.
    steps: timed steps; timing ends early when the spread is below `spread_below`.
    least_seconds: seconds that timed steps take on a GPU, however many they are.
    breakdown: measure seconds by kernel with the profiler.
    learning_rate: of every optimizer. 0 does the same work and leaves the weights as they are.
    routing: `balanced` spreads tokens by the job's `moe_imbalance`, evenly without one; `learned`
        sends them where the router says. A router without a balancing loss that trains at 1e-3
        sent every token to the same 2 of 16 experts within five steps (measured/first-day).
    time_limit_seconds: wall clock of the whole probe, start included.
    kernels: time these instead of the layout, most valuable first
        (`planner.calibration.kernels.KernelShape` as mappings).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    job: dict[str, Any]
    trainer: ProbeTrainerName = "reference"
    device: Device = "cuda"
    emulate_rank: int | None = None
    fake_tensors: bool = False
    warmup_steps: int = 3
    steps: int = 10
    spread_below: float = 0.01
    least_seconds: float = 20.0
    breakdown: bool = False
    seed: int = 0
    learning_rate: float = 0.0
    routing: Literal["learned", "balanced"] = "balanced"
    time_limit_seconds: float = 600.0
    kernels: list[dict[str, Any]] = []

    @model_validator(mode="before")
    @classmethod
    def _of_older(cls, values: Any) -> Any:
        """Tasks of releases that could leave out layers hold `num_layers`, null where none was."""
        if isinstance(values, dict) and values.get("num_layers", "") is None:
            return {name: one for name, one in values.items() if name != "num_layers"}
        return values

    def shapes(self) -> list[KernelShape]:
        """The kernels to time. Raises KeyError or ValueError for an invalid shape."""
        return [KernelShape.from_dict(values) for values in self.kernels]

    def parsed(self) -> Job:
        """The job. Raises SpecError."""
        return read_job(self.job)

    def num_processes(self) -> int:
        """Processes of torchrun: one a GPU, what kernels need, or one for an emulated rank."""
        if self.kernels:
            return max(shape.num_gpus for shape in self.shapes())
        return 1 if self.emulate_rank is not None else self.parsed().cluster.num_gpus


class RankMemory(BaseModel):
    """Memory of one rank, in bytes.

    device_used_bytes: what the device reports, communicators and context included; None on a CPU.
    allocator_retries: how often the caching allocator emptied its cache to serve a request while
        steps were timed. Such steps are slow, and the reserved peak is then the device's limit, not
        the layout's demand.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    communicator_bytes: int | None = None
    allocator_retries: int | None = None


class Environment(BaseModel):
    """The environment in which the numbers were measured.

    Clock and power are means over the timed steps, in hertz and watts, the temperature is the
    highest, in degrees Celsius; None if the device does not report them.
    allocator: settings of torch's caching allocator.
    shared: other programs held memory of its GPUs from before the start.
    intruded: another program began to compute on its GPU while steps were timed.
    """

    model_config = ConfigDict(frozen=True)

    python: str
    torch: str | None = None
    trainer_version: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    gpu_name: str | None = None
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttled: bool | None = None
    shared: bool | None = None
    intruded: bool | None = None
    allocator: str | None = None

    def software(self) -> dict[str, str]:
        """Names and versions that identify the software of a measurement."""
        keys = ("torch", "trainer_version", "cuda", "nccl", "driver", "gpu_name")
        return {key: str(value) for key in keys if (value := getattr(self, key)) is not None}


def found_by(folder: Path, gpu_name: str | None = None) -> Environment:
    """Versions in the interpreter of a probe's program; none if it never started."""
    with suppress(OSError, ValueError):
        found = Environment.model_validate_json((folder / FOUND).read_text(encoding="utf-8"))
        return found.model_copy(update={"gpu_name": gpu_name})
    return Environment(python=platform.python_version(), gpu_name=gpu_name)


# of an environment, what may have changed time or memory of a step
FELT = (
    *("sm_clock_hertz", "power_watts", "temperature_celsius"),
    *("throttled", "shared", "intruded", "allocator"),
)


class MeasuredRun(BaseModel):
    """A run that came to its end.

    counts: of one step on one rank, from fake tensors: flops, and bytes of each collective.
    timings: lines of `planner.probes.micro`, if kernels were timed instead of a layout.
    timed_microbatches: of the two shorter steps from which a long one's seconds follow.
    """

    model_config = ConfigDict(frozen=True)

    status: Literal["ok"] = "ok"
    # median over timed steps of the slowest rank; None with fake tensors
    step_seconds: float | None = None
    step_seconds_each: list[float] = []
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    losses: list[float] = []
    gradient_norms: list[float] = []
    memory: list[RankMemory] = []
    kernel_seconds: dict[str, float] | None = None
    # busiest expert's load over the mean, mean over this rank's layers, after each batch of timed
    # steps; None without experts, or if nobody routed
    expert_imbalance: list[float] | None = None
    counts: dict[str, float] | None = None
    timings: list[dict[str, Any]] | None = None
    timed_microbatches: list[int] | None = None


class OutOfMemory(BaseModel):
    """A rank ran out of device memory.

    attempted_bytes: the allocation that failed.
    allocated_bytes: what the rank had allocated by then.
    """

    model_config = ConfigDict(frozen=True)

    status: Literal["oom"] = "oom"
    rank: int
    attempted_bytes: int | None = None
    allocated_bytes: int | None = None
    message: str


class Failed(BaseModel):
    """A run that gave no numbers: its class, and the message and traceback of the root cause.

    rank: the rank that failed first.
    machine: the machine is to blame, whatever the class.
    """

    model_config = ConfigDict(frozen=True)

    status: Literal["failed"] = "failed"
    kind: FailureKind
    rank: int | None = None
    message: str
    traceback: str | None = None
    machine: bool = False


Outcome = Annotated[MeasuredRun | OutOfMemory | Failed, Field(discriminator="status")]


class ProbeResult(BaseModel):
    """One probe's result file.

    gpu_seconds: wall seconds x GPUs used, start included.
    complete: False for what a crashing run left.
    hosts: the pool's hosts that it ran on; empty where the pool does not tell.
    """

    model_config = ConfigDict(frozen=True)

    task: ProbeTask
    outcome: Outcome
    environment: Environment
    started_at: str
    wall_seconds: float
    gpu_seconds: float
    complete: bool = True
    notes: list[str] = []
    hosts: list[str] = []

    @property
    def rung(self) -> Rung:
        """The fidelity of the run: how much of the layout really ran."""
        return "probed" if self.task.emulate_rank is None else "emulated"

    def measurement(self) -> Measurement:
        """The measurement to store; it has the same keys as a published row."""
        out = self.outcome
        numbers: dict[str, Any] = {
            "status": out.status,
            "rung": self.rung,
            "gpu_seconds": self.gpu_seconds,
            "trainer": self.task.trainer,
        }
        if isinstance(out, MeasuredRun):
            each = out.step_seconds_each
            numbers |= {name: getattr(self.environment, name) for name in FELT}
            numbers |= {
                "step_seconds": out.step_seconds,
                "steps": len(each),
                "step_seconds_sd": stdev(each) if len(each) > 1 else None,
                "tokens_per_second_per_gpu": out.tokens_per_second_per_gpu,
                "mfu": out.mfu,
                **peaks(out.memory),
                "allocator_retries": largest(rank.allocator_retries for rank in out.memory),
                "timed_microbatches": out.timed_microbatches,
            }
        elif isinstance(out, OutOfMemory):
            numbers |= {
                "message": out.message,
                "peak_allocated_bytes": None,
                "attempted_bytes": out.attempted_bytes,
                "rank": out.rank,
            }
        else:
            numbers |= {"failure": out.kind.value, "message": out.message}
        if self.hosts:
            numbers["hosts"] = self.hosts
        return Measurement(
            id=self.task.id,
            created_at=self.started_at,
            job=self.task.parsed(),
            measured=Measured.model_validate(numbers),
            software=self.environment.software(),
            source=f"probe {self.task.id}",
        )


def peaks(ranks: Sequence[RankMemory]) -> dict[str, int | None]:
    """The largest of each kind of memory, by the field of a measurement."""
    return {
        "peak_allocated_bytes": largest(rank.peak_allocated_bytes for rank in ranks),
        "peak_reserved_bytes": largest(rank.peak_reserved_bytes for rank in ranks),
        "device_bytes": largest(rank.device_used_bytes for rank in ranks),
    }


def largest(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
