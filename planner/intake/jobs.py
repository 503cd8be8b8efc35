"""Reads a job as a person writes it (command line, file or request); reports all faults at once."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from planner.catalog.models import is_model_name
from planner.errors import Fault, SpecError, UnknownNameError, fault
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.machines import cluster_request, read_cluster
from planner.intake.models import read_model
from planner.intake.recipes import with_exchange, with_recipe
from planner.specs.cluster import ClusterSpec
from planner.specs.job import KEYS, LABELS, CurrentSpec, Job, ProbeSpec, SearchSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.validation import SpecT, build, closest
from planner.trainers.registry import TRAINERS, resolve_layout, trainer_name
from planner.trainers.release import torch_release

MOST_PARTS = 256  # distinct models, clusters and trainings that a reader remembers
MOST_CHARACTERS = 100_000  # of a part that it remembers beside others
PartT = TypeVar("PartT")
_NO_SEARCH = SearchSpec()


def read_job(values: object, *, allow_files: bool = True) -> Job:
    """The checked job; raises SpecError with the faults of every part.

    allow_files: whether model and cluster may be paths; False for requests from a network.
    """
    return JobReader(allow_files=allow_files).read(values)


class JobReader:
    """Reads the jobs of one batch; parts that they have in the same words are read once.

    So they share one model, one cluster and one training, by which a batch is priced
    (`estimates.Estimator`). A file is read once, too: a reader lasts no longer than its batch.
    allow_files: as in `read_job`.
    """

    def __init__(self, *, allow_files: bool = True) -> None:
        self.allow_files = allow_files
        self._known: dict[tuple[str, str], object] = {}

    def read(self, values: object) -> Job:
        """The checked job; raises SpecError with the faults of every part."""
        if not isinstance(values, Mapping):
            rule, remedy = "must be a mapping of keys to values", f"known keys: {', '.join(KEYS)}"
            raise fault("job", values, rule, remedy)
        faults = list(_unlike_a_job(values))
        model, named = self._part("model", values, faults, self._model) or (None, None)
        cluster, machine = self._part("cluster", values, faults, self._cluster) or (None, None)
        training = self._part("training", values, faults, read_training)
        search = self._spec("search", values, faults, SearchSpec) or _NO_SEARCH
        probe = self._spec("probe", values, faults, ProbeSpec)
        current = self._spec("current", values, faults, CurrentSpec)
        if current is not None and values.get("layout") is None:
            remedy = "send it with `recommend --current`, or POST /plan"
            faults.append(Fault("current", current.name, "was not read into a layout", remedy))
        layout = None
        if cluster is not None and training is not None and values.get("layout") is not None:
            try:
                layout = resolve_layout(
                    values["layout"],
                    trainer=training.trainer,
                    num_gpus=cluster.num_gpus,
                    trainer_version=training.trainer_version,
                    cuda_graphs=training.cuda_graphs,
                )
            except SpecError as error:
                faults.extend(error.faults)
        if faults or model is None or cluster is None or training is None:
            raise SpecError(faults)
        if layout is not None:
            training, layout = with_recipe(model, cluster, training, layout, values["layout"])
        training = with_exchange(model, cluster, training)
        # "8k" as a number, an alias as the trainer's name
        plain = {"seq_len": training.seq_len, "trainer": training.trainer}
        asked = values["training"]
        request = {
            **values,
            "model": named,
            "cluster": machine,
            "training": {**asked, **{key: one for key, one in plain.items() if key in asked}},
        }
        return Job.model_construct(  # every part has been checked
            id=values.get("id"),
            model=model,
            cluster=cluster,
            training=training,
            layout=layout,
            current=current,
            search=search,
            probe=probe,
            labels={key: values[key] for key in LABELS if key in values},
            request=request,
        )

    def _part(
        self,
        key: str,
        values: Mapping[Any, Any],
        faults: list[Fault],
        parser: Callable[[object], PartT],
    ) -> PartT | None:
        """The parsed part; None when it is absent, or faulty, which goes into `faults`."""
        value = values.get(key)
        if value is None:
            return None
        try:
            return self._read_once(key, value, parser)
        except SpecError as error:
            faults.extend(error.faults)
            return None

    def _spec(
        self, key: str, values: Mapping[Any, Any], faults: list[Fault], spec: type[SpecT]
    ) -> SpecT | None:
        return self._part(key, values, faults, partial(build, spec, field=key))

    def _read_once(self, key: str, value: object, parser: Callable[[object], PartT]) -> PartT:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):  # no JSON, as a specification that is one already
            return parser(value)
        if (key, text) not in self._known:
            if len(self._known) >= MOST_PARTS or len(text) > MOST_CHARACTERS:
                self._known.clear()
            self._known[key, text] = parser(value)
        return cast(PartT, self._known[key, text])

    def _model(self, asked: object) -> tuple[ModelSpec, object]:
        """(the model, what names it without a file)."""
        model = read_model(asked, allow_files=self.allow_files)
        return model, _standing_alone(asked, model)

    def _cluster(self, asked: object) -> tuple[ClusterSpec, object]:
        """(the cluster, what names it without a file)."""
        machine = cluster_request(asked, allow_files=self.allow_files)
        return read_cluster(machine, allow_files=False), machine


def _unlike_a_job(values: Mapping[Any, Any]) -> Iterator[Fault]:
    """Faults of the keys and the id."""
    for key in values:
        if key not in KEYS + LABELS:
            yield Fault(str(key), values[key], "unknown key", closest(str(key), KEYS + LABELS))
    for key in ("model", "cluster", "training"):
        if values.get(key) is None:
            yield Fault(key, None, "is required", f"add {key}")
    job_id = values.get("id")
    if isinstance(job_id, bool) or not isinstance(job_id, str | int | None):
        yield Fault("id", job_id, "must be a text or an integer", "quote it")


def read_training(values: object, field: str = "training") -> TrainingSpec:
    """The `training` part, checked against known trainers. Raises SpecError with every fault."""
    if isinstance(values, Mapping) and isinstance(values.get("trainer"), str):
        values = {**values, "trainer": trainer_name(values["trainer"])}
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
