"""One run of a sweep: measures what its spec names of every job, compares, and reports."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from api.calibration.read import learned
from api.calibration.update import update_from_probes
from api.errors import StoredError, lines_of
from api.jobs.leases import Claimed
from api.jobs.observer import Observer
from api.jobs.plans import job_with_layout
from api.jobs.probes import RequestedProbe, enqueue, probes_of, recover, run_all
from api.jobs.study_probes import IMPLAUSIBLE
from api.jobs.sweeps import check_sweep
from api.render.sweep import sweep_line
from api.storage.probes import gpu_seconds_of
from api.storage.records import ProbeRecord, TaskEnd, TaskFilter, TaskRecord
from planner.errors import PlannerError, ProbeError, SpecError
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import Measurement, question_hash
from planner.specs.sweep import SweepSpec
from planner.trainers.registry import resolve_layout
from planner.units import counted
from probes.campaign import ProbeRequest
from probes.launch import Watch
from probes.protocol import FailureKind

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.machine.knobs import Calibration
    from planner.specs.plan import Plan

CANDIDATES = 30  # best layouts among which the least sure are sought
CHANGED = 0.03  # relative change of a step that the headline counts; a judgement
# failures that may not happen again
PASSING = frozenset(
    {
        FailureKind.PORT,
        FailureKind.KILLED,
        FailureKind.LOST_GPU,
        FailureKind.HANG,
        FailureKind.CRASH,
    }
)


def run_sweep(
    wiring: "Wiring",
    record: TaskRecord,
    observer: Observer,
    *,
    release_when: Callable[[], bool] = lambda: False,
) -> TaskRecord:
    """Measures, learns, compares, and ends the claimed task with its report.

    A stopped run reports what it has.

    release_when: true where the worker itself is being stopped; the run then goes back into the
        queue.
    """
    recover(wiring, check_processes=True)
    spec = SweepSpec.model_validate(dict(record.request))
    with Claimed(wiring.tasks, record, observer.stop) as claimed:
        try:
            check_sweep(wiring, spec)
            run = SweepRun(wiring=wiring, spec=spec, observer=observer, claimed=claimed)
            report = run.report()
            claimed.renew()  # tells of a cancellation that came after the last heartbeat
        except PlannerError as error:
            message = "; ".join(lines_of(error))
            return claimed.finish(TaskEnd(state="failed", failure=error.kind, message=message))
    if release_when() and not claimed.cancelled:
        return claimed.release()
    return claimed.finish(
        TaskEnd(
            state="cancelled" if observer.stop.is_set() else "done",
            result=report,
            gpu_seconds=report["gpu_seconds"],
            message=report["headline"],
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One layout to measure, and why."""

    job: Job
    layout: Layout
    why: str
    predicted_seconds: float | None


# attempts that have ended, oldest first, by question and layout
Done = defaultdict[tuple[str, str], list[ProbeRecord]]


