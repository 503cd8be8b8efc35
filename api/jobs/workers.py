"""Background workers: studies and runs of sweeps from the queue, sweeps that come due, probes."""

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import ClassVar, Generic, TypeVar

from planner.api.calibration.update import update_from_probes
from planner.api.errors import UnavailableError
from planner.api.jobs.leases import Observer, abandoned, lost_workers, new_lease, take_over
from planner.api.jobs.owners import was_killed
from planner.api.jobs.plans import subject_of
from planner.api.jobs.probe_recovery import recover
from planner.api.jobs.probes import BACKEND, SHORT_OF, run_probe
from planner.api.jobs.studies import run_study
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import schedule_due
from planner.api.jobs.threads import future_of
from planner.api.jobs.webhooks import deliver_due
from planner.api.storage.job_records import OPEN, JobEnd, JobRecord, ProbeRecord, TaskRecord
from planner.api.storage.queue import LOST_WORKERS, SqlQueue
from planner.api.wiring import Wiring
from planner.errors import ConflictError, PlannerError, StoreError
from planner.probes.launch import Watch
from planner.units import HOUR, counted

IDLE_SECONDS = 2.0
PRUNE_SECONDS = HOUR  # between two prunings of the audit trail
MACHINE = "machine"  # the failure of a job that the machine could not run
Record = TypeVar("Record", bound=JobRecord)


def failed(failure: str, message: str) -> JobEnd:
    return JobEnd(state="failed", failure=failure, message=message)


