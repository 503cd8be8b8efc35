"""Sweeps: a run measures what its spec names of every job, compares with the run before, and
reports in the morning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from api.calibration.update import learned, teach_ended
from api.errors import RetoldError, fault, lines_of, need
from api.jobs.leases import is_gone, lease
from api.jobs.probes import Asked, enqueue, pool_of, probes_of, recover, run_all
from api.jobs.studies import (
    Onlooker,
    TaskHeart,
    gpu_seconds_of,
    held_from_the_start,
    job_with_layout,
    take_over,
)
from planner.errors import ConflictError, PlannerError, ProbeError, SpecError
from planner.intake.jobs import read_job
from planner.intake.sweeps import read_sweep
from planner.ports import ProbeRecord, SweepRecord, TaskEnd, TaskFilter, TaskRecord
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import Measurement
from planner.specs.sweep import SweepSpec
from planner.trainers.registry import resolve_layout
from planner.units import counted
from probes.campaign import ProbeRequest
from probes.launch import Watch
from probes.preflight import Need
from probes.protocol import FailureKind

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.specs.plan import Plan

PREFIX, RUN_PREFIX = "sweep", "sweep-run"
LOOKED_AT = 30  # ranked layouts among which the least sure are sought
CHANGED = 0.03  # a step this much slower or faster than before is worth a line; judgement
# may go well again
PASSING = frozenset(
    {
        FailureKind.PORT,
        FailureKind.KILLED,
        FailureKind.LOST_GPU,
        FailureKind.HANG,
        FailureKind.CRASH,
    }
)
MISSED_SECONDS = 3600.0  # a moment this long past was missed


def next_due(schedule: str | None, after: datetime) -> datetime | None:
    """The first moment of a cron schedule (UTC) after this one; None without a schedule. Raises
    SpecError.
    """
    if schedule is None:
        return None
    need("cronsim", extra="server")
    from cronsim import CronSim, CronSimError

    try:
        found: datetime = next(CronSim(schedule, after.astimezone(UTC)))
    except (CronSimError, StopIteration):
        remedy = 'write minute, hour, day, month and weekday, for example "0 2 * * *"'
        raise fault(
            "sweep.schedule", schedule, "is no cron schedule that ever comes due", remedy
        ) from None
    return found


def add_sweep(
    wiring: "Wiring", values: object, *, allow_files: bool, ours: bool = False
) -> SweepRecord:
    """Stores a sweep; with a schedule, workers run it from now on. Raises SpecError.

    ours: we run it ourselves at once, so that a pool that can run nothing is a ProbeError before
        anything is stored.
    """
    spec = read_sweep(values, allow_files=allow_files)
    now = wiring.clock.now()
    pool_of(wiring, spec.pool, allow_files=allow_files, field="sweep.pool")
    if ours:
        check_sweep(wiring, spec)
    record = SweepRecord(
        id=wiring.ids.new_id(PREFIX),
        created_at=now,
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        next_due_at=next_due(spec.schedule, now),
    )
    wiring.sweeps.add(record)
    return record


def check_sweep(wiring: "Wiring", spec: SweepSpec) -> None:
    """Raises what is wrong where the sweep's pool can run none of its jobs: before anything is
    stored or spent.
    """
    pool, failures = wiring.pool(spec.pool), dict[str, PlannerError | None]()
    for values in spec.jobs:
        need = Need.of(read_job(values, allow_files=False), spec.trainer)
        if need.job.cluster.gpu.name not in failures:
            try:
                pool.check(need)
            except PlannerError as error:
                failures[need.job.cluster.gpu.name] = error
            else:
                failures[need.job.cluster.gpu.name] = None
    if all(failures.values()):
        raise next(error for error in failures.values() if error is not None)


def run_now(wiring: "Wiring", sweep: SweepRecord, *, ours: bool) -> TaskRecord:
    """A run of this sweep at this moment: held by us, or queued for a worker. One that a dead
    process of ours left goes on.

    Raises ConflictError for a sweep that was cancelled.
    """
    if sweep.state == "cancelled":
        raise ConflictError(f"sweep {sweep.id} was cancelled; schedule it anew")
    now = lease(wiring)
    if ours:
        for left in wiring.tasks.list(
            TaskFilter(kind="sweep", state="running", parent_id=sweep.id)
        ).items:
            if (left.lease_until is not None and left.lease_until < now.now) or is_gone(left.owner):
                taken = take_over(wiring, left)
                if taken is not None:
                    return taken
    task = _task(wiring, sweep, now.now)
    stored = held_from_the_start(task, now) if ours else task
    wiring.tasks.add([stored])
    return stored


def schedule_due(wiring: "Wiring") -> list[TaskRecord]:
    """Turns every moment that has come into a task, once; what was missed for long is skipped or
    made up once, as the sweep says.
    """
    made = []
    now = wiring.clock.now()
    for sweep in wiring.sweeps.due(now):
        spec = SweepSpec.model_validate(dict(sweep.spec))
        moment = _moment_to_keep(sweep, spec, now)
        task = None if moment is None else _task(wiring, sweep, moment)
        if wiring.sweeps.advance(sweep, next_due(spec.schedule, now), task) and task is not None:
            made.append(task)
    return made


def _moment_to_keep(sweep: SweepRecord, spec: SweepSpec, now: datetime) -> datetime | None:
    """The moment that a run is made for: the newest that has come just now, else what was missed,
    where the sweep makes it up.
    """
    assert sweep.next_due_at is not None, "only what has a moment comes due"
    fresh = now - timedelta(seconds=MISSED_SECONDS)
    kept = sweep.next_due_at if sweep.next_due_at >= fresh or spec.missed == "catch-up" else None
    later = next_due(spec.schedule, max(sweep.next_due_at, fresh))
    while later is not None and later <= now:
        kept, later = later, next_due(spec.schedule, later)
    return kept


def _task(wiring: "Wiring", sweep: SweepRecord, moment: datetime) -> TaskRecord:
    return TaskRecord(
        id=wiring.ids.new_id(RUN_PREFIX),
        kind="sweep",
        created_at=wiring.clock.now(),
        request=dict(sweep.spec),
        parent_id=sweep.id,
        due_at=moment,
    )


# ---- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One layout to measure, and why."""

    job: Job
    layout: Layout
    why: str
    predicted_seconds: float | None


