"""Reads clusters and GPUs as a person writes them: a catalogue name, a mapping, or a file."""

import os
from collections.abc import Mapping
from functools import lru_cache

from pydantic import AliasChoices, BaseModel

from planner.catalog.clusters import (
    LABELS,
    catalogue_name,
    cluster_document,
    gpu_document,
    gpu_names,
)
from planner.errors import Fault, SpecError, fault
from planner.intake.text import read_mapping_file
from planner.specs.cluster import FILE_ENDINGS, ClusterRequest, ClusterSpec, resolve
from planner.specs.fabric import LevelRequest
from planner.specs.gpu import GpuSpec, ScaleOut, ScaleUp
from planner.specs.gpu_families import SILICON
from planner.specs.validation import build


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
    if not allow_files or not isinstance(value, str):
        return value
    if not value.lower().endswith(FILE_ENDINGS) and os.sep not in value:
        return value
    mapping = read_mapping_file(value, field)
    inner = mapping.get("cluster", mapping)
    return _without_labels(inner) if isinstance(inner, Mapping) else inner


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
    return read_cluster(catalogue_request(name), f"clusters/{name}.yaml")


def catalogue_request(name: str) -> Mapping[str, object]:
    """The mapping behind a catalogue name or alias, so that one value of it can be changed."""
    return _without_labels(cluster_document(name))


def _without_labels(document: Mapping[str, object]) -> Mapping[str, object]:
    return {key: value for key, value in document.items() if key not in LABELS}
