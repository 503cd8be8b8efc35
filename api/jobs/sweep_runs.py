"""One run of a sweep: measures what its spec names of every job, compares, and reports."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from planner.api.calibration.read import learned
from planner.api.calibration.update import update_about
from planner.api.errors import lines_of
from planner.api.jobs.drift import with_drift
from planner.api.jobs.failures import (
    MOST_OUT,
    BadHostLine,
    HostWatch,
    hosts_of,
    keep_out,
    next_try,
    step_of,
)
from planner.api.jobs.leases import Claimed, Observer, new_lease
from planner.api.jobs.probe_recovery import at_work, recover
from planner.api.jobs.probes import probes_of, run_all
from planner.api.jobs.side_by_side import NO_ROOM_WANTED, SideBySide
from planner.api.jobs.standing import Standing, SweepProgress
from planner.api.jobs.sweep_layouts import Item, SpentByRun, items_of
from planner.api.jobs.sweep_report import JobOfRun, line_of, report_of
from planner.api.jobs.sweeps import check_sweep
from planner.api.render.sweep import sweep_line
from planner.api.storage.job_records import OPEN, JobEnd, ProbeRecord, TaskRecord
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.wiring import Wiring
from planner.errors import PlannerError, StoreError
from planner.intake.jobs import read_job
from planner.probes.launch import Watch
from planner.probes.protocol import FailureKind
from planner.specs.sweep import SweepSpec

POLL_SECONDS = 0.25  # between two looks for room, and at whether we were stopped
SHOWN_SECONDS = 15.0  # between two lines while nothing ends
LOOK_SECONDS = 5.0  # between two looks at the hosts


def run_sweep(wiring: Wiring, record: TaskRecord, observer: Observer) -> TaskRecord:
    """Measures, learns, compares, and ends the claimed task with its report.

    A stopped run reports what it has. Raises what keeps all of it from being measured, and
    StoreError, as `at_work` does.
    """
    spec = SweepSpec.model_validate(dict(record.request))
    with at_work(wiring, record, observer) as claimed:
        check_sweep(wiring, spec)
        run = SweepRun(wiring=wiring, spec=spec, observer=observer, claimed=claimed)
        report = with_drift(wiring, record, spec, run.report())
    if observer.releases() and not claimed.cancelled:
        return claimed.release()
    return claimed.finish(
        JobEnd(
            state="cancelled" if observer.stop.is_set() else "done",
            result=report,
            gpu_seconds=report["gpu_seconds"],
            message=report["headline"],
        )
    )


@dataclass(kw_only=True)
class SweepRun:
    """A run in progress. spent: those that run included, with what they may use."""

    wiring: Wiring
    spec: SweepSpec
    observer: Observer
    claimed: Claimed[TaskRecord]
    spent: SpentByRun = field(default_factory=SpentByRun)
    layouts: int = 0
    failures: int = 0
    _jobs: list[JobOfRun] = field(default_factory=list)
    _pending: deque[Item] = field(default_factory=deque)
    _running: dict[str, Item] = field(default_factory=dict)
    _before: dict[tuple[str, str], list[ProbeRecord]] = field(default_factory=dict)
    _hosts: HostWatch = field(default_factory=HostWatch)
    _bad: list[BadHostLine] = field(default_factory=list)
    _out: frozenset[str] = frozenset()
    _measured: set[tuple[str, str]] = field(default_factory=set)  # trainers on GPUs

    def __post_init__(self) -> None:
        pool = self.wiring.pool(self.spec.pool)
        self._bench = SideBySide(
            wiring=self.wiring, pool=pool, pool_name=self.spec.pool, claimed=self.claimed
        )
        self._progress = SweepProgress(self.claimed, self.observer, self._standing)

    def report(self) -> dict[str, Any]:
        self._read_what_was_done()
        try:
            for number, values in enumerate(self.spec.jobs, start=1):
                self._plan(number, values)
                self._work(wait=False)
            self._work(wait=True)
        finally:
            self._bench.end()
            update_about(self.wiring, self._measured)
        self.claimed.store(standing=asdict(self._standing()), **NO_ROOM_WANTED)
        return report_of(self.wiring, self.claimed.record, self._jobs, self.spent, self._bad)

    # ---- what there is to do --------------------------------------------------------------------

    def _read_what_was_done(self) -> None:
        """Counts what this run has measured already, under an owner that crashed.

        Waits for probes of that owner: nobody may measure a layout while another still does. Those
        that go on in the pool are ours from now on.
        """
        while True:
            before = probes_of(self.wiring, self.claimed.record.id)
            if all(one.state not in OPEN for one in before) or self.observer.stop.is_set():
                break
            self.observer.on_message("waiting for probes that the last owner of this run left")
            recover(self.wiring, check_processes=True)
            self._adopt([one for one in before if one.state == "queued"])
            self.observer.stop.wait(POLL_SECONDS)
        for record in before:
            self.spent.gpu_seconds += gpu_seconds_of(record)
            if _counts(record):
                self.spent.probes += 1
                if record.state in ("done", "failed"):
                    key = (record.job_hash, record.layout)
                    self._before.setdefault(key, []).append(record)

    def _adopt(self, queued: Sequence[ProbeRecord]) -> None:
        """Awaits the probes that run without an owner; another worker may be quicker."""
        claimed = [self.wiring.probes.claim(new_lease(), job_id=one.id) for one in queued]
        ours = [one for one in claimed if one is not None]
        stop, say = self.observer.stop, self.claimed.reporter
        watches = {
            one.id: Watch(stop=stop, progress=say(one.layout, self.observer)) for one in ours
        }
        run_all(self.wiring, ours, watches)

    def _plan(self, number: int, values: Mapping[str, Any]) -> None:
        job = read_job(values, allow_files=False)
        one = JobOfRun(job=job)
        self._jobs.append(one)
        self._progress.report(
            f"job {number} of {len(self.spec.jobs)}: {job.model.name} on "
            f"{job.cluster.num_gpus} {job.cluster.gpu.name}"
        )
        run = self.claimed.record
        try:
            chosen = items_of(
                self.spec,
                job,
                now=self.wiring.clock.now,
                calibration=lambda: learned(
                    self.wiring, job, run.asked_by or "", until=run.started_at
                ),
                run_id=run.id,
            )
            one.items = list(chosen)
        except StoreError:
            raise
        except PlannerError as error:
            one.failure, one.error = error.kind, "; ".join(lines_of(error))
            self.failures += 1
            return
        for item in one.items:
            if isinstance(item.requested, str):
                self._end(item)
                continue
            for record in self._before.pop(item.key, []):
                item.attempts.append(record)
                self._look_at(item, record)
            self._go_on(item)

    def _go_on(self, item: Item) -> None:
        """To its first probe, to its next one after a failure that may pass, or to its line."""
        if not item.attempts:
            self._pending.append(item)
            return
        again = None
        if item.attempts[-1].state == "failed" and not item.confirms:
            again = next_try(item.attempts, self.spec.retries)
        if again is None:
            self._end(item)
        else:
            item.avoid = again
            self._pending.append(item)

    # ---- doing it -------------------------------------------------------------------------------

    def _work(self, *, wait: bool) -> None:
        """Starts what has room and takes what has ended; with `wait` until nothing is left."""
        while True:
            if self.observer.stop.is_set():
                self._bench.stop()
                self._give_up("stopped")
            self._start()
            took = False
            for record in self._bench.ended(POLL_SECONDS if wait else 0.0):
                took = True
                self._take(record)
                self._start()  # at once: the room is free
            if self._progress.is_time("look", LOOK_SECONDS) or not (self._running or self._pending):
                self._confirm_suspects()
            if self._progress.is_time("shown", SHOWN_SECONDS) and self._running:
                self._progress.report("", passing=True)
            if not (self._running or self._pending) or not (wait or took):
                return
            if not self._running:  # others have the room
                self.observer.stop.wait(POLL_SECONDS)

    def _start(self) -> None:
        """Starts probes in their order while pool, budget and hours allow."""
        if self._pending and self._progress.is_time("out", LOOK_SECONDS):
            self._out = frozenset(one.host for one in self.wiring.quarantine.active(self.spec.pool))
            self._hosts.known |= self._out
        while self._pending:
            item = self._pending[0]
            assert not isinstance(item.requested, str), "what cannot run is not pending"
            running, now = self._bench.running, self.wiring.sweeps.now
            limited = self.spent.limited(item.requested, self.spec, running, now)
            if isinstance(limited, str):
                if not self._running:
                    self._give_up(limited)
                return
            say = self.claimed.reporter(item.layout.short(), self.observer)
            avoid, rather_not = self._out, item.avoid
            if item.confirms:  # on the same host it would tell nothing
                avoid, rather_not = avoid | item.avoid, frozenset()
            started = self._bench.start(limited, avoid=avoid, rather_not=rather_not, say=say)
            if started is None:
                return
            self._pending.popleft()
            self._running[started.id] = item
            self.spent.probes += 1
            self.spent.most_at_once = max(self.spent.most_at_once, len(self._running))
            self.spent.retried += bool(item.attempts) and not item.confirms

    def _take(self, record: ProbeRecord) -> None:
        item = self._running.pop(record.id)
        self.spent.gpu_seconds += gpu_seconds_of(record)
        self.spent.probes -= not _counts(record)
        item.attempts.append(record)
        self._look_at(item, record)
        self._go_on(item)

    def _give_up(self, why: str) -> None:
        """Ends all that wait, with what they have or with the reason."""
        while self._pending:
            self._end(self._pending.popleft(), why)

    def _end(self, item: Item, why: str = "") -> None:
        first = item.line is None
        item.line = line_of(self.wiring, self.claimed.record, item, why)
        if first:
            self.layouts += 1
            self.failures += item.line["status"] in ("failed", "oom")
        self._progress.report(sweep_line(item.line))

    # ---- hosts ----------------------------------------------------------------------------------

    def _look_at(self, item: Item, record: ProbeRecord) -> None:
        """Notes what the probe says of its hosts; those found bad are kept out from now on."""
        hosts, seconds = hosts_of(record), step_of(record)
        if record.measurement_id is None:
            self._hosts.failed(item.key, hosts, record.failure)
        else:
            self._measured.add((item.job.training.trainer, record.gpu))
            self._hosts.measured(item.key, hosts, seconds, item.predicted_seconds)
        for bad in self._hosts.new_bad():
            if len(self._hosts.known) > MOST_OUT * self._hosts.num_hosts:
                continue
            self._bad.append(bad)
            self._out |= {bad.host}
            keep_out(self.wiring, self.spec.pool, bad, self.claimed.record.id)
            self._progress.report(f"host {bad.host} is kept out: {'; '.join(bad.evidence)}")

    def _confirm_suspects(self) -> None:
        """Runs layouts of a suspected host once more elsewhere, where the pool can choose."""
        if self.observer.stop.is_set() or not self._bench.avoids_hosts:
            return
        suspects = dict(self._hosts.to_confirm())
        items = {item.key: item for one in self._jobs for item in one.items}
        for host, layouts in suspects.items():
            for item in (items[layout] for layout in layouts if layout in items):
                if not item.confirms and item.line is not None:
                    item.confirms, item.avoid = True, frozenset({host})
                    self._pending.append(item)

    def _standing(self) -> Standing:
        budget, measure = self.spec.budget, self.spec.measure
        planned = sum(len(one.items) for one in self._jobs)
        each = measure.top_k + measure.informative + len(measure.anchors)
        return Standing(
            layouts=self.layouts,
            num_layouts=planned + each * (len(self.spec.jobs) - len(self._jobs)),
            jobs=len(self._jobs),
            num_jobs=len(self.spec.jobs),
            running=len(self._running),
            failures=self.failures,
            probes=self.spent.probes,
            max_probes=budget.max_probes,
            gpu_seconds=round(self.spent.gpu_seconds, 1),
            max_gpu_seconds=budget.max_gpu_seconds,
            quarantined=[one.host for one in self._bad],
        )


def _counts(record: ProbeRecord) -> bool:
    """Whether a probe counts as one; one interrupted by a crash may be asked for again."""
    return record.failure != FailureKind.INTERRUPTED
