"""A user's file behind `--current` and `--job`: a trainer's config, script or log, or a job or layout in YAML or JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api.errors import fault
from api.reading import read_text, read_yaml

REMEDY = "give a TorchTitan TOML or command, a Megatron argument script, a TorchTitan log, or YAML or JSON"


def read_job_file(path: str, field: str) -> dict[str, Any]:
    """The job that a file holds, or that says what a trainer's file says under `current`. Raises SpecError."""
    text = _text(path, field)
    theirs = _trainers(path, text)
    return {"current": theirs} if theirs is not None else _mapping(path, text, field)


def read_current_file(path: str) -> dict[str, Any]:
    """What `--current` adds to a job: `current` for a trainer's file, `layout` for a layout or a job that holds one."""
    text = _text(path, "--current")
    theirs = _trainers(path, text)
    if theirs is not None:
        return {"current": theirs}
    mapping = _mapping(path, text, "--current")
    inner = mapping.get("layout", mapping)
    if not isinstance(inner, Mapping):
        raise fault("--current", path, "holds no layout", "write keys such as dp_shard, tp and pp")
    return {"layout": inner}


def _text(path: str, field: str) -> str:
    return read_text(path, field, REMEDY).replace("\r\n", "\n")


def _trainers(path: str, text: str) -> dict[str, Any] | None:
    from planner.intake.current import format_of
    from planner.intake.files import beside, gather

    place = Path(path).expanduser()
    name = "standard input" if path == "-" else place.name
    if format_of(text, name) == "torchtitan-log":
        return _log(name, text)
    return gather(name, text, beside(place))


def _log(name: str, text: str) -> dict[str, Any]:
    """What a log says of its job, and what it measured."""
    raise NotImplementedError


def _mapping(path: str, text: str, field: str) -> dict[str, Any]:
    value = read_yaml(text, field, shown=path)
    if not isinstance(value, dict):
        shown = type(value).__name__ if value is not None else "nothing"
        raise fault(field, path, f"holds {shown}, not a mapping of keys to values", "write keys such as model, cluster and training")
    return value
