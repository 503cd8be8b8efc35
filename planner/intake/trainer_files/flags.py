"""Finds the flags of one command in a script, and writes the script with a few of them changed."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import fault
from planner.export.commands import plain_name
from planner.export.titan_settings import AC_COMMAND
from planner.intake.trainer_files.shell import Chars, Script, Span, read_script
from planner.trainers.titan_settings import AC

_VARIABLE = re.compile(r"[ \t]+\$\{?\w+\}?")
Changes = Mapping[str, Sequence[str] | None]
# beginnings of torchrun's own flags
LAUNCHER = ("nproc", "nnodes", "rdzv", "local_ranks", "role", "tee", "master", "node_rank",
            "standalone")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """One flag and its values.

    name: without dashes, with _ for -.
    joined: whether it is written as --name=value.
    """

    name: str
    flag: Chars
    values: tuple[Chars, ...]
    joined: bool

    @property
    def words(self) -> list[str]:
        joined = [self.flag.text.partition("=")[2]]
        return joined if self.joined else [value.text for value in self.values]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a script. end: where its last word ends."""

    script: Script
    fields: tuple[Chars, ...]
    end: int

    @property
    def flags(self) -> tuple[Placed, ...]:
        return tuple(_placed(self.fields))

    @property
    def texts(self) -> list[str]:
        return [field.text for field in self.fields]

    def words(self) -> dict[str, list[str]]:
        """Flag -> its values. Where a flag is given twice, the last one counts."""
        return {placed.name: placed.words for placed in self.flags}


def commands_of(text: str, files: Mapping[str, str] | None = None) -> list[Command]:
    """Every command of a script, in order. files: texts that it may read in with `source`."""
    script = read_script(text, files)
    ends = zip(script.commands, script.ends, strict=True)
    return [Command(script, tuple(fields), end) for fields, end in ends]


def best_command(
    commands: Sequence[Command], rating: Callable[[Command], int], trainer: str, remedy: str
) -> Command:
    """The command with the highest rating, the last of several.

    Raises SpecError where every rating is 0.
    """
    best = max(reversed(commands), default=None, key=rating)
    if best is None or rating(best) == 0:
        raise fault("current", None, f"holds no command that starts {trainer}", remedy)
    return best


def _placed(fields: Sequence[Chars]) -> Iterator[Placed]:
    groups: list[list[Chars]] = []
    for field in fields:
        # TorchTitan 0.3 writes its subcommand without dashes
        if field.text[2:] and field.text.startswith(("--", AC_COMMAND)):
            groups.append([field])
        elif groups:
            groups[-1].append(field)
    for flag, *values in groups:
        joined = "=" in flag.text
        yield Placed(plain_name(flag.text), flag, () if joined else tuple(values), joined)


def edit_flags(
    text: str,
    read: Callable[[str], Command],
    changes: Changes,
    spell: Callable[[str], str],
    near: Callable[[str], bool],
) -> str:
    """The script with these flags set to these words, or removed where the words are None.

    A value is changed where it is written, in a variable if need be. Where another flag uses the
    same variable, the value is written in the command instead.
    read: finds the command in a text.
    spell: how a new flag is written, with its dashes.
    near: which flags, by plain name, a new one is written next to.
    """
    before = read(text)
    wanted = {name: words for name, words in before.words().items() if name not in changes}
    wanted |= {name: list(words) for name, words in changes.items() if words is not None}
    tries = []
    for at_definition in (True, False):
        new = _Edit(before, near, at_definition).changed(changes, spell)
        if read(new).words() == wanted:
            return new
        tries.append(new)
    return tries[0]


