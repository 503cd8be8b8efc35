"""Half of a search on another core: a forked copy of this process, which answers through a pipe."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from planner.beside import OtherCore, Piece

LEAST_CORES = 2


def second_core(*, spinners: int = 0) -> OtherCore | None:
    """What runs work on another core; None where there is none, and on other systems than Linux.

    Elsewhere libraries of the system do not survive a fork (macOS), or there is none (Windows).
    spinners: threads of this process that draw on the terminal. Nothing that a copy does asks for
        a lock of theirs.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < LEAST_CORES:
        return None
    return Forks(spinners)


@dataclass(frozen=True, slots=True)
class Forks:
    """Starts work in a copy of this process.

    A process with other threads than spinners is not copied, because their locks would be copied as
    they are: then the work is done when its result is asked for. So it is where a copy died.
    """

    spinners: int = 0

    def start(self, work: Callable[[], object]) -> Piece:
        """See `planner.beside.OtherCore`."""
        if threading.active_count() > 1 + self.spinners:
            return _Later(work)
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            _answer(work, writing)
        os.close(writing)
        return _Fork(process=process, pipe=os.fdopen(reading, "rb"), work=work)


def _answer(work: Callable[[], object], pipe: int) -> None:
    """Does the work in the copy and ends it, whatever happens, without what else exit does."""
    status = 1
    try:
        with os.fdopen(pipe, "wb") as out:
            pickle.dump(work(), out, protocol=pickle.HIGHEST_PROTOCOL)
        status = 0
    finally:
        os._exit(status)


@dataclass(frozen=True, slots=True)
class _Later:
    """Work that is done when its result is asked for."""

    work: Callable[[], object]

    def result(self) -> object:
        """See `planner.beside.Piece`."""
        return self.work()

    def stop(self) -> None:
        """Nothing was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fork:
    """Work in a copy of this process."""

    process: int
    pipe: BinaryIO
    work: Callable[[], object]

    def result(self) -> object:
        """See `planner.beside.Piece`; if the copy died or failed, the work is done here."""
        with self.pipe as pipe:
            answer = pipe.read()
        _, status = os.waitpid(self.process, 0)
        return self.work() if status else pickle.loads(answer)

    def stop(self) -> None:
        """Ends the copy."""
        self.pipe.close()
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
