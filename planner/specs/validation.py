"""Turns pydantic's errors into the planner's: every fault with field, value, rule and remedy."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, TypeVar

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
    known: Mapping[str, object], refusal: Callable[[str], str] | None = None
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
        raise SpecError(_faults(spec, error, field)) from None


def _faults(spec: type[BaseModel], error: ValidationError, field: str) -> list[Fault]:
    faults = []
    for item in error.errors(include_url=False):
        path = ".".join(
            [
                field,
                *(
                    str(part)
                    for part in item["loc"]
                    if not str(part).startswith(("function-", "literal["))
                ),
            ]
        ).strip(".")
        kind, context = item["type"], item.get("ctx", {})
        if kind == "extra_forbidden":
            leaf = str(item["loc"][-1])
            known = spec.model_fields if len(item["loc"]) == 1 else ()
            faults.append(
                Fault(
                    path,
                    item["input"],
                    "unknown key",
                    closest(leaf, known) if known else "remove it",
                )
            )
        elif kind == "missing":
            faults.append(Fault(path, None, "is required", f"add {path.rsplit('.', 1)[-1]}"))
        elif kind == "literal_error":
            faults.append(
                Fault(
                    path,
                    item["input"],
                    "is not one of the known values",
                    f"use {context.get('expected', '')}",
                )
            )
        elif kind == "value_error":
            rule, _, remedy = str(context.get("error", item["msg"])).partition("; ")
            faults.append(Fault(path, item["input"], rule, remedy or "correct the value"))
        else:
            rule, remedy = _plain_words(kind, context) or (
                item["msg"][:1].lower() + item["msg"][1:],
                "give a value of another kind",
            )
            faults.append(Fault(path, item["input"], rule, remedy))
    return faults


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


def _plain_words(kind: str, context: Mapping[str, object]) -> tuple[str, str] | None:
    """(rule, remedy) for one of pydantic's kinds of errors; None where we have no text for it."""
    words = _WORDS.get(kind)
    limits = {
        name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()
    }
    return None if words is None else (words[0].format(**limits), words[1].format(**limits))
