"""Changes values in a user's YAML or JSON; comments, order, unknown keys and spacing stay."""

import json
import re
from collections.abc import Callable, Mapping

import yaml

Path = tuple[str, ...]
Write = Callable[[object], str]
_WORD = re.compile(r"[A-Za-z][\w.-]*")


def edit_yaml(text: str, changes: Mapping[Path, object]) -> str:
    """The text with these values set.

    A value that is there is replaced where it stands. A new one goes behind the last key of its
    mapping, a new mapping behind that of the one around it.
    """
    write = json.dumps if text.lstrip().startswith("{") else _plain
    for path, value in changes.items():
        text = _set(text, path, value, write)
    return text


def _plain(value: object) -> str:
    """A value in YAML: a word without quotes, unless YAML has a meaning for it."""
    if isinstance(value, str) and _WORD.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)


def _set(text: str, path: Path, value: object, write: Write) -> str:
    node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            return text  # a file whose mapping is a scalar here says it in another way
        inner = next((one for key, one in node.value if key.value == name), None)
        if inner is None:
            return _added(text, node, path[depth:], value, write)
        node = inner
    if not isinstance(node, yaml.ScalarNode):
        return text
    return text[: node.start_mark.index] + write(value) + text[node.end_mark.index :]


def _added(text: str, node: yaml.MappingNode, path: Path, value: object, write: Write) -> str:
    """The text with a new key, and the mappings that it is in, behind the last key of a mapping."""
    if not node.value:
        return text
    (key, _), last = node.value[-1][:2], _last(node)
    if node.flow_style:
        inside = write(value)
        for name in reversed(path[1:]):
            inside = f"{{{write(name)}: {inside}}}"
        ends = {before.end_mark.line for before, _ in node.value}
        gap = f"\n{' ' * key.start_mark.column}" if len(ends) == len(node.value) > 1 else " "
        at = node.value[-1][1].end_mark.index
        return f"{text[:at]},{gap}{write(path[0])}: {inside}{text[at:]}"
    indents = [" " * (key.start_mark.column + 2 * depth) for depth in range(len(path))]
    lines = [f"{indent}{name}:" for indent, name in zip(indents, path, strict=True)]
    lines[-1] += f" {write(value)}"
    line = last.end_mark.line
    ends_of = text.splitlines(keepends=True)
    before = "".join(ends_of[: line + 1])
    joint = "" if before.endswith("\n") else "\n"
    return before + joint + "\n".join(lines) + "\n" + "".join(ends_of[line + 1 :])


def _last(node: yaml.Node) -> yaml.Node:
    """The last scalar or flow within a block, whose mark is where its text ends."""
    while not getattr(node, "flow_style", True) and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def changed_leaves(
    before: Mapping[Path, object], after: Mapping[Path, object], gone: Mapping[str, object]
) -> dict[Path, object]:
    """Values of `after` that are others than before; for one that it lacks, the value of `gone`.

    gone: last key -> the value that means that the setting is not there.
    """
    found = {path: value for path, value in after.items() if before.get(path) != value}
    return found | {
        path: gone[path[-1]] for path in before if path not in after and path[-1] in gone
    }
