"""Specs in, numbers out: the library that prices and ranks layouts for distributed training.

`read_current(path)` is what a trainer's own config or script runs, as a job; it is loaded when it
is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.intake.trainer_files.files import read_current as read_current


def __getattr__(name: str) -> object:
    if name == "read_current":
        from planner.intake.trainer_files.files import read_current

        return read_current
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
