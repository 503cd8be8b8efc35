"""Models, GPUs and clusters of the users' own: read once, then meant by name.

`own/NAME` is the newest version, `own/NAME@2` the second. In a job the name is replaced by what it
means before anything else reads it: a stored plan holds the entry itself, so no later version
changes it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from planner.api.catalog import cluster_figures, gpu_figures, model_figures
from planner.api.storage.tables import OwnEntry
from planner.api.wiring import Wiring
from planner.errors import SpecError, fault
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.machines import read_cluster, read_gpu
from planner.intake.models import read_model

PREFIX = "own/"
MOST_VERSION_DIGITS = 6
KINDS = {"models": ("model",), "gpus": ("gpu", "base"), "clusters": ("cluster",)}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
_MEANT = re.compile(rf"own/({_NAME.pattern})(?:@([1-9][0-9]{{0,{MOST_VERSION_DIGITS - 1}}}))?")
# which part of the catalogue a string under this key names
_KIND_OF_KEY = {key: kind for kind, keys in KINDS.items() for key in keys}
_KIND_OF_KEY |= {"models": "models", "clusters": "clusters"}


def full_name(entry: OwnEntry) -> str:
    return f"{PREFIX}{entry.name}@{entry.version}"


def add_entry(wiring: Wiring, kind: str, name: object, spec: object) -> OwnEntry:
    """Checks and stores an entry: a new version, or the newest where it says the same.

    spec: as a job writes it: keys of a config.json or of ours, a GPU's figures or its base with
        some of them, a cluster. Raises SpecError with every fault, ForbiddenError.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "must be 1 to 40 of a-z, 0-9, dot, underscore and hyphen, with no sign in front"
        raise fault("name", name, rule, "use for example our-moe-30b")
    if not isinstance(spec, Mapping):
        raise fault("spec", spec, "must be a mapping of keys to values", "send what a job has")
    return wiring.own_entries.add(kind, name, _READERS[kind](with_own(wiring, spec)))


def with_own(wiring: Wiring, values: Any) -> Any:
    """The job with the entries in place of their names. Raises SpecError."""
    return _replaced(wiring, values, "", "") if _mentions(values) else values


def _mentions(values: Any) -> bool:
    if isinstance(values, str):
        return values.startswith(PREFIX)
    if isinstance(values, Mapping):
        return any(map(_mentions, values.values()))
    return isinstance(values, list) and any(map(_mentions, values))


def _replaced(wiring: Wiring, value: Any, key: str, field: str) -> Any:
    if isinstance(value, Mapping):
        inside = f"{field}." if field else ""
        pairs = value.items()
        return {name: _replaced(wiring, one, str(name), f"{inside}{name}") for name, one in pairs}
    if isinstance(value, list):
        return [_replaced(wiring, one, key, f"{field}.{at}") for at, one in enumerate(value)]
    if isinstance(value, str) and value.startswith(PREFIX) and key in _KIND_OF_KEY:
        return _meant(wiring, _KIND_OF_KEY[key], value, field)
    return value


def _meant(wiring: Wiring, kind: str, text: str, field: str) -> dict[str, Any]:
    """The entry as a job writes it, under its full name; a cluster has none."""
    entry = named_entry(wiring, kind, text)
    if entry is None:
        remedy = f"GET /catalog/{kind} lists them, POST /catalog/{kind} adds one"
        raise fault(field, text, f"no such entry of your own {kind}", remedy)
    return entry.spec if kind == "clusters" else {**entry.spec, "name": full_name(entry)}


def named_entry(wiring: Wiring, kind: str, text: str) -> OwnEntry | None:
    """The entry that `own/NAME` or `own/NAME@VERSION` means; None where there is none."""
    found = _MEANT.fullmatch(text)
    if found is None or kind not in KINDS:
        return None
    return wiring.own_entries.find(kind, found[1], int(found[2]) if found[2] else None)


# ---- what is stored: all of it, so that nothing that it is made from can change it ---------------


def _model(spec: Mapping[str, Any]) -> dict[str, Any]:
    return _plain(inline_keys(read_model(spec, "spec", allow_files=False)))


def _gpu(spec: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = read_gpu(spec, "spec").model_dump(mode="json", exclude={"aliases"})
    return found


def _cluster(spec: Mapping[str, Any]) -> dict[str, Any]:
    try:
        read_cluster(spec, "spec", allow_files=False)
    except SpecError as error:
        raise error.renamed(lambda name: name.replace("cluster.", "spec.")) from None
    return _plain(dict(spec))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


_READERS = {"models": _model, "gpus": _gpu, "clusters": _cluster}


def own_line(entry: OwnEntry) -> dict[str, Any]:
    return {
        "name": full_name(entry),
        "version": entry.version,
        "created_at": entry.created_at.isoformat(timespec="seconds"),
        "asked_by": entry.asked_by,
        **_ABOUT[entry.kind](entry.spec),
    }


def own_entry(entry: OwnEntry) -> dict[str, Any]:
    return {**own_line(entry), "spec": entry.spec}


_ABOUT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "models": lambda spec: model_figures(read_model(spec, allow_files=False)),
    "gpus": lambda spec: gpu_figures(read_gpu(spec)),
    "clusters": lambda spec: cluster_figures(read_cluster(spec, allow_files=False)),
}
