"""Turns pydantic's errors into the planner's: every fault with field, value, rule and remedy."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WithJsonSchema

from planner.errors import Fault, SpecError, fault

SpecT = TypeVar("SpecT", bound=BaseModel)


class Value(BaseModel):
    """Base of every spec: a frozen value; with `extra="forbid"` an unknown key is an error."""

    model_config = ConfigDict(frozen=True)


def _one_line(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be one line of printable text; leave out what cannot be seen")
    return name


Name = Annotated[str, AfterValidator(_one_line)]  # lists and reports show it in a line


def closest(name: str, known: Iterable[str]) -> str:
    """Remedy text naming the known names that are most like `name`."""
    names, name = sorted(known), re.sub(r"^fp(?=8)", "float", name)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def registered(
    known: Collection[str], refusal: Callable[[str], str] | None = None
) -> AfterValidator:
    """Validator of a text that names an entry of a registry.

    refusal: "rule; remedy" for another name; by default the closest names.
    """

    def check(name: str) -> str:
        if name not in known:
            usual = f"is not one of the known values; {closest(name, known)}"
            raise ValueError(usual if refusal is None else refusal(name))
        return name

    return AfterValidator(check)


def enum_of(known: Iterable[str]) -> WithJsonSchema:
    """Schema of a text that is one of these."""
    return WithJsonSchema({"type": "string", "enum": list(known)})


def build(spec: type[SpecT], values: object, field: str) -> SpecT:
    """A spec from what a person typed.

    Raises SpecError with all faults; their fields are named from `field` down.
    """
    if not isinstance(values, Mapping):
        remedy = f"known keys: {', '.join(spec.model_fields)}"
        raise fault(field, values, "must be a mapping of keys to values", remedy)
    try:
        return spec.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(spec, item, field) for item in error.errors(include_url=False)]
        raise SpecError(faults) from None


def _fault(spec: type[BaseModel], item: Any, field: str) -> Fault:
    parts = [str(part) for part in item["loc"]]
    path = [part for part in parts if not part.startswith(("function-", "literal["))]
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "extra_forbidden":
        known = spec.model_fields if len(parts) == 1 else ()
        rule, remedy = "unknown key", closest(parts[-1], known) if known else "remove it"
    elif kind == "missing":
        value, rule, remedy = None, "is required", f"add {(path or [field])[-1]}"
    elif kind == "literal_error":
        rule, remedy = "is not one of the known values", f"use {context.get('expected', '')}"
    elif kind == "value_error":
        rule, _, remedy = str(context.get("error", item["msg"])).partition("; ")
        remedy = remedy or "correct the value"
    elif kind in _WORDS:
        limits = {k: f"{one:g}" if isinstance(one, float) else one for k, one in context.items()}
        rule, remedy = (words.format(**limits) for words in _WORDS[kind])
    else:
        rule = item["msg"][:1].lower() + item["msg"][1:]
        remedy = "give a value of another kind"
    return Fault(".".join([field, *path]).strip("."), value, rule, remedy)


# Pydantic's kind of error -> what the value must be, and what would pass. {name} stands for the
# error's own limit.
_WORDS: Mapping[str, tuple[str, str]] = {
    "int_type": (
        "must be a whole number",
        "give digits alone, for example 8, without quotes or a point",
    ),
    "int_parsing": ("must be a whole number", "give digits alone, for example 8"),
    "int_from_float": ("must be a whole number", "round it"),
    "int_parsing_size": ("is too long for a number", "give fewer digits"),
    "float_type": ("must be a number", "give for example 1.5 or 2e12, without quotes"),
    "float_parsing": ("must be a number", "give for example 1.5 or 2e12"),
    "finite_number": ("must be a finite number", "give for example 1.5 or 2e12"),
    "bool_type": ("must be true or false", "give true or false without quotes"),
    "bool_parsing": ("must be true or false", "give true or false"),
    "string_type": ("must be a text", "put it in quotes"),
    "greater_than": ("must be above {gt}", "give a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "give {ge} or more"),
    "less_than": ("must be below {lt}", "give a number below {lt}"),
    "less_than_equal": ("must be at most {le}", "give {le} or less"),
    "list_type": ("must be a list", "write for example [1, 2]"),
    "tuple_type": ("must be a list", "write for example [1, 2]"),
    "dict_type": ("must be a mapping of keys to values", "write for example {{tp: 8}}"),
    "model_type": ("must be a mapping of keys to values", "write key: value pairs"),
    "string_too_long": ("is longer than {max_length} characters", "shorten it"),
    "string_too_short": ("must not be empty", "give at least {min_length} characters"),
}
