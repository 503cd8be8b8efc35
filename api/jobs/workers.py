"""Background work: studies and sweep runs from the queue, sweeps that come due, and probes."""

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from api.calibration.update import teach_ended
from api.jobs.leases import is_gone, lease
from api.jobs.probes import BACKEND, IDLE_SECONDS, RUNNING_LOOKED_AT, recover, run_probe
from api.jobs.records import named_in
from api.jobs.studies import Onlooker, run_study, take_over
from api.jobs.sweeps import run_sweep, schedule_due
from planner.errors import PlannerError
from planner.ports import ProbeEnd, ProbeFilter, ProbeRecord, TaskEnd, TaskFilter, TaskRecord
from probes.launch import Watch

if TYPE_CHECKING:
    from api.wiring import Wiring

OPEN: tuple[Literal["queued", "running"], ...] = ("queued", "running")
Record = TypeVar("Record", TaskRecord, ProbeRecord)


class Workers(ABC, Generic[Record]):
    """Threads that claim and run, and again; on a stop what runs goes back into the queue.

    noun: what they run, in the log and the threads' names.  tell: what starts and what ends, a line
        each.
    """

    noun: ClassVar[str]

    def __init__(
        self, wiring: "Wiring", number: int, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.wiring, self.tell, self.log = wiring, tell, logging.getLogger(f"planner.{self.noun}s")
        self._stop, self._wake = threading.Event(), threading.Event()
        self._running: set[threading.Event] = set()  # what stops each
        # a join that Ctrl-C interrupts takes the thread for dead (bpo-45274)
        self._ended = [threading.Event() for _ in range(number)]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(ended,), name=f"{self.noun}s {index}", daemon=True
            )
            for index, ended in enumerate(self._ended)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There is work."""
        self._wake.set()

    def stop(self) -> None:
        """Ends what runs, puts it back into the queue, and waits until that is done."""
        self._stop.set()
        self._wake.set()
        for stop in list(self._running):
            stop.set()
        for ended in self._ended:
            ended.wait()

    @abstractmethod
    def _next(self) -> Record | None:
        """What to run next, claimed."""

    @abstractmethod
    def _work(self, held: Record, stop: threading.Event) -> None:
        """Runs it to its end, or until `stop` is set."""

    @abstractmethod
    def _words(self, held: Record) -> str:
        """What it is."""

    @abstractmethod
    def _now(self, held: Record) -> Record:
        """The record as it stands."""

    @abstractmethod
    def _fail(self, held: Record, message: str) -> None:
        """Stores that it failed."""

    def _serve(self, ended: threading.Event) -> None:
        try:
            while not self._stop.is_set():
                try:
                    held = self._next()
                except PlannerError as error:
                    self.log.warning("no %s can be claimed: %s", self.noun, error)
                    held = None
                if held is None:
                    self._wake.wait(IDLE_SECONDS)
                    self._wake.clear()
                else:
                    self._run(held)
        finally:
            ended.set()

    def _run(self, held: Record) -> None:
        stop = threading.Event()
        self._running.add(stop)
        if self._stop.is_set():
            stop.set()
        try:
            self.tell(f"{held.id} starts: {self._words(held)}")
            self._work(held, stop)
        except PlannerError as error:
            self.log.warning("%s: %s", held.id, error)
        except Exception as error:
            self.log.exception("%s: a bug of ours", held.id)
            with contextlib.suppress(PlannerError):
                self._fail(held, f"a bug of ours: {type(error).__name__}: {error}")
        finally:
            self._running.discard(stop)
            with contextlib.suppress(PlannerError):
                now = self._now(held)
                self.tell(f"{held.id} is {now.state}" + (f": {now.message}" if now.message else ""))


class TaskWorkers(Workers[TaskRecord]):
    """They schedule sweeps, take over what the dead left, and run studies and sweeps."""

    noun = "task"

    def _next(self) -> TaskRecord | None:
        """What the dead left first: those whose lease has ended, and at once those known to be gone
        from this host.
        """
        schedule_due(self.wiring)
        running = self.wiring.tasks.list(TaskFilter(state="running"), None, RUNNING_LOOKED_AT).items
        for dead in (
            *self.wiring.tasks.expired(self.wiring.clock.now()),
            *(task for task in running if is_gone(task.owner)),
        ):
            heir = take_over(self.wiring, dead)
            if heir is not None:
                return heir
        return self.wiring.tasks.claim(lease(self.wiring))

    def _work(self, held: TaskRecord, stop: threading.Event) -> None:
        onlooker = Onlooker(stop=stop)
        if self._stop.is_set():
            self.wiring.tasks.release(held, counts=False)
        elif held.kind == "study":
            run_study(self.wiring, held, onlooker, keep_when_stopped=self._stop.is_set)
        else:
            run_sweep(self.wiring, held, onlooker, keep_when_stopped=self._stop.is_set)

    def _words(self, held: TaskRecord) -> str:
        if held.kind == "sweep":
            return f"a run of {held.parent_id}, {held.request['name']}"
        named = named_in(held)
        return f"a study of {named.model} on {named.num_gpus} {named.gpu}"

    def _now(self, held: TaskRecord) -> TaskRecord:
        return self.wiring.tasks.get(held.id)

    def _fail(self, held: TaskRecord, message: str) -> None:
        self.wiring.tasks.finish(
            held, TaskEnd(state="failed", failure="bug", message=message), self.wiring.clock.now()
        )


class ProbeWorkers(Workers[ProbeRecord]):
    """They conclude what the dead left, measure what is queued, and teach the calibration what came
    of it.
    """

    noun = "probe"

    def _next(self) -> ProbeRecord | None:
        recover(self.wiring)
        return self.wiring.probes.claim(lease(self.wiring))

    def _work(self, held: ProbeRecord, stop: threading.Event) -> None:
        ended = run_probe(self.wiring, held, Watch(stop=stop), release_when_stopped=True)
        teach_ended(self.wiring, [ended])

    def _words(self, held: ProbeRecord) -> str:
        return f"{held.layout} of {held.model} on {held.num_gpus} {held.gpu}"

    def _now(self, held: ProbeRecord) -> ProbeRecord:
        return self.wiring.probes.get(held.id)

    def _fail(self, held: ProbeRecord, message: str) -> None:
        self.wiring.probes.finish(
            held,
            ProbeEnd(state="failed", failure=BACKEND, message=message),
            self.wiring.clock.now(),
        )


def is_idle(wiring: "Wiring") -> bool:
    """Whether nothing is queued, running or due."""
    open_tasks = [wiring.tasks.list(TaskFilter(state=state), None, 1).items for state in OPEN]
    open_probes = [wiring.probes.list(ProbeFilter(state=state), None, 1).items for state in OPEN]
    return (
        not any(open_tasks) and not any(open_probes) and not wiring.sweeps.due(wiring.clock.now())
    )
