"""Half of a search on another core: a forked copy of this process, which answers through pipes."""

import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from planner.beside import OtherCore, Partner, Piece

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
        if not self._can_copy():
            return _Later(work)
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            _answer(work, writing)
        os.close(writing)
        return _Fork(process=process, pipe=os.fdopen(reading, "rb"), work=work)

    def partner(self, state: object) -> Partner | None:
        """See `planner.beside.OtherCore`."""
        if not self._can_copy():
            return None
        reading, answering = os.pipe()
        hearing, asking = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            os.close(asking)
            _serve(state, hearing, answering)
        os.close(answering)
        os.close(hearing)
        questions, answers = os.fdopen(asking, "wb"), os.fdopen(reading, "rb")
        return _Partner(process=process, questions=questions, answers=answers, state=state)

    def _can_copy(self) -> bool:
        return threading.active_count() <= 1 + self.spinners


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
        _end(self.process)


_ENDED: list[int] = []  # copies that nobody waited for yet


def _end(process: int) -> None:
    """Ends a copy, and does not wait until the system has taken its memory back."""
    os.kill(process, signal.SIGKILL)
    if not _ENDED:
        atexit.register(collect)
    _ENDED.append(process)


def collect() -> None:
    """Waits until all copies that were ended are gone; at the latest when this process ends."""
    while _ENDED:
        os.waitpid(_ENDED.pop(), 0)


Question = tuple[Callable[..., object], tuple[object, ...]]


def _serve(state: object, hearing: int, answering: int) -> None:
    """Answers in the copy, one question after another, until it is ended or fails."""
    try:
        with os.fdopen(hearing, "rb") as questions, os.fdopen(answering, "wb") as answers:
            while True:
                work, asked = pickle.load(questions)
                answer = work(state, *asked)
                pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
                answers.flush()
    finally:
        os._exit(1)


@dataclass(slots=True, kw_only=True)
class _Partner:
    """A copy of this process that works on its copy of the state.

    state: as it was when the copy was made. asked: all that was asked of it.
    told: how many answers have come. done: how many were found here, since the copy is gone.
    answered: those that nobody took yet, by their place in `asked`.
    """

    process: int
    questions: BinaryIO
    answers: BinaryIO
    state: object
    asked: list[Question] = field(default_factory=list)
    told: int = 0
    done: int = 0
    answered: dict[int, object] = field(default_factory=dict)
    gone: bool = False

    def start(self, work: Callable[..., object], *asked: object) -> Piece:
        """See `planner.beside.Partner`."""
        self.asked.append((work, asked))
        if not self.gone:
            with contextlib.suppress(BrokenPipeError):
                pickle.dump((work, asked), self.questions, protocol=pickle.HIGHEST_PROTOCOL)
                self.questions.flush()
        return _Answer(self, len(self.asked) - 1)

    def answer(self, place: int) -> object:
        """The answer to this question; of a copy that died or failed, it is found here."""
        while not self.gone and self.told <= place:
            try:
                self.answered[self.told] = pickle.load(self.answers)
                self.told += 1
            except (EOFError, pickle.UnpicklingError):  # it ended before or in its answer
                self.stop()
        while self.gone and self.done <= place:  # what was asked before changed the state
            work, asked = self.asked[self.done]
            self.answered[self.done] = work(self.state, *asked)
            self.done += 1
        return self.answered.pop(place)

    def stop(self) -> None:
        """See `planner.beside.Partner`."""
        if self.gone:
            return
        self.gone = True
        _end(self.process)
        self.answers.close()
        with contextlib.suppress(BrokenPipeError):
            self.questions.close()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a partner was asked, by its place among all that it was asked."""

    partner: _Partner
    place: int

    def result(self) -> object:
        """See `planner.beside.Piece`."""
        return self.partner.answer(self.place)

    def stop(self) -> None:
        """See `planner.beside.Piece`."""
        self.partner.stop()
