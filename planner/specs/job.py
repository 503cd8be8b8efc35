"""A job: one question. The CLI's --job file, a line of a .jsonl batch, and the body of POST /plan
are this object.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import Fault, SpecError
from planner.intake.huggingface.model_document import inline_keys
from planner.specs.cluster import ClusterSpec, cluster_request
from planner.specs.current import CurrentSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.validation import build, closest
from planner.trainers.registry import resolve_layout

LABELS = ("group", "sweep", "complete", "source", "trust", "notes", "measured")
KEYS = ("id", "model", "cluster", "training", "layout", "current", "search", "probe")


class SearchSpec(BaseModel):
    """The contract's `search`: how many answers, what is fixed, what may vary, what is optimised.

    prefer: which layout comes first, the `simplest` of those that cannot be told from the best, or
        the `fastest` on paper.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    top_k: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    fix: dict[str, Any] = Field(default_factory=dict)
    allow: dict[str, list[Any]] = Field(default_factory=dict)
    objective: Literal["throughput", "memory", "time", "cost", "energy"] = "throughput"
    sampler: Literal["cost-model", "tpe", "gp", "nsga2", "random"] = "cost-model"
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    prefer: Literal["simplest", "fastest"] = "simplest"

    @property
    def simplest_first(self) -> bool:
        """Whether the simplest of what cannot be told apart comes first; the least memory is no
        matter of taste.
        """
        return self.prefer == "simplest" and self.objective != "memory"


class ProbeSpec(BaseModel):
    """The contract's `probe`: the budget for measuring, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_probes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 5
    max_gpu_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    pool: str = "local"
    trainer: Literal["reference", "torchtitan"] = "reference"
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10


class Job(BaseModel):
    """A parsed job. `layout` is the one to price (`estimate`) or the one run today (`plan`),
    already fully set; `current` the file that it was read from (`planner.intake.current.complete`
    reads it, before a job is parsed).

    request: the mapping as it came in, echoed in the plan, but that files which it named are read
    into it: a stored plan must be answerable when they have changed or gone.  labels: what travels
        along and is ignored by the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

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

    @classmethod
    def from_user(cls, values: object, *, allow_files: bool = True) -> "Job":
        """Parsed and checked; raises SpecError with the faults of every part.

        allow_files: whether model and cluster may be paths (not for requests that came over a
            network).
        """
        if not isinstance(values, Mapping):
            raise SpecError(
                Fault(
                    "job",
                    values,
                    "must be a mapping of keys to values",
                    f"known keys: {', '.join(KEYS)}",
                )
            )
        faults = [
            Fault(str(k), values[k], "unknown key", closest(str(k), KEYS + LABELS))
            for k in values
            if k not in KEYS + LABELS
        ]
        faults += [
            Fault(k, None, "is required", f"add {k}")
            for k in ("model", "cluster", "training")
            if values.get(k) is None
        ]
        job_id = values.get("id")
        if isinstance(job_id, bool) or not isinstance(job_id, str | int | None):
            faults.append(Fault("id", job_id, "must be a text or an integer", "quote it"))
        parts = _Parts(values, faults)
        model = parts.parse(
            "model", lambda value: ModelSpec.from_user(value, allow_files=allow_files)
        )
        machine = parts.parse(
            "cluster", lambda value: cluster_request(value, allow_files=allow_files)
        )
        cluster = (
            None
            if machine is None
            else parts.parse("cluster", lambda _: ClusterSpec.from_user(machine, allow_files=False))
        )
        training = parts.parse("training", TrainingSpec.from_user)
        search = (
            parts.parse("search", lambda value: build(SearchSpec, value, "search")) or SearchSpec()
        )
        probe = parts.parse("probe", lambda value: build(ProbeSpec, value, "probe"))
        current = parts.parse("current", lambda value: build(CurrentSpec, value, "current"))
        if current is not None and values.get("layout") is None:
            faults.append(
                Fault(
                    "current",
                    current.name,
                    "was not read into a layout",
                    "send it with `recommend --current`, or POST /plan",
                )
            )
        layout = None
        if cluster is not None and training is not None:
            layout = parts.parse(
                "layout",
                lambda value: resolve_layout(
                    value,
                    trainer=training.trainer,
                    num_gpus=cluster.num_gpus,
                    trainer_version=training.trainer_version,
                ),
            )
        if faults or model is None or cluster is None or training is None:
            raise SpecError(faults)
        labels = {key: values[key] for key in LABELS if key in values}
        request = {
            **values,
            "model": _standing_alone(values["model"], model),
            "cluster": machine,
            "training": {**values["training"], "seq_len": training.seq_len},  # "8k" is a number now
        }
        return cls(
            id=job_id,
            model=model,
            cluster=cluster,
            training=training,
            layout=layout,
            current=current,
            search=search,
            probe=probe,
            labels=labels,
            request=request,
        )


def _standing_alone(asked: object, model: ModelSpec) -> object:
    """The model as it was asked for, unless that was a file: then its shapes."""
    from planner.catalog.models import is_model_name

    return inline_keys(model) if isinstance(asked, str) and not is_model_name(asked) else asked


class _Parts:
    """Parses part after part, collecting faults instead of stopping at the first."""

    def __init__(self, values: Mapping[Any, Any], faults: list[Fault]) -> None:
        self.values, self.faults = values, faults

    def parse(self, key: str, parser: Any) -> Any:
        """The parsed part; None when absent or faulty."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            return parser(value)
        except SpecError as error:
            self.faults.extend(error.faults)
            return None
