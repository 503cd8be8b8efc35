"""`planner-cli`: one file a command; what is slow to import is imported when the command runs."""

import atexit
import gc
import os
import sys
import threading
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # `typing` takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator

    from api.plan_records import PlanRecords


def main() -> None:
    """The console script."""
    open_closed_streams()
    gc.disable()  # what imports make stays; longer commands enable it again
    records = None
    try:
        with _records(sys.argv[1:]) as records:
            from api.cli.root import run

            code = run(sys.argv[1:], records)
    except KeyboardInterrupt:  # before the command line was read
        code = 130
    watched = sys.getprofile() is not None or sys.gettrace() is not None
    if records is not None and not watched and threading.active_count() == 1:
        exit_without_teardown(code)
    gc.freeze()  # else the interpreter looks for cycles in all that was imported before it ends
    sys.exit(code)


def exit_without_teardown(code: int) -> None:
    """Ends the process as `sys.exit` does, but does not wait until all modules are torn down."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the command flushed them and said what was wrong
            stream.flush()
    os._exit(code)


@contextmanager
def _records(arguments: list[str]) -> "Iterator[PlanRecords | None]":
    """What opens the database beside all else, for a command that asks for one plan."""
    elsewhere = [word for word in arguments if word.startswith(("-h", "--help", "--probe"))]
    if arguments[:1] != ["recommend"] or elsewhere:
        yield None
        return
    import pydantic.fields
    import pydantic.main  # noqa: F401  (both sides need it: here it is imported once)

    from api.plan_records import plan_records
    from api.second_core import second_core

    with plan_records(second_core()) as records:
        yield records


def open_closed_streams() -> None:
    """Opens the standard streams that a caller closed (`>&-`) on the null device.

    Else a database file would get the number of stdout.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(opened, "r" if name == "stdin" else "w", encoding="utf-8"))
