"""Reading what people and programs wrote: JSON and YAML text into plain values, or one clear error.

Plain means null, true/false, finite numbers, text, lists and mappings, nested at most MAX_DEPTH
deep.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import yaml

from planner.errors import SpecError, fault
from planner.intake.near_files import with_near_file

MAX_FILE_BYTES = 10_000_000
MAX_DEPTH = 64
MAX_VALUES = 200_000
MAX_BITS = 1023  # of a whole number: what a float holds
LONG_NUMBER = re.compile(r"[0-9]{300}")
# would act on the terminal that shows it
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def read_json(text: str | bytes, field: str, within: str = "") -> Any:
    """The value of a JSON text.

    within: see `check_plain`.

    Raises SpecError for broken JSON, NaN, Infinity, a key given twice, or endless nesting.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_once
        )
    except UnicodeDecodeError:
        raise fault(field, None, "is not UTF-8 text", "save it as UTF-8") from None
    except RecursionError:
        raise _too_deep(field, None) from None
    except ValueError as error:
        raise fault(
            field, _glimpse(text), f"is not valid JSON ({error})", "correct the JSON"
        ) from None
    if not _surely_plain(text):
        check_plain(value, field, within)
    return value


def _surely_plain(text: str) -> bool:
    """Whether `check_plain` cannot refuse the value of a JSON text with finite numbers.

    Short of walking through it: no value is shorter than a character, no level has fewer than one
    bracket, and without a backslash texts hold the characters that are written.
    """
    return (
        len(text) <= MAX_VALUES
        and text.count("{") + text.count("[") <= MAX_DEPTH
        and text.isascii()
        and "\\" not in text
        and not CONTROL.search(text)
        and not LONG_NUMBER.search(text)
    )


def _too_deep(field: str, shown: str | None) -> SpecError:
    return fault(field, shown, f"is nested deeper than {MAX_DEPTH} levels", "remove the nesting")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _glimpse(text: str | bytes) -> str:
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return shown[:40] + ("..." if len(shown) > 40 else "")


def read_yaml(text: str, field: str, shown: str | None = None, within: str = "") -> Any:
    """The value of a YAML (or JSON) text. Dates stay text.

    Duplicate keys, tags, endless aliases and NaN are refused.

    shown: what an error names as faulty, such as the file's name; else the beginning of the text.
    within: see `check_plain`.
    """
    shown = shown if shown is not None else _glimpse(text)
    try:
        _check_nesting(text, field, shown)
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise fault(
            field, shown, f"is not valid YAML ({_yaml_problem(error)})", "correct the file"
        ) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise fault(
            field, shown, f"holds a value that cannot be read ({error})", "correct the file"
        ) from None
    check_plain(value, field, within)
    return value


_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_YamlLoader):  # type: ignore[misc]
    """YAML's plain types without dates, and no key twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (YAML's own form)
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in _YamlLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_nesting(text: str, field: str, shown: str) -> None:
    """Libyaml's composer recurses in C and dies on deep nesting; its events do not."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(field, shown)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return " ".join(f"{problem}{place}".split())


def check_plain(value: object, field: str, within: str = "") -> None:
    """Raises SpecError unless the value is plain, finite and of sane size.

    What YAML aliases repeat counts.

    field: names the whole value in an error.
    within: what the names of its keys begin with, "sweep." for a sweep.
    """
    seen = 0
    stack = [(value, field, 0)]
    while stack:
        item, where, depth = stack.pop()
        inside = f"{where}." if where != field else within
        seen += 1
        if depth > MAX_DEPTH:
            raise _too_deep(field, None)
        if seen > MAX_VALUES:
            rule = f"holds more than {MAX_VALUES:,} values"
            raise fault(field, None, rule, "send fewer jobs at once, or remove YAML aliases")
        if isinstance(item, float) and not math.isfinite(item):
            raise fault(where, str(item), "is not a finite number", "give a finite number")
        if type(item) is int and item.bit_length() > MAX_BITS:
            rule = f"is a whole number of {item.bit_length():,} bits"
            raise fault(where, None, rule, f"give one of at most {MAX_BITS}")
        if isinstance(item, str) and not _is_unicode(item):
            remedy = "remove the lone surrogate characters"
            raise fault(where, _spelled(item), "is not valid Unicode", remedy)
        if isinstance(item, str) and (place := CONTROL.search(item)):
            rule = f"holds the control character {place[0]!a}"
            raise fault(where, _spelled(item), rule, "remove it")
        if isinstance(item, Mapping):
            stack.extend(
                (key, f"a key of {where}", depth + 1) for key in item if isinstance(key, str)
            )
            stack.extend((child, f"{inside}{key}", depth + 1) for key, child in item.items())
        elif isinstance(item, list):
            stack.extend((child, f"{inside}{index}", depth + 1) for index, child in enumerate(item))
        elif item is not None and not isinstance(item, bool | int | float | str):
            remedy = "use text, numbers, true or false, lists and mappings"
            raise fault(where, repr(item)[:40], "is not a plain value", remedy)


def _spelled(text: str) -> str:
    return ascii(text)[1:-1][:40]


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can escape but no database accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def opened(path: str, field: str, remedy: str) -> Iterator[IO[bytes]]:
    """A file to read, "-" for standard input. Raises SpecError where it cannot be read."""
    file = Path(path)
    try:
        if path == "-":
            yield sys.stdin.buffer
            return
        file = file.expanduser()
        if file.is_dir():
            raise fault(field, path, "is a directory, not a file", remedy)
        with file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise fault(field, path, "no such file", with_near_file(remedy, file)) from None
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise fault(field, path, rule, remedy) from None


def read_text(path: str, field: str, remedy: str = "give the path of a YAML or JSON file") -> str:
    """Text of a file, "-" for standard input.

    Raises SpecError for anything that is not a UTF-8 file of sane size.
    """
    with opened(path, field, remedy) as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        rule = f"is larger than {MAX_FILE_BYTES // 1_000_000} MB"
        raise fault(field, path, rule, "a job is a few kilobytes; give the right file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise fault(field, path, "is not UTF-8 text", remedy) from None


def read_mapping_file(path: str, field: str, within: str = "") -> dict[str, Any]:
    """The mapping in a YAML or JSON file. within: see `check_plain`. Raises SpecError."""
    text = read_text(path, field)
    value = (
        read_json(text, field, within)  # in which 1e-5 is a number, as it is not in YAML 1.1
        if path.endswith(".json")
        else read_yaml(text, field, shown=path, within=within)
    )
    return mapping_in(value, path, field)


def mapping_in(value: object, path: str, field: str) -> dict[str, Any]:
    """The value of a file, which must be a mapping. Raises SpecError."""
    if not isinstance(value, dict):
        shown = type(value).__name__ if value is not None else "nothing"
        rule = f"holds {shown}, not a mapping of keys to values"
        raise fault(field, path, rule, "write keys such as model, cluster and training")
    return value
