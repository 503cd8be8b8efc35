"""From pydantic's errors to the planner's: every fault of a request at once, each with field, value, rule and remedy."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import Fault, SpecError

SpecT = TypeVar("SpecT", bound=BaseModel)


def closest(name: str, known: Iterable[str]) -> str:
    """Remedy text naming the known names that look most like `name`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def build(spec: type[SpecT], values: object, field: str) -> SpecT:
    """Instance of a spec from what a person typed; raises SpecError with all faults, fields named from `field` down."""
    if not isinstance(values, Mapping):
        raise SpecError(Fault(field, values, "must be a mapping of keys to values", f"known keys: {', '.join(spec.model_fields)}"))
    try:
        return spec.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError(_faults(spec, error, field)) from None


def _faults(spec: type[BaseModel], error: ValidationError, field: str) -> list[Fault]:
    faults = []
    for item in error.errors(include_url=False):
        path = ".".join([field, *(str(part) for part in item["loc"] if not str(part).startswith(("function-", "literal[")))]).strip(".")
        kind, context = item["type"], item.get("ctx", {})
        if kind == "extra_forbidden":
            leaf = str(item["loc"][-1])
            known = spec.model_fields if len(item["loc"]) == 1 else ()
            faults.append(Fault(path, item["input"], "unknown key", closest(leaf, known) if known else "remove it"))
        elif kind == "missing":
            faults.append(Fault(path, None, "is required", f"add {path.rsplit('.', 1)[-1]}"))
        elif kind == "literal_error":
            faults.append(Fault(path, item["input"], "is not one of the known values", f"use {context.get('expected', '')}"))
        elif kind == "value_error":
            rule, _, remedy = str(context.get("error", item["msg"])).partition("; ")
            faults.append(Fault(path, item["input"], rule, remedy or "correct the value"))
        else:
            faults.append(Fault(path, item["input"], item["msg"][:1].lower() + item["msg"][1:], "correct the value"))
    return faults
