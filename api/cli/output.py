"""Output of commands: results to stdout; notes, errors and progress to stderr."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

    from planner.api.storage.records import Page

ItemT = TypeVar("ItemT")
PIPED_WIDTH = 110
MAX_WIDTH = 130
MIN_WIDTH = 40
# escapes, deletes, and what turns the direction of text; tabs and line ends stay
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# for terminals that know no more
ASCII = str.maketrans({"·": "-", "─": "-", "█": "#", "■": "#", "µ": "u", "×": "x"})


def error_line(text: str) -> None:
    sys.stderr.write(_printable(f"error: {text}\n", sys.stderr.encoding))


def note(text: str) -> None:
    """One line on stderr about something that is not an error."""
    sys.stderr.write(_printable(f"{text}\n", sys.stderr.encoding))


def say(text: str) -> None:
    sys.stdout.write(_printable(f"{text}\n", sys.stdout.encoding))


def show_json(value: object, indent: int | None = 2) -> None:
    """JSON on stdout; a value without a JSON form, such as a time, as text."""
    say(json.dumps(value, indent=indent, default=str))


def tell(value: object, lines: Iterable[str], *, json: bool, indent: int | None = 2) -> None:
    """Prints an answer as JSON, or as lines for a person."""
    if json:
        show_json(value, indent)
        return
    for line in lines:
        say(line)


def show_page(
    page: "Page[ItemT]",
    document: Callable[[ItemT], object],
    sentence: Callable[[ItemT], str],
    nothing: str,
    *,
    json: bool,
) -> None:
    """Prints one page of a list, as JSON or line by line. nothing: the line of an empty page."""
    if json:
        show_json({"items": list(map(document, page.items)), "next_cursor": page.next_cursor})
        return
    for one in page.items:
        say(sentence(one))
    if not page.items:
        say(nothing)
    note_more(page)


def note_more(page: "Page[ItemT]") -> None:
    if page.next_cursor is not None:
        note(f"more: --cursor {page.next_cursor}")


def flush_output() -> None:
    """Flushes stdout, so that a closed pipe shows here and not at interpreter exit."""
    sys.stdout.flush()


def _printable(text: str, encoding: str | None) -> str:
    """The text in the stream's encoding, with control characters escaped."""
    text = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    name = encoding or "utf-8"
    if not _knows_unicode(name):
        text = text.translate(ASCII)
    return text.encode(name, "backslashreplace").decode(name)


def make_console() -> "Console":
    """A console on stdout: as wide as the terminal, PIPED_WIDTH in a pipe.

    Colours only on a terminal and without NO_COLOR.
    """
    from rich.console import Console

    # With a terminal rich asks the terminal itself; COLUMNS overrides both.
    asked = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    if asked.isascii() and asked.isdigit() and int(asked):
        width = int(asked)
    console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = max(MIN_WIDTH, min(console.width, MAX_WIDTH))
    return console


def show(renderable: "RenderableType", console: "Console | None" = None) -> None:
    """A rich object on stdout, trailing blanks removed where nobody sees colours."""
    console = console or make_console()
    if console.is_terminal and _knows_unicode(console.encoding):
        console.print(renderable)
        return
    for line in as_text(renderable, console.width).splitlines():
        say(line)


def letters_only(console: "Console") -> bool:
    """Whether bars have to do without colours and blocks."""
    return not console.is_terminal or console.no_color or not _knows_unicode(console.encoding)


def _knows_unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def as_text(renderable: "RenderableType", width: int = PIPED_WIDTH) -> str:
    from rich.console import Console

    stream = StringIO()
    Console(
        file=stream, width=width, highlight=False, markup=False, emoji=False, no_color=True
    ).print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


@dataclass(slots=True)
class Working:
    """Progress of a command. shown: None where nobody watches."""

    shown: "Progress | None" = None
    line: "TaskID | None" = None

    def say(self, words: str) -> None:
        """Shows the current work."""
        if self.shown is not None and self.line is not None:
            self.shown.update(self.line, words=words)

    def done(self, count: int = 1) -> None:
        """So many more of the total are done."""
        if self.shown is not None and self.line is not None:
            self.shown.advance(self.line, count)


@contextmanager
def working(words: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Working]:
    """A spinner with words and the seconds so far; of a `total` a bar. It goes away in the end.

    quiet: show nothing, as for --json, whose caller reads the output.
    """
    if quiet or not sys.stderr.isatty():
        yield Working()
        return
    with progress(bar=total is not None) as shown:
        yield Working(shown, shown.add_task("", total=total, words=words))


def progress(*, bar: bool = False, hidden: bool = False) -> "Progress":
    """Lines on stderr: a spinner, a name, a bar, the seconds so far, and words.

    They go away in the end.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column

    # takes what the others leave: long words are cut, the count never is
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *((BarColumn(bar_width=20), MofNCompleteColumn()) if bar else ()),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False, table_column=rest),
        console=Console(stderr=True),
        disable=hidden,
        transient=True,
        expand=True,
    )