@dataclass(slots=True)
class _Edit:
    command: Command
    near: Callable[[str], bool]
    at_definition: bool

    def changed(self, changes: Changes, spell: Callable[[str], str]) -> str:
        text = self.command.script.text
        places = {placed.name: placed for placed in self.command.flags}
        edits: dict[Span, str] = {}
        new: list[str] = []
        gone: list[Span] = []
        for name, words in changes.items():
            placed = places.get(name)
            if placed is None:
                if words is not None:
                    new.append(" ".join([spell(name), *map(shlex.quote, words)]))
            elif words is None:
                gone.append(_whole(text, placed))
            elif placed.words != list(words):
                edits.update(self.value(text, placed, words))
        for span in _runs(text, gone):
            edits[_line_of(text, *span)] = ""
        for (start, end), replacement in sorted(edits.items(), reverse=True):
            text = text[:start] + replacement + text[end:]
        return self.added(text, new, sorted(edits.items())) if new else text

    def value(self, text: str, placed: Placed, words: Sequence[str]) -> dict[Span, str]:
        """The edits that give a flag new values.

        If the number of values stays the same, each one is replaced where it stands. Otherwise the
        whole flag is written again.
        """
        flag = placed.flag.text
        if placed.joined and placed.flag.outer is not None:
            return {placed.flag.outer: f"{flag.partition('=')[0]}={shlex.quote(' '.join(words))}"}
        spans = [self.place(value) for value in placed.values]
        if len(words) == len(spans) and all(spans):
            return {
                span: _fitting(text, span, word)
                for span, word in zip(spans, words, strict=True)
                if span is not None
            }
        start, end = _whole(text, placed)
        return {(start, end): " ".join([flag.partition("=")[0], *map(shlex.quote, words)])}

    def place(self, value: Chars) -> Span | None:
        """Where to write another value: at this one, or in the variable that it comes from."""
        if self.at_definition and value.span is not None:
            return value.span
        return value.reference or value.span or value.outer

    def added(self, text: str, new: Sequence[str], edits: Sequence[tuple[Span, str]]) -> str:
        """The text with new flags after the last one in the script, laid out like that line."""
        kept = [
            placed
            for placed in self.command.flags
            if placed.flag.span is not None and _is_setting(placed)
            for start in (_whole(self.command.script.text, placed)[0],)
            if not any(span[0] <= start < span[1] for span, _ in edits)
        ]
        kept = [placed for placed in kept if self.near(placed.name)] or kept
        moved = sum(len(replacement) - (end - start) for (start, end), replacement in edits)
        if not kept:
            fields = self.command.fields
            last = [one.outer[0] for one in fields if one.text.startswith(AC_COMMAND) and one.outer]
            end = _moved(last[0], edits) - 1 if last else self.command.end + moved
            return text[:end] + "".join(f" {flag}" for flag in new) + text[end:]
        start, end = _whole(self.command.script.text, kept[-1])
        start, end = (_moved(place, edits) for place in (start, end))
        line_start = text.rfind("\n", 0, start) + 1
        indent = text[line_start:start]
        if indent.strip():
            return text[:end] + "".join(f" {flag}" for flag in new) + text[end:]
        previous = text[:line_start].rstrip("\n").rpartition("\n")[2]
        after = text[end:].partition("\n")[0].strip()
        continued = previous.rstrip().endswith("\\") or after == "\\"
        parting = f" \\\n{indent}" if continued else f"\n{indent}"
        return text[:end] + "".join(parting + flag for flag in new) + text[end:]


def _is_setting(placed: Placed) -> bool:
    return not placed.name.startswith((*LAUNCHER, AC[:-1]))


def _moved(place: int, edits: Sequence[tuple[Span, str]]) -> int:
    return place + sum(len(new) - (end - start) for (start, end), new in edits if end <= place)


def _fitting(text: str, span: Span, word: str) -> str:
    """A word as it can stand at this place: unquoted inside quotes, else quoted where needed."""
    return word if _in_quotes(text, span) else shlex.quote(word)


def _in_quotes(text: str, span: Span) -> bool:
    before = text[: span[0]][-1:]
    return before in ("'", '"') and before == text[span[1] : span[1] + 1]


def _written(text: str, field: Chars) -> Span | None:
    """Where a field is written, including its own quotes.

    The quotes around a variable's assignment are not part of it.
    """
    span, outer = field.span, field.outer
    if span is None:
        return field.reference or outer
    if outer is not None and outer[0] <= span[0] and span[1] <= outer[1]:
        return outer
    start, end = span
    quoted = _in_quotes(text, span) and text[: start - 1][-1:] != "="
    return (start - 1, end + 1) if quoted else span


def _whole(text: str, placed: Placed) -> Span:
    """From the flag to the last value written after it; a variable's value is written elsewhere."""
    start, end = _written(text, placed.flag) or (0, 0)
    for value in placed.values:
        spans = (value.outer, _written(text, value), value.reference)
        after = [one for one in spans if one is not None and one[0] >= end]
        near = [one for one in after if not text[end : one[0]].replace("\\\n", "").strip()]
        hidden = _VARIABLE.match(text, end)  # one whose value another variable brings
        end = near[0][1] if near else hidden.end() if hidden else end
    return start, end


def _runs(text: str, spans: Sequence[Span]) -> list[Span]:
    """Spans in order; neighbours with only blanks between them become one."""
    runs: list[Span] = []
    for start, end in sorted(spans):
        if runs and not text[runs[-1][1] : start].strip(" \t"):
            start, _ = runs.pop()
        runs.append((start, end))
    return runs


def _line_of(text: str, start: int, end: int) -> Span:
    """Values to remove together with a flag.

    This is its line and the backslash that continues it, where it has a line to itself. Otherwise
    it is the blanks before it.
    """
    line_start = text.rfind("\n", 0, start) + 1
    line_end = f"{text}\n".find("\n", end)
    before, after = text[line_start:start], text[end:line_end]
    if before.strip() or re.sub(r"\s*\\?\s*(#.*)?$", "", after):
        blanks = len(before) - len(before.rstrip(" \t"))
        return start - blanks, end
    if after.strip() == "\\" or line_start == 0:
        return line_start, min(line_end + 1, len(text))
    previous_end = line_start - 1
    previous = text[:previous_end]
    # it was the command's last line, so the line before it must not continue any more
    if previous.rstrip(" \t").endswith("\\"):
        return len(previous.rstrip(" \t")[:-1].rstrip(" \t")), line_end
    return line_start, min(line_end + 1, len(text))
