"""Reads clusters and GPUs as a person writes them: a catalogue name, a mapping, or a file."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import AliasChoices, BaseModel

from planner.catalog.clusters import (
    LABELS,
    catalogue_name,
    cluster_document,
    gpu_document,
    gpu_names,
)
from planner.errors import Fault, SpecError, fault
from planner.specs.cluster import FILE_ENDINGS, ClusterRequest, ClusterSpec, resolve
from planner.specs.fabric import LevelRequest
from planner.specs.gpu import GpuSpec, ScaleOut, ScaleUp
from planner.specs.gpu_families import SILICON
from planner.specs.validation import build

_MAX_CHARACTERS = 100_000
MOST_VALUES = 10_000  # of a user's file


def read_cluster(value: object, field: str = "cluster", *, allow_files: bool = True) -> ClusterSpec:
    """The cluster of a catalogue name, a mapping (contract, section 1), or a YAML or JSON file.

    allow_files: pass False where the text comes from a network.
    Raises UnknownNameError, or SpecError with all faults.
    """
    if isinstance(value, ClusterSpec):
        return value
    value = cluster_request(value, field, allow_files=allow_files)
    if isinstance(value, str):
        return load_cluster(value, field=field)
    if not isinstance(value, Mapping):
        remedy = "use for example {gpu: h100-sxm-80gb, num_gpus: 64}"
        raise SpecError(Fault(field, value, "must be a cluster name or a mapping", remedy))
    faults: list[SpecError] = []
    gpu = _gpu_of(value, field, faults)
    levels = _levels(value.get("fabric"), f"{field}.fabric", faults)
    request = None
    try:
        plain = {key: item for key, item in value.items() if key not in ("gpu", "fabric")}
        request = build(ClusterRequest, plain, field).model_copy(update={"fabric": levels})
    except SpecError as error:
        faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults or gpu is None or request is None:
        raise SpecError([one for error in faults for one in error.faults])
    for num_gpus in request.num_gpus:
        spec = resolve(request, gpu, num_gpus, field)
    return spec


def cluster_request(value: object, field: str = "cluster", *, allow_files: bool) -> object:
    """A cluster as `read_cluster` takes it, with a file's path replaced by the mapping in it.

    Raises SpecError where the file cannot be read.
    """
    if allow_files and isinstance(value, str) and value.endswith(FILE_ENDINGS):
        return read_mapping(value, field)
    return value


def _gpu_of(value: Mapping[object, object], field: str, faults: list[SpecError]) -> GpuSpec | None:
    try:
        if value.get("gpu") is None:
            remedy = "add gpu: h100-sxm-80gb, or another name of `catalog gpus`"
            raise fault(f"{field}.gpu", None, "is required", remedy)
        return read_gpu(value["gpu"], f"{field}.gpu")
    except SpecError as error:
        faults.append(error)
    return None


def _levels(value: object, field: str, faults: list[SpecError]) -> tuple[LevelRequest, ...] | None:
    """The levels as typed. Faults name a level by its index in the list."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        remedy = "leave it out to use the GPU's default"
        faults.append(
            SpecError(Fault(field, value, "must be a list of levels from inner to outer", remedy))
        )
        return None
    levels = []
    for index, item in enumerate(value):
        try:
            levels.append(
                item
                if isinstance(item, LevelRequest)
                else build(LevelRequest, item, f"{field}.{index}")
            )
        except SpecError as error:
            faults.append(error)
    return tuple(levels)


def read_gpu(value: object, field: str = "cluster.gpu") -> GpuSpec:
    """The GPU of a catalogue name or alias, or of an inline mapping.

    A mapping may name a `base`, whose figures its own values override; the power that follows from
    silicon, peak and clock follows from its own.
    Raises UnknownNameError, or SpecError with every fault.
    """
    if isinstance(value, GpuSpec):
        return value
    if isinstance(value, str):
        return load_gpu(value, field=field)
    if not isinstance(value, Mapping):
        rule = "must be a GPU name or a mapping"
        raise fault(field, value, rule, "use for example gpu: h100-sxm-80gb")
    if "base" not in value:
        return build(GpuSpec, value, field)
    base = read_gpu(value["base"], f"{field}.base")
    changes = {str(key): item for key, item in value.items() if key != "base"}
    changes.setdefault("name", f"{base.name}-custom")
    follows = {"nominal_power_watts"} if base.family in SILICON else set()
    figures = base.model_dump(exclude={"aliases", *follows})
    return build(GpuSpec, _merged(GpuSpec, figures, changes), field)


def _merged(
    spec: type[BaseModel], base: Mapping[str, object], changes: Mapping[str, object]
) -> dict[str, object]:
    """The base's figures overridden by the changes, under the names that the user typed.

    Nested mappings are merged key by key.
    """
    names = {field: _typed(spec, field, changes) for field in spec.model_fields}
    merged = {names.get(field, field): item for field, item in base.items()}
    for key, change in changes.items():
        before = merged.get(key)
        nested = {"scale_up": ScaleUp, "scale_out": ScaleOut}.get(key)
        if isinstance(before, Mapping) and isinstance(change, Mapping):
            merged[key] = _merged(nested, before, change) if nested else {**before, **change}
        else:
            merged[key] = change
    return merged


def _typed(spec: type[BaseModel], field: str, changes: Mapping[str, object]) -> str:
    alias = spec.model_fields[field].validation_alias
    names = (
        [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [field]
    )
    return next((name for name in names if name in changes), field)


def load_gpu(name: str, *, field: str = "cluster.gpu") -> GpuSpec:
    """The GPU of this catalogue name or alias, in any case.

    Raises UnknownNameError naming the closest.
    """
    return _gpu(catalogue_name("gpus", name, field))


@lru_cache(maxsize=256)
def _gpu(name: str) -> GpuSpec:
    return read_gpu({**gpu_document(name), "name": name}, f"gpus/{name}.yaml")


def catalogue_gpus() -> tuple[GpuSpec, ...]:
    return tuple(load_gpu(name) for name in gpu_names())


def load_cluster(name: str, *, field: str = "cluster") -> ClusterSpec:
    """The cluster of this catalogue name or alias, in any case.

    Raises UnknownNameError naming the closest.
    """
    return _cluster(catalogue_name("clusters", name, field))


@lru_cache(maxsize=256)
def _cluster(name: str) -> ClusterSpec:
    keys = {key: value for key, value in cluster_document(name).items() if key not in LABELS}
    return read_cluster(keys, f"clusters/{name}.yaml")


def _holds_more_than(most: int, document: object) -> bool:
    """Whether a document has more values, each counted as often as an alias repeats it."""
    seen, stack = 0, [document]
    while stack and seen <= most:
        item = stack.pop()
        seen += 1
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return seen > most


def read_mapping(path: str, field: str) -> Mapping[object, object]:
    """The mapping in a user's YAML or JSON file.

    Raises SpecError where it cannot be read or holds something else.
    """
    remedy = "give the path of a YAML file with gpu and num_gpus, or a catalogue name"
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text) if len(text) <= _MAX_CHARACTERS else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(Fault(field, path, f"cannot be read ({reason})", remedy)) from None
    if _holds_more_than(MOST_VALUES, document):
        rule = f"holds more than {MOST_VALUES:,} values, what aliases repeat included"
        raise SpecError(Fault(field, path, rule, "write out what the aliases mean"))
    inner = document.get("cluster", document) if isinstance(document, Mapping) else None
    if not isinstance(inner, Mapping):
        raise SpecError(Fault(field, path, "holds no mapping of keys to values", remedy))
    return {key: value for key, value in inner.items() if key not in LABELS}
