"""The catalogue as plain mappings for the command line and the service."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner.api.storage.common import told
from planner.catalog.clusters import cluster_document, cluster_names, gpu_names
from planner.catalog.models import is_model_name, model_entry, model_names
from planner.errors import UnknownNameError
from planner.intake.machines import load_cluster, load_gpu
from planner.intake.models import load_model
from planner.schedules import SCHEDULES
from planner.specs.cluster import ClusterSpec
from planner.specs.gpu import GpuSpec
from planner.specs.model import ModelSpec
from planner.trainers.registry import TRAINERS

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One part of the catalogue: its names, one entry in full, and one line of a list."""

    names: Callable[[], Iterable[str]]
    entry: Callable[[str], Entry]
    line: Callable[[str], Entry]


def kind_of(name: str) -> Kind:
    """The part of this name. Raises UnknownNameError."""
    if name not in KINDS:
        raise UnknownNameError("kind", name, KINDS, "part of the catalogue")
    return KINDS[name]


def catalog_list(kind: str) -> list[Entry]:
    """A line for each entry, sorted by name. Raises UnknownNameError."""
    part = kind_of(kind)
    return [{"name": name, **part.line(name)} for name in part.names()]


def catalog_entry(kind: str, name: str) -> Entry:
    """One entry in full. Raises UnknownNameError."""
    return kind_of(kind).entry(name)


def named(wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """Values of a filter, with `model` and `gpu` under their names in the catalogue, if there."""
    found, model, gpu = dict(wanted), wanted.get("model"), wanted.get("gpu")
    if model is not None and is_model_name(model):
        found["model"] = model_entry(model).name
    if gpu is not None:
        with suppress(UnknownNameError):
            found["gpu"] = load_gpu(gpu).name
    return found


# ---- models --------------------------------------------------------------------------------------


def model_figures(model: ModelSpec) -> Entry:
    return {
        "parameters": model.total_parameters(),
        "active_parameters": model.active_parameters(),
        **told(model, "num_hidden_layers", "hidden_size", "num_experts", "vocab_size"),
    }


def _model_entry(name: str) -> Entry:
    entry, model = model_entry(name), load_model(name)
    return {
        **told(entry, "name", "aliases", "source", "notes", "published_parameters"),
        "published_parameters_exact": entry.exact,
        "parameters": model.total_parameters(),
        "active_parameters": model.active_parameters(),
        "model": dict(entry.keys),
    }


# ---- GPUs and clusters ---------------------------------------------------------------------------


def gpu_figures(gpu: GpuSpec) -> Entry:
    return {
        **told(gpu, "memory_bytes", "memory_bandwidth_bytes_per_second"),
        "bf16_flops_per_second": gpu.peak_flops_per_second.get("bf16"),
        "fp8_flops_per_second": gpu.peak_flops_per_second.get("fp8"),
        "power_limit_watts": gpu.power_limit_watts,
    }


def cluster_figures(cluster: ClusterSpec) -> Entry:
    return {"gpu": cluster.gpu.name, **told(cluster, "num_gpus", "gpus_per_node")}


def _cluster_entry(name: str) -> Entry:
    resolved = load_cluster(name).model_dump(mode="json")
    return {"name": name, **cluster_document(name), "resolved": resolved}


# ---- schedules and defaults ----------------------------------------------------------------------


def _schedule_line(name: str) -> Entry:
    found = SCHEDULES.find(name)
    stages = "1" if found.single_stage else "2" if found.v_shaped else "2 or more"
    about = (type(found).__doc__ or "").strip().partition("\n")[0]
    splits = found.splits_backward
    return {"stages_per_rank": stages, "splits_backward": splits, "about": about}


def _schedule_entry(name: str) -> Entry:
    found = SCHEDULES.find(name)
    rules = [rule.rule.replace("{", "").replace("}", "") for rule in found.rules()]
    trainers = [trainer.name for trainer in TRAINERS.values() if name in trainer.schedules]
    more = {"v_shaped": found.v_shaped, "rules": rules, "trainers": trainers}
    return {"name": name, **_schedule_line(name), **more}


def _trainer_entry(name: str) -> Entry:
    if name not in TRAINERS:
        raise UnknownNameError("name", name, TRAINERS, "trainer")
    rules = TRAINERS[name]
    entry = {field.name: _plain(getattr(rules, field.name)) for field in fields(rules)}
    return {
        **{key: value for key, value in entry.items() if not callable(value)},
        "tp_overlaps": [
            told(row, "mechanism", "asked")
            | told(row.releases, "since", "distribution")
            | {"source": row.source}
            for row in rules.tp_overlaps
        ],
        "schedules": list(rules.schedules),
        "sharding": rules.sharding.name,
        "framework": rules.framework.runtime,
        "history": [known.number for known in rules.history],
        "changes": [
            {name: text for name, text in asdict(change.releases).items() if text}
            | {key: _plain(value) for key, value in change.fields.items()}
            for change in rules.changes
        ],
    }


def _trainer_line(name: str) -> Entry:
    entry = _trainer_entry(name)
    shown = {key: entry[key] for key in ("zero_stage", "zero_stage_under_pp", "ac")}
    return {**shown, **entry["layout_defaults"]}


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)  # type: ignore[type-var]
    return dict(value) if isinstance(value, Mapping) else value


KINDS: dict[str, Kind] = {
    "models": Kind(model_names, _model_entry, lambda name: model_figures(load_model(name))),
    "gpus": Kind(
        gpu_names,
        lambda name: load_gpu(name, field="gpu").model_dump(mode="json"),
        lambda name: gpu_figures(load_gpu(name)),
    ),
    "clusters": Kind(
        cluster_names, _cluster_entry, lambda name: cluster_figures(load_cluster(name))
    ),
    "schedules": Kind(lambda: SCHEDULES, _schedule_entry, _schedule_line),
    "defaults": Kind(lambda: TRAINERS, _trainer_entry, _trainer_line),
}