def run_sweep(
    wiring: "Wiring",
    held: TaskRecord,
    onlooker: Onlooker,
    *,
    keep_when_stopped: Callable[[], bool] = lambda: False,
) -> TaskRecord:
    """Measures, learns, compares, and ends the task with its report. A stopped run reports what it
    has.

    keep_when_stopped: true where the worker itself goes down; the run then waits for the next one.
    """
    recover(wiring, gone=is_gone)
    spec = SweepSpec.model_validate(dict(held.request))
    with TaskHeart(wiring, held, onlooker.stop) as heart:
        try:
            check_sweep(wiring, spec)
            report = _Run(
                wiring=wiring, held=held, spec=spec, onlooker=onlooker, heart=heart
            ).report()
        except PlannerError as error:
            end = TaskEnd(state="failed", failure=error.kind, message="; ".join(lines_of(error)))
            return wiring.tasks.finish(held, end, wiring.clock.now())
    if keep_when_stopped() and not heart.cancelled:
        return wiring.tasks.release(held, counts=False)
    state = "cancelled" if onlooker.stop.is_set() else "done"
    end = TaskEnd(state=state, result=report, message=report["headline"])  # type: ignore[arg-type]
    return wiring.tasks.finish(held, end, wiring.clock.now())


# attempts that have ended, oldest first, by question and layout
Done = defaultdict[tuple[str, str], list[ProbeRecord]]


