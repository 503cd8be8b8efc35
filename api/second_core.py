"""Two pieces of work at once: the second in a forked copy of this process, on another core."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")
LEAST_CORES = 2


@dataclass(frozen=True, slots=True)
class Forked:
    """Implements `planner.ports.Both`. Where no copy can be made, the two run one after the other.

    Copies are made on Linux alone (libraries of macOS do not survive a fork, Windows has none), if
    there is a second core, and if no other thread runs, whose locks would be copied as they are.
    spinners: threads that draw on the terminal, of whose locks a copy asks for none.
    """

    spinners: int = 0

    def __call__(
        self, first: Callable[[], FirstT], second: Callable[[], SecondT]
    ) -> tuple[FirstT, SecondT]:
        """Returns both results; the second one runs here after all if its copy fails."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
        if cores < LEAST_CORES or threading.active_count() > 1 + self.spinners:
            return first(), second()
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            _answer(second, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            try:
                mine = first()
                answer = pipe.read()
            except BaseException:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise
        _, status = os.waitpid(process, 0)
        return mine, second() if status else pickle.loads(answer)


def _answer(work: Callable[[], object], pipe: int) -> NoReturn:
    """Does the work in the copy and ends it, whatever happens, without what else exit does."""
    status = 1
    try:
        with os.fdopen(pipe, "wb") as out:
            pickle.dump(work(), out, protocol=pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        os._exit(status)
