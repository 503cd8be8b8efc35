"""Background work: studies and sweep runs from the queue, sweeps that come due, and probes."""

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Literal

from api.closed_loop import Onlooker, is_gone, run_study, take_over
from api.probing import IDLE_SECONDS, RUNNING_LOOKED_AT, lease
from api.sweeping import run_sweep, schedule_due
from planner.errors import PlannerError
from planner.ports import ProbeFilter, TaskEnd, TaskFilter, TaskRecord

if TYPE_CHECKING:
    from api.wiring import Wiring

OPEN: tuple[Literal["queued", "running"], ...] = ("queued", "running")
log = logging.getLogger("planner.tasks")


class TaskWorkers:
    """Threads that schedule sweeps, take over what the dead left, claim tasks and run them; on a stop what runs goes back."""

    def __init__(self, wiring: "Wiring", number: int) -> None:
        self.wiring = wiring
        self._stop, self._wake = threading.Event(), threading.Event()
        self._current: dict[int, Onlooker] = {}
        self._ended = [threading.Event() for _ in range(number)]  # a join that Ctrl-C interrupts takes the thread for dead (bpo-45274)
        self._threads = [threading.Thread(target=self._serve, args=(index,), name=f"tasks {index}", daemon=True) for index in range(number)]

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
        for onlooker in list(self._current.values()):
            onlooker.stop.set()
        self.join()

    def join(self) -> None:
        """Waits for the threads."""
        for ended in self._ended:
            ended.wait()

    def _serve(self, index: int) -> None:
        try:
            self._loop(index)
        finally:
            self._ended[index].set()

    def _loop(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                schedule_due(self.wiring)
                held = self._next()
            except PlannerError as error:
                log.warning("no task can be claimed: %s", error)
                held = None
            if held is None:
                self._wake.wait(IDLE_SECONDS)
                self._wake.clear()
                continue
            self._run(index, held)

    def _next(self) -> TaskRecord | None:
        """What the dead left first: those whose lease has ended, and at once those known to be gone from this host."""
        running = self.wiring.tasks.list(TaskFilter(state="running"), None, RUNNING_LOOKED_AT).items
        for dead in (*self.wiring.tasks.expired(self.wiring.clock.now()), *(task for task in running if is_gone(task.owner))):
            heir = take_over(self.wiring, dead)
            if heir is not None:
                return heir
        return self.wiring.tasks.claim(lease(self.wiring))

    def _run(self, index: int, held: TaskRecord) -> None:
        onlooker = Onlooker()
        self._current[index] = onlooker
        if self._stop.is_set():
            onlooker.stop.set()
        try:
            if self._stop.is_set():
                self.wiring.tasks.release(held, counts=False)
            elif held.kind == "study":
                run_study(self.wiring, held, onlooker, keep_when_stopped=self._stop.is_set)
            else:
                run_sweep(self.wiring, held, onlooker, keep_when_stopped=self._stop.is_set)
        except PlannerError as error:
            log.warning("%s: %s", held.id, error)
        except Exception as error:
            log.exception("%s: a bug of ours", held.id)
            with contextlib.suppress(PlannerError):
                end = TaskEnd(state="failed", failure="bug", message=f"a bug of ours: {type(error).__name__}: {error}")
                self.wiring.tasks.finish(held, end, self.wiring.clock.now())
        finally:
            del self._current[index]


def is_idle(wiring: "Wiring") -> bool:
    """Whether nothing is queued, running or due."""
    open_tasks = [wiring.tasks.list(TaskFilter(state=state), None, 1).items for state in OPEN]
    open_probes = [wiring.probes.list(ProbeFilter(state=state), None, 1).items for state in OPEN]
    return not any(open_tasks) and not any(open_probes) and not wiring.sweeps.due(wiring.clock.now())