class Workers(ABC, Generic[Record]):
    """Threads that claim and run one job after the other; a stop puts what runs back.

    Work that talks to the outside (`_errands`) has a thread each, so that nothing out there,
    however slow it answers, keeps a job from being claimed.
    noun: what they run, in the log and the threads' names.
    bug: the failure of a job in which our own code failed.
    report: called with a line when a job starts and when it ends.
    """

    noun: ClassVar[str]
    bug: ClassVar[str]

    def __init__(
        self, wiring: Wiring, number: int, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.wiring, self.report = wiring, report
        self.log = logging.getLogger(f"planner.{self.noun}s")
        self._stop, self._wake = threading.Event(), threading.Event()
        self._running: set[threading.Event] = set()  # what stops each
        self._errands_due = threading.Event()
        self._unreleased: list[Record] = []  # the database did not answer when they were given up
        self._number = number
        self._threads: list[Future[None]] = []
        self._running_errands: list[Future[None]] = []

    def start(self) -> None:
        errands = self._errands() if self._number else ()
        self._running_errands = [
            future_of("errand", self._run_errands, errand) for errand in errands
        ]
        self._threads = [
            future_of(f"{self.noun}s {index}", self._serve) for index in range(self._number)
        ]

    def wake(self) -> None:
        self._wake.set()

    def halt(self) -> None:
        """Starts nothing more, and asks running jobs to end."""
        self._stop.set()
        self._wake.set()
        self._errands_due.set()
        for stop in list(self._running):
            stop.set()

    def stop(self) -> None:
        """Ends running jobs, puts them back into the queue, and waits until that is done."""
        self.halt()
        wait(self._threads)

    @property
    def alive(self) -> bool:
        """Whether every thread that was started still serves."""
        return not any(thread.done() for thread in (*self._threads, *self._running_errands))

    @property
    @abstractmethod
    def queue(self) -> SqlQueue[Record]:
        """Where they claim. Raises StoreError while the database is down or not migrated."""

    def _claim_next(self) -> Record | None:
        return self.queue.claim(new_lease())

    @abstractmethod
    def _errands(self) -> Sequence[Callable[[], object]]:
        """Work beside the queue that waits for other hosts and programs."""

    def _run_errands(self, errand: Callable[[], object]) -> None:
        """Runs one errand now and then until the stop; jobs that it found are claimed at once."""
        while not self._stop.is_set():
            self._errands_due.clear()
            try:
                if errand():
                    self._wake.set()
            except PlannerError as error:
                self.log.warning("%s", error)
            except Exception:
                self.log.exception("beside the %ss", self.noun)
            self._errands_due.wait(IDLE_SECONDS)

    @abstractmethod
    def _work(self, record: Record, stop: threading.Event) -> None:
        """Runs it to its end, or until `stop` is set."""

    @abstractmethod
    def _about(self, record: Record) -> str:
        """One-line description of the job."""

    def _serve(self) -> None:
        while not self._stop.is_set():
            record = None
            try:
                self._release_the_given_up()
                record = self._claim_next()
            except PlannerError as error:
                self.log.warning("no %s can be claimed: %s", self.noun, error)
            except Exception:  # one job that nobody can read must not end all work
                self.log.exception("no %s can be claimed", self.noun)
            if record is None:
                self._wake.wait(IDLE_SECONDS)
                self._wake.clear()
            else:
                self._run(record)

    def _run(self, record: Record) -> None:
        stop = threading.Event()
        self._running.add(stop)
        if self._stop.is_set():
            stop.set()
        try:
            self.report(f"{record.id} starts: {self._about(record)}")
            self._work(record, stop)
        except StoreError as error:
            self.log.warning("%s: %s", record.id, error)
            if isinstance(error, UnavailableError):
                self._unreleased.append(record)
            elif not isinstance(error, ConflictError):  # then it is somebody else's
                with contextlib.suppress(PlannerError):
                    self.queue.retry(record, failed(error.kind, str(error)))
        except PlannerError as error:
            self.log.warning("%s: %s", record.id, error)
        except Exception as error:
            try:
                self._give_up(record, error)
            except PlannerError:
                self._unreleased.append(record)
        finally:
            self._running.discard(stop)
            with contextlib.suppress(PlannerError):
                now = self.queue.get(record.id)
                message = f": {now.message}" if now.message else ""
                self.report(f"{record.id} is {now.state}{message}")

    def _give_up(self, record: Record, error: Exception) -> None:
        """Ends a job that raised; one that the machine could not run is tried again."""
        if isinstance(error, OSError) and error.errno in SHORT_OF:
            message = f"{error.strerror}: {error.filename or 'no file named'}"
            self.log.warning("%s: %s", record.id, message)
            self.queue.retry(record, failed(MACHINE, message))
        else:
            self.log.exception("%s: a bug of ours", record.id, exc_info=error)
            message = f"a bug of ours: {type(error).__name__}: {error}"
            self.queue.finish(record, failed(self.bug, message))

    def _release_the_given_up(self) -> None:
        """Puts back the jobs that the database, when it failed, did not take; no attempt counts."""
        while self._unreleased:
            with contextlib.suppress(ConflictError):  # somebody else has it by now
                self.queue.release(self._unreleased[-1])
            self._unreleased.pop()


class TaskWorkers(Workers[TaskRecord]):
    """Workers that schedule sweeps, queue abandoned tasks again, and run studies and sweeps.

    Beside it they call webhooks, end abandoned probes and prune the audit trail.
    """

    noun, bug = "task", "bug"
    _pruned_at = -math.inf

    @property
    def queue(self) -> SqlQueue[TaskRecord]:
        return self.wiring.tasks

    def _claim_next(self) -> TaskRecord | None:
        schedule_due(self.wiring)
        self.end_abandoned()
        self._prune_audit()
        return super()._claim_next()

    def end_abandoned(self) -> None:
        """Puts tasks of crashed owners back into the queue, or ends them."""
        for task in abandoned(self.queue, check_processes=True):
            ours = take_over(self.queue, task)
            if ours is not None:
                end = failed(LOST_WORKERS, lost_workers(task.attempts, task.owner))
                self.queue.retry(ours, end, counts=not was_killed(task.owner))

    def _errands(self) -> Sequence[Callable[[], object]]:
        return (
            partial(recover, self.wiring, check_processes=True),
            partial(deliver_due, self.wiring, self._stop),
        )

    def _prune_audit(self) -> None:
        now = time.monotonic()
        if now - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = now
            pruned = self.wiring.audit.prune(self.wiring.settings.audit_days)
            if pruned:
                self.log.info("deleted %s of the audit trail", counted(pruned, "old line"))

    def _work(self, record: TaskRecord, stop: threading.Event) -> None:
        observer = Observer(stop=stop, releases=self._stop.is_set)
        if self._stop.is_set():
            self.queue.release(record)
        elif record.kind == "study":
            run_study(self.wiring, record, observer)
        else:
            run_sweep(self.wiring, record, observer)
            self._errands_due.set()

    def _about(self, record: TaskRecord) -> str:
        if record.kind == "sweep":
            return f"a run of {record.parent_id}, {record.request['name']}"
        model, gpu, num_gpus = subject_of(record)
        return f"a study of {model} on {num_gpus} {gpu}"


class ProbeWorkers(Workers[ProbeRecord]):
    """Workers that end abandoned probes, measure queued ones, and update the calibration."""

    noun, bug = "probe", BACKEND

    @property
    def queue(self) -> SqlQueue[ProbeRecord]:
        return self.wiring.probes

    def _errands(self) -> Sequence[Callable[[], object]]:
        return (partial(recover, self.wiring, check_processes=True),)

    def _work(self, record: ProbeRecord, stop: threading.Event) -> None:
        ended = run_probe(self.wiring, record, Watch(stop=stop), release_when_stopped=True)
        update_from_probes(self.wiring, [ended])

    def _about(self, record: ProbeRecord) -> str:
        return f"{record.layout} of {record.model} on {record.num_gpus} {record.gpu}"


def is_idle(wiring: Wiring) -> bool:
    """Whether nothing is queued, running or due, and no webhook is to be called yet."""
    for queue in (wiring.tasks, wiring.probes):
        if queue.list(limit=1, state=OPEN).items:
            return False
    return not wiring.sweeps.due(wiring.sweeps.now()) and not wiring.tasks.untold()
