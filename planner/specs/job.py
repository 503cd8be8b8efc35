"""A job: one question.

The CLI's --job file, a line of a .jsonl batch and the body of POST /plan are this object.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from planner.samplers import SAMPLERS
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.validation import Name, Value, enum_of, registered

# of several that wait, the highest goes first
Priority = Annotated[int, Field(strict=True, ge=-100, le=100)]
MOST_GPU_SECONDS = 1e9  # of one study or run of a sweep; 31 years of one GPU
LABELS = ("group", "sweep", "complete", "source", "trust", "notes", "measured", "peer")
KEYS = ("id", "model", "cluster", "training", "layout", "current", "search", "probe")


NO_SAMPLER = f"is no sampler; use one of {', '.join(SAMPLERS)}"
SamplerName = Annotated[str, registered(SAMPLERS, lambda name: NO_SAMPLER), enum_of(SAMPLERS)]


class SearchSpec(Value, extra="forbid"):
    """The contract's `search`: how many answers, what is fixed, what may vary, what is optimised.

    top_k: how many layouts to rank.
    fix: layout fields with the one value that they must have.
    allow: layout fields with the values that they may have, beyond what is searched otherwise too.
    objective: what is best: most tokens a second, least memory, or least time, price or energy of
        the whole run.
    sampler: who proposes the next layout to probe, and layouts beyond enumeration.
    seed: of the sampler; the same job and seed give the same plan.
    prefer: which layout comes first: the `simplest` of those that cannot be told from the best, or
        the `fastest` on paper.
    """

    top_k: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    fix: dict[str, Any] = Field(default_factory=dict)
    allow: dict[str, list[Any]] = Field(default_factory=dict)
    objective: Literal["throughput", "memory", "time", "cost", "energy"] = "throughput"
    sampler: SamplerName = "cost-model"
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    prefer: Literal["simplest", "fastest"] = "simplest"

    @property
    def simplest_first(self) -> bool:
        """Whether the simplest of the layouts that cannot be told apart comes first.

        Not for the objective "memory": the layout that needs least comes first then.
        """
        return self.prefer == "simplest" and self.objective != "memory"


PROBE_TRAINERS = ["reference", "torchtitan"]  # the programs that a probe can run
ProbeTrainerName = Annotated[
    str,
    registered(
        PROBE_TRAINERS,
        lambda _: f"is not one of the known values; use {' or '.join(map(repr, PROBE_TRAINERS))}",
    ),
    WithJsonSchema({"type": "string", "enum": PROBE_TRAINERS}),
]
# Judgement: an H200 took 32 s to start and compile, 20 s are timed, and a study looks closer first.
SECONDS_A_PROBE = 150.0


class ProbeSpec(Value, extra="forbid"):
    """The contract's `probe`: the budget for measuring, and where.

    max_probes: runs of whole layouts.
    max_gpu_seconds: everything that is spent, failures too. By default what so many probes take
        on all GPUs, 150 s each with their start, at least 1800.
    pool: where probes run: `local`, `slurm`, `slurm:PARTITION` or `replay:FILE`.
    trainer: the program that runs: plain torch, or TorchTitan itself.
    steps: timed steps of a probe, after 3 to warm up.
    priority: of several studies and sweeps that wait for a worker or for room in a pool, the
        highest goes first.
    """

    max_probes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 5
    max_gpu_seconds: Annotated[float, Field(gt=0, le=MOST_GPU_SECONDS)] | None = None
    pool: str = "local"
    trainer: ProbeTrainerName = "reference"
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    priority: Priority = 0

    def gpu_seconds(self, num_gpus: int) -> float:
        """Budget of GPU-seconds on a cluster of so many GPUs."""
        if self.max_gpu_seconds is not None:
            return self.max_gpu_seconds
        wanted = max(1800.0, SECONDS_A_PROBE * self.max_probes * num_gpus)
        return min(wanted, MOST_GPU_SECONDS)


CurrentFormat = Literal[
    "torchtitan-toml", "torchtitan-command", "torchtitan-python", "megatron-arguments",
    "megatron-log", "megatron-bridge", "primus", "torchtitan-log", "configuration", "layout",
]  # fmt: skip
MAX_TEXT = 2_000_000


class CurrentSpec(Value, extra="forbid"):
    """The job's `current`.

    name: of the file.
    format: None means that the text decides.
    text: the file itself.
    files: other files that the text names, by the name it uses (a script's TOML).
    job: for a log, what was read from it, in the form of a job.
    measured: the measurements of that run.
    notes: what had to be assumed about it.
    """

    name: Name = Field(default="current", max_length=400)
    format: CurrentFormat | None = None
    text: str = Field(default="", max_length=MAX_TEXT)
    files: dict[str, str] = Field(default_factory=dict)
    job: dict[str, Any] = Field(default_factory=dict)
    measured: dict[str, Any] | None = None
    notes: list[str] = Field(default_factory=list)


class Job(Value, extra="forbid"):
    """A parsed job.

    layout: the one to price (`estimate`) or the current one (`plan`), already fully set.
    current: the file that it was read from; `planner.intake.current.complete` reads that before a
        job is parsed.
    request: the mapping as it came in, echoed in the plan, with the contents of files in place of
        their names. A stored plan must be answerable when those files have changed or vanished.
    labels: keys that travel along and do not affect the model.
    """

    id: str | int | None
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    layout: Layout | None
    current: CurrentSpec | None = None
    search: SearchSpec
    probe: ProbeSpec | None
    labels: dict[str, Any]
    request: dict[str, Any]
