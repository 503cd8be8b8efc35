"""`planner-cli`: one file a command, of which only the named one is imported."""

import gc
import os
import sys


def main() -> None:
    """The console script."""
    open_closed_streams()
    gc.disable()  # what imports make stays; longer commands enable it again
    try:
        from planner.api.cli.root import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line was read
        code = 130
    sys.exit(code)


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