@dataclass(kw_only=True)
class SweepRun:
    """A run in progress.

    jobs, probes, layouts: done so far.
    layouts_left: of the job at hand.
    """

    wiring: "Wiring"
    spec: SweepSpec
    observer: Observer
    claimed: Claimed[TaskRecord, TaskEnd]
    jobs: int = 0
    probes: int = 0
    gpu_seconds: float = 0.0
    layouts: int = 0
    layouts_left: int = 0

    def report(self) -> dict[str, Any]:
        """Everything measured, job by job."""
        before = probes_of(self.wiring, self.claimed.record.id)  # of a process that crashed
        self.probes = sum(map(_counts, before))
        self.gpu_seconds = sum(map(gpu_seconds_of, before))
        done: Done = defaultdict(list)
        for record in before:
            if record.state in ("done", "failed") and _counts(record):
                done[record.job_hash, record.layout].append(record)
        jobs = [self._job(index, values, done) for index, values in enumerate(self.spec.jobs)]
        lines = [line for job in jobs for line in job["layouts"]]
        changed = [line for line in lines if line["changed"]]
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
        self._report(
            f"job {index + 1} of {len(self.spec.jobs)}: {job.model.name} on "
            f"{job.cluster.num_gpus} {job.cluster.gpu.name}"
        )
        name = {
            "model": job.model.name,
            "gpu": job.cluster.gpu.name,
            "num_gpus": job.cluster.num_gpus,
        }
        try:
            plan = recommend(job, ports=self.wiring.ports, calibration=self._learned(job))
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
        self.layouts_left = len(chosen)
        for wanted in chosen:
            lines.append(self._line(wanted, done))
            self.layouts += 1
            self.layouts_left -= 1
            self._report(sweep_line(lines[-1]))
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
        """Baseline layouts first: changes are seen by them. Each layout once."""
        measure, seen = self.spec.measure, set[Layout]()
        ranked = [
            (entry.layout, entry.estimate.step_seconds, entry.estimate.time_sd)
            for entry in plan.ranked[:CANDIDATES]
        ]
        least_sure = sorted(ranked[measure.top_k :], key=lambda entry: -entry[2])[
            : measure.informative
        ]
        baselines = [
            resolve_layout(
                values,
                trainer=job.training.trainer,
                num_gpus=job.cluster.num_gpus,
                field="sweep.measure.anchors",
            )
            for values in measure.anchors
        ]
        for layout, seconds, why in (
            *((layout, None, "anchor") for layout in baselines),
            *(
                (layout, seconds, f"rank {rank}")
                for rank, (layout, seconds, _) in enumerate(ranked[: measure.top_k], start=1)
            ),
            *((layout, seconds, f"least sure ({sd:.0%})") for layout, seconds, sd in least_sure),
        ):
            if layout not in seen:
                seen.add(layout)
                yield Wanted(job=job, layout=layout, why=why, predicted_seconds=seconds)

    def _line(self, wanted: Wanted, done: Done) -> dict[str, Any]:
        requested = self._requested(wanted)
        line: dict[str, Any] = {
            "layout": wanted.layout.short(),
            "why": wanted.why,
            "predicted_step_seconds": wanted.predicted_seconds,
            "status": "skipped",
            "step_seconds": None,
            "change": None,
            "changed": False,
            "message": None,
        }
        if isinstance(requested, str):
            return {**line, "failure": SpecError.kind, "message": requested}
        record = self._probe(requested, done[question_hash(requested.job), wanted.layout.short()])
        if record is None:
            return {
                **line,
                "message": "stopped" if self.observer.stop.is_set() else "the budget is spent",
            }
        if record.measurement_id is None:
            return {
                **line,
                "status": "failed",
                "failure": record.failure,
                "message": record.message,
            }
        measurement = self.wiring.measurements.get(record.measurement_id)
        if measurement.refused is not None:
            refused = {"failure": IMPLAUSIBLE, "message": measurement.refused}
            return {**line, "status": "failed", "measurement_id": measurement.id, **refused}
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
            "changed": change is not None and abs(change) > CHANGED,
            "versions_changed": versions,
            "message": measurement.measured.message,
        }

    def _requested(self, wanted: Wanted) -> RequestedProbe | str:
        """The probe of this layout; why not, where the layout cannot be run."""
        sizes = wanted.job.cluster.num_gpus_choices
        if wanted.layout.num_gpus not in sizes:
            return f"takes {wanted.layout.num_gpus} GPUs, the job has {', '.join(map(str, sizes))}"
        request = {
            "job": job_with_layout(wanted.job.request, wanted.layout, wanted.layout.num_gpus),
            "pool": self.spec.pool,
            "trainer": self.spec.trainer,
            "steps": self.spec.steps,
        }
        try:
            parsed, job = ProbeRequest.from_user(request, allow_files=False)
        except PlannerError as error:
            return "; ".join(lines_of(error))
        return RequestedProbe(request=parsed, job=job, plan_id=self.claimed.record.id)

    def _probe(
        self, requested: RequestedProbe, before: Sequence[ProbeRecord]
    ) -> ProbeRecord | None:
        """Runs it, again after a passing failure; None where the budget or a stop forbids it.

        before: its attempts in this run by a process that crashed.
        """
        record = before[-1] if before else None
        assert requested.job.layout is not None, "a sweep measures layouts"
        for _ in range(1 + self.spec.retries - len(before)):
            if record is not None and record.failure not in PASSING:
                return record
            left = self.spec.budget.max_gpu_seconds - self.gpu_seconds
            if (
                self.observer.stop.is_set()
                or self.probes >= self.spec.budget.max_probes
                or left <= 0
            ):
                return record
            limit = min(
                requested.request.time_limit_seconds, max(1.0, left / requested.job.layout.num_gpus)
            )
            limited = replace(
                requested,
                request=requested.request.model_copy(update={"time_limit_seconds": limit}),
            )
            (stored,) = enqueue(
                self.wiring, [limited], max_attempts=1, ours=True, parent=self.claimed.record
            )
            (record,) = run_all(
                self.wiring, [stored], {stored.id: self._watch(requested.job.layout)}
            )
            self.probes += 1
            self.gpu_seconds += gpu_seconds_of(record)
            update_from_probes(self.wiring, [record])
        return record

    def _learned(self, job: Job) -> "Calibration | None":
        record = self.claimed.record
        return learned(self.wiring, job, record.asked_by or "", until=record.started_at)

    def _before(self, measurement: Measurement) -> Measurement | None:
        """The newest earlier measurement of the same question, layout and rung."""
        same = [
            one
            for one in self.wiring.measurements.matching(
                measurement.key().job_hash, self.claimed.record.asked_by or ""
            )
            if one.key().layout_hash == measurement.key().layout_hash
            and one.measured.rung == measurement.measured.rung
            and (one.created_at, one.id) < (measurement.created_at, measurement.id)
            and one.measured.status == "ok"
        ]
        return same[-1] if same else None

    def _winner_before(self, index: int) -> tuple[str | None, float]:
        """(winner of this job in the newest run that ended before this one, its step time)."""
        runs = self.wiring.tasks.list(
            TaskFilter(kind="sweep", parent_id=self.claimed.record.parent_id, state="done")
        ).items
        for run in runs:
            jobs = (run.result or {}).get("jobs", [])
            if run.id != self.claimed.record.id and index < len(jobs) and jobs[index]["winner"]:
                winner = str(jobs[index]["winner"])
                return winner, next(
                    float(line["step_seconds"])
                    for line in jobs[index]["layouts"]
                    if line["layout"] == winner
                )
        return None, float("inf")

    def _report(self, message: str) -> None:
        self.claimed.report(message)
        jobs_left = len(self.spec.jobs) - self.jobs
        self.observer.on_event(
            {
                "event": "sweep",
                "message": message,
                "jobs": self.jobs,
                "jobs_left": jobs_left,
                "layouts": self.layouts,
                "layouts_left": self._layouts_left(jobs_left),
            }
        )

    def _layouts_left(self, jobs_left: int) -> int:
        """Layouts still to measure: this job's as chosen, of later jobs as many as are asked for.

        A later plan may have fewer.
        """
        measure = self.spec.measure
        each = measure.top_k + measure.informative + len(measure.anchors)
        begun = bool(self.layouts_left) or self.layouts > 0
        return self.layouts_left + each * max(0, jobs_left - 1 if begun else jobs_left)

    def _watch(self, layout: Layout) -> Watch:
        def progress(message: str) -> None:
            line = f"{layout.short()}: {message}"
            self.claimed.report(line)
            self.observer.on_message(line)

        return Watch(stop=self.observer.stop, progress=progress)