@dataclass(kw_only=True)
class _Run:
    wiring: "Wiring"
    held: TaskRecord
    spec: SweepSpec
    onlooker: Onlooker
    heart: TaskHeart
    jobs: int = 0
    probes: int = 0
    gpu_seconds: float = 0.0
    layouts: int = 0  # that are done with
    layouts_left: int = 0  # of this job

    def report(self) -> dict[str, Any]:
        """Everything measured, job by job."""
        before = probes_of(self.wiring, self.held.id)  # of a process that died
        self.probes, self.gpu_seconds = sum(map(_counts, before)), sum(map(gpu_seconds_of, before))
        done: Done = defaultdict(list)
        for record in before:
            if record.state in ("done", "failed") and _counts(record):
                done[record.job_hash, record.layout].append(record)
        jobs = [self._job(index, values, done) for index, values in enumerate(self.spec.jobs)]
        lines = [line for job in jobs for line in job["layouts"]]
        changed = [
            line
            for line in lines
            if line.get("change") is not None and abs(line["change"]) > CHANGED
        ]
        failed = [line for line in lines if line["status"] in ("failed", "oom")] + [
            job for job in jobs if job.get("error")
        ]
        winners = [job for job in jobs if job["new_winner"]]
        headline = (
            f"{sum(line['status'] == 'ok' for line in lines)} of "
            f"{counted(len(lines), 'layout')} measured, "
            f"{len(changed)} changed by more than {CHANGED:.0%}, "
            f"{counted(len(winners), 'new winner')}, {counted(len(failed), 'failure')}"
        )
        return {
            "headline": headline,
            "probes": self.probes,
            "gpu_seconds": round(self.gpu_seconds, 1),
            "jobs": jobs,
        }

    def _job(self, index: int, values: Mapping[str, Any], done: Done) -> dict[str, Any]:
        from planner.plan.recommend import recommend

        job, self.jobs = read_job(values, allow_files=False), index
        self._tell(
            f"job {index + 1} of {len(self.spec.jobs)}: {job.model.name} on "
            f"{job.cluster.num_gpus} {job.cluster.gpu.name}"
        )
        name = {
            "model": job.model.name,
            "gpu": job.cluster.gpu.name,
            "num_gpus": job.cluster.num_gpus,
        }
        try:
            plan = recommend(
                job,
                ports=self.wiring.ports,
                calibration=learned(self.wiring, job, until=self.held.started_at),
            )
        except PlannerError as error:
            return {
                **name,
                "failure": error.kind,
                "error": "; ".join(lines_of(error)),
                "layouts": [],
                "winner": None,
                "new_winner": False,
            }
        lines = []
        chosen = list(self._wanted(job, plan))
        for place, wanted in enumerate(chosen, start=1):
            self.layouts_left = len(chosen) - place + 1
            lines.append(self._line(wanted, done))
            self.layouts, self.layouts_left = self.layouts + 1, len(chosen) - place
            self._tell(_words(lines[-1]))
        times = {line["layout"]: line["step_seconds"] for line in lines if line["step_seconds"]}
        winner = min(times, key=times.__getitem__) if times else None
        before, seconds_before = self._winner_before(index)
        new = bool(
            before
            and winner
            and before != winner
            and times[winner] < times.get(before, seconds_before)
        )
        return {
            **name,
            "layouts": lines,
            "winner": winner,
            "winner_before": before,
            "new_winner": new,
        }

    def _wanted(self, job: Job, plan: "Plan") -> Iterator[Wanted]:
        """Anchors first: they are what changes are seen by. Each layout once."""
        measure, named = self.spec.measure, set[Layout]()
        ranked = [
            (entry.layout, entry.estimate.step_seconds, entry.estimate.time_sd)
            for entry in plan.ranked[:LOOKED_AT]
        ]
        unsure = sorted(ranked[measure.top_k :], key=lambda entry: -entry[2])[: measure.informative]
        anchors = [
            resolve_layout(
                values,
                trainer=job.training.trainer,
                num_gpus=job.cluster.num_gpus,
                field="sweep.measure.anchors",
            )
            for values in measure.anchors
        ]
        for layout, seconds, why in (
            *((layout, None, "anchor") for layout in anchors),
            *(
                (layout, seconds, f"rank {rank}")
                for rank, (layout, seconds, _) in enumerate(ranked[: measure.top_k], start=1)
            ),
            *((layout, seconds, f"least sure ({sd:.0%})") for layout, seconds, sd in unsure),
        ):
            if layout not in named:
                named.add(layout)
                yield Wanted(job=job, layout=layout, why=why, predicted_seconds=seconds)

    def _line(self, wanted: Wanted, done: Done) -> dict[str, Any]:
        asked = self._asked(wanted)
        line: dict[str, Any] = {
            "layout": wanted.layout.short(),
            "why": wanted.why,
            "predicted_step_seconds": wanted.predicted_seconds,
            "status": "skipped",
            "step_seconds": None,
            "change": None,
            "message": None,
        }
        if isinstance(asked, str):
            return {**line, "failure": SpecError.kind, "message": asked}
        record = self._probe(asked, done[_question(asked), wanted.layout.short()])
        if record is None:
            return {
                **line,
                "message": "stopped" if self.onlooker.stop.is_set() else "the budget is spent",
            }
        if record.measurement_id is None:
            return {
                **line,
                "status": "failed",
                "failure": record.failure,
                "message": record.message,
            }
        measurement = self.wiring.measurements.get(record.measurement_id)
        seconds = measurement.measured.step_seconds
        before = self._before(measurement)
        change = (
            seconds / before.measured.step_seconds - 1.0
            if seconds and before and before.measured.step_seconds
            else None
        )
        versions = _versions(before, measurement) if before else {}
        return {
            **line,
            "status": measurement.measured.status,
            "step_seconds": seconds,
            "measurement_id": measurement.id,
            "software": dict(measurement.software),
            "change": change,
            "versions_changed": versions,
            "message": measurement.measured.message,
        }

    def _asked(self, wanted: Wanted) -> Asked | str:
        """The probe of this layout; why not, where the layout cannot be run."""
        sizes = wanted.job.cluster.num_gpus_choices
        if wanted.layout.num_gpus not in sizes:
            return f"takes {wanted.layout.num_gpus} GPUs, the job has {', '.join(map(str, sizes))}"
        layout = wanted.layout.model_dump(mode="json")
        request = {
            "job": job_with_layout(wanted.job, layout, wanted.layout.num_gpus),
            "pool": self.spec.pool,
            "trainer": self.spec.trainer,
            "steps": self.spec.steps,
        }
        try:
            parsed, job = ProbeRequest.from_user(request, allow_files=False)
        except PlannerError as error:
            return "; ".join(lines_of(error))
        return Asked(request=parsed, job=job, plan_id=self.held.id)

    def _probe(self, asked: Asked, before: Sequence[ProbeRecord]) -> ProbeRecord | None:
        """Runs it, again after a failure that may pass; None where the budget or a stop leaves no
        room.

        before: its attempts in this run by a process that died.
        """
        record = before[-1] if before else None
        assert asked.job.layout is not None, "a sweep measures layouts"
        for _ in range(1 + self.spec.retries - len(before)):
            if record is not None and record.failure not in PASSING:
                return record
            left = self.spec.budget.max_gpu_seconds - self.gpu_seconds
            if (
                self.onlooker.stop.is_set()
                or self.probes >= self.spec.budget.max_probes
                or left <= 0
            ):
                return record
            limit = min(
                asked.request.time_limit_seconds, max(1.0, left / asked.job.layout.num_gpus)
            )
            limited = replace(
                asked, request=asked.request.model_copy(update={"time_limit_seconds": limit})
            )
            (stored,) = enqueue(self.wiring, [limited], max_attempts=1, ours=True)
            (record,) = run_all(self.wiring, [stored], {stored.id: self._watch(asked.job.layout)})
            self.probes, self.gpu_seconds = (
                self.probes + 1,
                self.gpu_seconds + gpu_seconds_of(record),
            )
            teach_ended(self.wiring, [record])
        return record

    def _before(self, measurement: Measurement) -> Measurement | None:
        """The newest earlier measurement of the same question, layout and rung."""
        same = [
            one
            for one in self.wiring.measurements.matching(measurement.key().job_hash)
            if one.key().layout_hash == measurement.key().layout_hash
            and one.measured.rung == measurement.measured.rung
            and (one.created_at, one.id) < (measurement.created_at, measurement.id)
            and one.measured.status == "ok"
        ]
        return same[-1] if same else None

    def _winner_before(self, index: int) -> tuple[str | None, float]:
        """(the winner of this job in the newest run that ended before this one, its step time
        then).
        """
        runs = self.wiring.tasks.list(
            TaskFilter(kind="sweep", parent_id=self.held.parent_id, state="done")
        ).items
        for run in runs:
            jobs = (run.result or {}).get("jobs", [])
            if run.id != self.held.id and index < len(jobs) and jobs[index]["winner"]:
                winner = str(jobs[index]["winner"])
                return winner, next(
                    float(line["step_seconds"])
                    for line in jobs[index]["layouts"]
                    if line["layout"] == winner
                )
        return None, float("inf")

    def _tell(self, words: str) -> None:
        self.heart.words = words
        jobs_left = len(self.spec.jobs) - self.jobs
        body = {"event": "sweep", "message": words, "jobs": self.jobs, "jobs_left": jobs_left}
        self.onlooker.tell(
            {**body, "layouts": self.layouts, "layouts_left": self._layouts_left(jobs_left)}
        )

    def _layouts_left(self, jobs_left: int) -> int:
        """Of this job as chosen, of later ones as many as are asked for: fewer where a plan has
        fewer.
        """
        measure = self.spec.measure
        each = measure.top_k + measure.informative + len(measure.anchors)
        begun = bool(self.layouts_left) or self.layouts > 0
        return self.layouts_left + each * max(0, jobs_left - 1 if begun else jobs_left)

    def _watch(self, layout: Layout) -> Watch:
        def say(words: str) -> None:
            self.heart.words = f"{layout.short()}: {words}"
            self.onlooker.say(self.heart.words)

        return Watch(stop=self.onlooker.stop, progress=say)


