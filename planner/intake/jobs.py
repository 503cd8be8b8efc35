"""Reads a job as a person writes it (command line, file or request); reports all faults at once."""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.catalog.models import is_model_name
from planner.errors import Fault, SpecError, UnknownNameError
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.machines import cluster_request, read_cluster
from planner.intake.models import read_model
from planner.specs.current import CurrentSpec
from planner.specs.job import KEYS, LABELS, Job, ProbeSpec, SearchSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.validation import build, closest
from planner.trainers.registry import TRAINERS, resolve_layout
from planner.trainers.release import torch_release


def read_job(values: object, *, allow_files: bool = True) -> Job:
    """The checked job; raises SpecError with the faults of every part.

    allow_files: whether model and cluster may be paths; False for requests from a network.
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
    model = parts.parse("model", lambda value: read_model(value, allow_files=allow_files))
    machine = parts.parse("cluster", lambda value: cluster_request(value, allow_files=allow_files))
    cluster = (
        None
        if machine is None
        else parts.parse("cluster", lambda _: read_cluster(machine, allow_files=False))
    )
    training = parts.parse("training", read_training)
    search = parts.parse("search", lambda value: build(SearchSpec, value, "search")) or SearchSpec()
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
                cuda_graphs=training.cuda_graphs,
            ),
        )
    if faults or model is None or cluster is None or training is None:
        raise SpecError(faults)
    labels = {key: values[key] for key in LABELS if key in values}
    request = {
        **values,
        "model": _standing_alone(values["model"], model),
        "cluster": machine,
        "training": {**values["training"], "seq_len": training.seq_len},  # "8k" as a number
    }
    return Job(
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


def read_training(values: object, field: str = "training") -> TrainingSpec:
    """The `training` part, checked against known trainers. Raises SpecError with every fault."""
    faults = list(_unknown_software(values, field)) if isinstance(values, Mapping) else []
    try:
        training = build(TrainingSpec, values, field)
    except SpecError as error:
        raise SpecError([*error.faults, *faults]) from None
    if faults:
        raise SpecError(faults)
    return training


def _unknown_software(values: Mapping[Any, Any], field: str) -> Iterator[Fault]:
    """Faults for a trainer or a release of torch that does not exist."""
    trainer, torch = values.get("trainer"), values.get("torch_version")
    if isinstance(trainer, str) and trainer not in TRAINERS:
        yield from UnknownNameError(f"{field}.trainer", trainer, TRAINERS, "trainer").faults
    if isinstance(torch, str):
        try:
            torch_release(torch)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            yield Fault(f"{field}.torch_version", torch, rule, remedy)


def _standing_alone(asked: object, model: ModelSpec) -> object:
    """The model as it was asked for; where that is a file, the shapes in it."""
    return inline_keys(model) if isinstance(asked, str) and not is_model_name(asked) else asked


class _Parts:
    """Parses one part after another and collects faults instead of stopping at the first."""

    def __init__(self, values: Mapping[Any, Any], faults: list[Fault]) -> None:
        self.values, self.faults = values, faults

    def parse(self, key: str, parser: Any) -> Any:
        """The parsed part; None when it is absent or faulty."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            return parser(value)
        except SpecError as error:
            self.faults.extend(error.faults)
            return None