def _counts(record: ProbeRecord) -> bool:
    """Whether a probe counts as one; one interrupted by a crash may be asked for again."""
    return record.failure != FailureKind.INTERRUPTED


def _versions(before: Measurement, after: Measurement) -> dict[str, list[str | None]]:
    """Software that differs: name -> [before, after]."""
    names = sorted(set(before.software) | set(after.software))
    pairs = {name: [before.software.get(name), after.software.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def failure_in(result: Mapping[str, Any]) -> StoredError | None:
    """Why a run measured nothing; None where it measured something, or was not allowed to.

    The first probe that failed, else the first job without a plan, else the first layout that
    cannot be run. A stop or a spent budget is no failure.
    """
    lines = [line for job in result["jobs"] for line in job["layouts"]]
    if any(line["status"] in ("ok", "oom") for line in lines):
        return None
    for line in lines:
        if line["status"] == "failed":
            return StoredError(ProbeError.kind, str(line["message"]))
    for job in result["jobs"]:
        if job.get("error"):
            return StoredError(str(job["failure"]), str(job["error"]))
    if lines and all(line.get("failure") for line in lines):
        return StoredError(str(lines[0]["failure"]), f"{lines[0]['layout']}: {lines[0]['message']}")
    return None


def failure_of(run: TaskRecord) -> StoredError | None:
    """What ended a run without a report; None where it has one."""
    return (
        None
        if run.result is not None
        else StoredError(run.failure or ProbeError.kind, run.message or "the run gave no report")
    )