def _counts(record: ProbeRecord) -> bool:
    """Whether a probe counts as one: a process that died under it may ask for it again."""
    return record.failure != FailureKind.INTERRUPTED


def _question(asked: Asked) -> str:
    from planner.specs.measurement import question_hash

    return question_hash(asked.job)


def _versions(before: Measurement, after: Measurement) -> dict[str, list[str | None]]:
    """Software that differs: name -> [before, after]."""
    names = sorted(set(before.software) | set(after.software))
    pairs = {name: [before.software.get(name), after.software.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def failure_in(result: Mapping[str, Any]) -> RetoldError | None:
    """Why a run measured nothing: its first probe that failed, its first job without a plan, its
    first layout that cannot be run.

    None where it measured something, and where a stop or the budget kept it from it.
    """
    lines = [line for job in result["jobs"] for line in job["layouts"]]
    if any(line["status"] in ("ok", "oom") for line in lines):
        return None
    for line in lines:
        if line["status"] == "failed":
            return RetoldError(ProbeError.kind, str(line["message"]))
    for job in result["jobs"]:
        if job.get("error"):
            return RetoldError(str(job["failure"]), str(job["error"]))
    if lines and all(line.get("failure") for line in lines):
        return RetoldError(str(lines[0]["failure"]), f"{lines[0]['layout']}: {lines[0]['message']}")
    return None


def failure_of(run: TaskRecord) -> RetoldError | None:
    """What ended a run without a report; None where it has one."""
    return (
        None
        if run.result is not None
        else RetoldError(run.failure or ProbeError.kind, run.message or "the run gave no report")
    )


def report_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The morning report as text."""
    yield str(result["headline"])
    spent = f"{counted(result['probes'], 'probe')}, {result['gpu_seconds']:.0f} GPU-seconds"
    yield "; ".join((spent, *_software(result)))
    for job in result["jobs"]:
        yield f"{job['model']} on {job['num_gpus']} {job['gpu']}" + (
            f": {job['error']}" if job.get("error") else ""
        )
        if job["new_winner"]:
            yield f"  new winner: {job['winner']} (before: {job['winner_before']})"
        for line in job["layouts"]:
            yield f"  {_words(line)}"


def _software(result: Mapping[str, Any]) -> Iterator[str]:
    """Under which versions it was measured: one entry for each set of them."""
    sets = (line.get("software") or {} for job in result["jobs"] for line in job["layouts"])
    yield from dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in sorted(each.items()))
        for each in sets
        if each
    )


def _words(line: Mapping[str, Any]) -> str:
    if line["status"] != "ok":
        return f"{line['layout']} [{line['why']}]: {line['status']}" + (
            f", {line['message']}" if line["message"] else ""
        )
    predicted = (
        ""
        if not line["predicted_step_seconds"]
        else f", predicted {line['predicted_step_seconds']:.4g} s"
    )
    change = "" if line["change"] is None else f", {line['change']:+.1%} since the last run"
    versions = "".join(
        f", {name} {old} -> {new}"
        for name, (old, new) in (line.get("versions_changed") or {}).items()
    )
    return (
        f"{line['layout']} [{line['why']}]: {line['step_seconds']:.4g} "
        f"s{predicted}{change}{versions}"
    )


def all_sweeps(wiring: "Wiring") -> Iterator[SweepRecord]:
    """Every sweep, newest first, page by page."""
    cursor = None
    while True:
        page = wiring.sweeps.list(cursor, 200)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def sweep_detail(wiring: "Wiring", sweep: SweepRecord, runs: int = 10) -> dict[str, Any]:
    """A sweep with its newest runs and their reports, JSON-safe."""
    tasks: Sequence[TaskRecord] = wiring.tasks.list(
        TaskFilter(kind="sweep", parent_id=sweep.id), None, runs
    ).items
    return {
        "id": sweep.id,
        "name": sweep.name,
        "created_at": sweep.created_at.isoformat(),
        "state": sweep.state,
        "spec": dict(sweep.spec),
        "next_due_at": None if sweep.next_due_at is None else sweep.next_due_at.isoformat(),
        "runs": [
            {
                "id": task.id,
                "due_at": None if task.due_at is None else task.due_at.isoformat(),
                "state": task.state,
                "progress": task.progress,
                "message": task.message,
                "report": None if task.result is None else dict(task.result),
            }
            for task in tasks
        ],
    }


def pause_sweep(wiring: "Wiring", sweep_id: str) -> SweepRecord:
    """No more runs until it is resumed: what is queued of it is cancelled, what runs goes on.
    Raises NotFoundError, ConflictError.
    """
    sweep = wiring.sweeps.change(sweep_id, "paused", None)
    _cancel_runs(wiring, sweep_id, "queued")
    return sweep


def cancel_sweep(wiring: "Wiring", sweep_id: str) -> SweepRecord:
    """Never again; its queued runs are cancelled, its running one is asked to stop. Raises
    NotFoundError.
    """
    sweep = wiring.sweeps.change(sweep_id, "cancelled", None)
    _cancel_runs(wiring, sweep_id, "queued", "running")
    return sweep


def _cancel_runs(wiring: "Wiring", sweep_id: str, *states: Literal["queued", "running"]) -> None:
    for state in states:
        for task in wiring.tasks.list(
            TaskFilter(kind="sweep", state=state, parent_id=sweep_id)
        ).items:
            wiring.tasks.cancel(task.id, wiring.clock.now())
