"""Progress on stderr while a command works: a spinner or a bar, where a person watches."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(slots=True)
class Working:
    """Progress of a command. shown: None where nobody watches."""

    shown: "Progress | None" = None
    line: "TaskID | None" = None

    def say(self, words: str) -> None:
        """Shows what is being done now."""
        if self.shown is not None and self.line is not None:
            self.shown.update(self.line, words=words)

    def done(self, count: int = 1) -> None:
        """So many more of the total are done."""
        if self.shown is not None and self.line is not None:
            self.shown.advance(self.line, count)


@contextmanager
def working(words: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Working]:
    """A spinner with words and the seconds so far; of a `total` a bar. It goes away in the end.

    quiet: show nothing, as for --json, whose caller reads what is printed.
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
