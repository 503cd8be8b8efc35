"""Plans that spend probes: a study is a task in the database, goes on where a dead one stopped, and
ends in a stored plan.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from api.calibration.update import kernel_probes, learned, teach_ended, timings_of
from api.errors import fault, lines_of
from api.identity import hash_of_job
from api.input.jobs import parse_job
from api.jobs.leases import Heart, is_gone, lease, lease_after
from api.jobs.probes import BACKEND, Asked, enqueue, pool_of, probes_of, recover, run_all
from planner.errors import ConflictError, PlannerError, StoreError
from planner.intake.jobs import read_job
from planner.ports import Lease, PlanLabels, ProbeRecord, TaskEnd, TaskEvent, TaskFilter, TaskRecord
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement, Rung, question_hash
from probes.campaign import Campaign, ProbeRequest
from probes.launch import Watch
from probes.preflight import Need
from probes.protocol import FailureKind
from probes.trainers import trainer_of

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.calibration.kernels import KernelTiming
    from planner.specs.layout import Layout
    from planner.specs.plan import Plan
    from planner.study.ask_tell import Event
    from planner.study.measured_search import MicroProbeTimings
    from planner.study.study import Proposal

STUDY, PREFIX = "study", "plan"
PROBE_SECONDS = 600.0
MICRO_SECONDS = 180.0
WARMUP_STEPS = 3  # of a request that does not say
MOST_RANKS, MOST_DEPTHS = 3, 2  # runs of an emulation, of an imitation, one after the other
# classes that need not be the layout's
OF_THE_PLACE = frozenset({FailureKind.IMPORT, FailureKind.LOST_GPU, BACKEND})
# as `planner.study.study` knows it, which is not imported for a plan on paper
BROKEN = "environment"
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(kw_only=True)
class Onlooker:
    """Who watches a study. tell: each event as a mapping.  say: words of the search.  stop: set to
    end gently with the best so far.
    """

    tell: Tell = lambda _: None
    say: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)


def ask_study(wiring: "Wiring", values: object, *, allow_files: bool, ours: bool) -> TaskRecord:
    """A study of this job: the one that was left unfinished by a process that is gone, else a new
    one.

    ours: it is held by us from the start; else it waits in the queue. Raises SpecError for a job or
        pool that cannot be.
    """
    job = parse_job(values, allow_files=allow_files)
    if job.probe is None:
        raise fault("probe", None, "is required to spend probes", "add probe: {max_probes: 5}")
    pool = pool_of(wiring, job.probe.pool, allow_files=allow_files, field="probe.pool")
    if not pool.capacity(job.cluster).num_devices:
        remedy = (
            "probe from a machine that has one, through slurm, or try the loop with cluster.gpu: "
            "cpu"
        )
        raise fault("probe.pool", job.probe.pool, f"has no {job.cluster.gpu.name}", remedy)
    pool.check(Need.of(job, job.probe.trainer), wait=ours)  # before anything is stored
    asked_hash = hash_of_job(job.request)
    left = _left_unfinished(wiring, asked_hash)
    if left is not None and ours:
        return left
    record = TaskRecord(
        id=wiring.ids.new_id(PREFIX),
        kind="study",
        created_at=wiring.clock.now(),
        request=dict(job.request),
        job_hash=asked_hash,
    )
    if not ours:
        wiring.tasks.add([record])
        return record
    held = held_from_the_start(record, lease(wiring))
    wiring.tasks.add([held])
    return held


def held_from_the_start(task: TaskRecord, by: Lease) -> TaskRecord:
    """The new task as its asker stores it to run it itself: never queued, so that no worker takes
    it first.
    """
    return replace(
        task,
        state="running",
        attempts=1,
        owner=by.owner,
        fencing_token=1,
        heartbeat_at=by.now,
        started_at=by.now,
        lease_until=by.now + timedelta(seconds=by.seconds),
    )


def _left_unfinished(wiring: "Wiring", job_hash: str) -> TaskRecord | None:
    """The newest study of this very request whose owner is gone, now ours."""
    for state in ("running", "queued"):
        for task in wiring.tasks.list(
            TaskFilter(kind="study", state=state, job_hash=job_hash)
        ).items:
            now = lease(wiring)
            if state == "queued":
                return wiring.tasks.claim(now, task_id=task.id)
            if (task.lease_until is not None and task.lease_until < now.now) or is_gone(task.owner):
                taken = take_over(wiring, task)
                if taken is not None:
                    return taken
    return None


def take_over(wiring: "Wiring", dead: TaskRecord) -> TaskRecord | None:
    """A task whose owner is gone, now ours, also where its lease would still last; None where
    somebody else was quicker.
    """
    return wiring.tasks.take_over(dead.id, lease_after(wiring, dead.lease_until))


class TaskHeart(Heart[TaskRecord]):
    """A heart that carries the study's or sweep's words to the store."""

    def _prolong(self, now: Lease) -> bool:
        return self.wiring.tasks.heartbeat(self.held, now, progress=self.words)


def run_study(
    wiring: "Wiring",
    held: TaskRecord,
    onlooker: Onlooker,
    *,
    keep_when_stopped: Callable[[], bool] = lambda: False,
) -> "Plan | None":
    """Spends the study's probes and stores its plan; a study that was stopped stores the best plan
    so far.

    keep_when_stopped: true where the worker itself goes down; the study then waits for the next one
    (None). Raises what planning raises, after the task is ended with it; StoreError with the task
    as it is.
    """
    recover(wiring, gone=is_gone)
    with TaskHeart(wiring, held, onlooker.stop) as heart:
        try:
            job = read_job(held.request, allow_files=False)
            plan = _planned(
                Runner(wiring=wiring, study=held, job=job, onlooker=onlooker, heart=heart)
            )
        except StoreError:
            raise  # the study is another's by now, or goes on once the database answers
        except PlannerError as error:
            end = TaskEnd(state="failed", failure=error.kind, message="; ".join(lines_of(error)))
            wiring.tasks.finish(held, end, wiring.clock.now())
            raise
    if keep_when_stopped() and not heart.cancelled:
        wiring.tasks.release(held, counts=False)
        return None
    # raises where the study was lost: a plan stored now would keep the heir's out
    wiring.tasks.heartbeat(held, lease(wiring))
    state: Literal["cancelled", "done"] = "cancelled" if heart.cancelled else "done"
    # stored by whoever held the study before its last breath
    with contextlib.suppress(ConflictError):
        labels = PlanLabels(
            job_hash=hash_of_job(job.request),
            model=job.model.name,
            gpu=job.cluster.gpu.name,
            status=state,
        )
        wiring.store.save_plan(plan, labels)
    stopped = (plan.probing or {}).get("stopped")
    wiring.tasks.finish(held, TaskEnd(state=state, message=stopped), wiring.clock.now())
    return plan


def _planned(runner: "Runner") -> "Plan":
    """The plan, with what the study measured before and measures now."""
    from planner.plan.recommend import recommend
    from planner.study.measured_search import MicroPlan, Probing

    wiring, job, onlooker = runner.wiring, runner.job, runner.onlooker
    assert job.probe is not None, "a study has probes to spend"
    own = runner.done_before()
    known = [
        one
        for one in runner.measured_before()
        if one.id not in {each.id for each in own.measurements}
    ]
    pool = wiring.pool(job.probe.pool)
    pool.check(Need.of(job, job.probe.trainer))
    capacity = pool.capacity(job.cluster)
    real = capacity.measures  # else only what was recorded can be asked
    probing = Probing(
        measure=runner.measure,
        known=known,
        resumed=own.measurements,
        reasons=own.reasons,
        as_probes=own.as_probes,
        on_event=runner.told,
        should_stop=onlooker.stop.is_set,
        num_devices=capacity.num_devices,
        emulates=real and capacity.emulates and capacity.device == "cuda",
        proxy_runs=real,
        steps=job.probe.steps + WARMUP_STEPS,
        refuses=runner.refusal if real else None,
        micro=MicroPlan(
            timed=runner.timed_before(),
            num_gpus=capacity.num_devices,
            gpu_seconds_before=own.micro_gpu_seconds,
        ),
    )
    taught = learned(
        wiring,
        job,
        until=runner.study.started_at,
        without={name for one in known for name in _measured_in(one)},
    )
    plan = recommend(
        job,
        ports=wiring.ports,
        progress=onlooker.say,
        calibration=taught,
        probing=probing,
        plan_id=runner.study.id,
    )
    runner.teach()
    return plan


def _measured_in(one: Measurement) -> Iterator[str]:
    """Ids of a measurement and of the smaller runs that it was extrapolated from."""
    yield one.id
    smaller = (one.measured.model_extra or {}).get("imitated_by")
    for small in smaller if isinstance(smaller, list) else ():  # an imported row may hold anything
        if isinstance(small, Mapping) and isinstance(small.get("measurement"), str):
            yield small["measurement"]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs what a study asks for as probes of the queue, and turns their ends into measurements."""

    wiring: "Wiring"
    study: TaskRecord
    job: Job
    onlooker: Onlooker
    heart: TaskHeart
    untaught: list[ProbeRecord] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)

    def measure(
        self, asked: "Sequence[Proposal]"
    ) -> "Iterable[tuple[Proposal, Measurement | MicroProbeTimings]]":
        """Each question with its measurement or timings, in order; timings that were interrupted
        are none.
        """
        from planner.study.measured_search import MicroProbeTimings

        wanted = {question.number: self._asked(question) for question in asked}
        possible = [
            (question, one)
            for question in asked
            if isinstance(one := wanted[question.number], Asked)
        ]
        for question in asked:
            if isinstance(cannot := wanted[question.number], Measurement):
                yield question, cannot
        records = enqueue(self.wiring, [one for _, one in possible], max_attempts=1, ours=True)
        watches = {
            record.id: Watch(stop=self.onlooker.stop, progress=self._words(record))
            for record in records
        }
        ended = run_all(self.wiring, records, watches)
        for (question, _), record in zip(possible, ended, strict=True):
            if question.micro is not None:
                if record.state != "cancelled":
                    teach_ended(self.wiring, [record])
                    yield (
                        question,
                        MicroProbeTimings(
                            timings=timings_of(record),
                            gpu_seconds=gpu_seconds_of(record),
                            message=record.message or "",
                        ),
                    )
                continue
            measurement = self._result(record)
            if measurement is not None:
                measurement = self._blamed(measurement)
                self.untaught.append(record)
                if question.fidelity == "probed":
                    self.teach()
                yield question, measurement

    def _blamed(self, measurement: Measurement) -> Measurement:
        """The measurement; one that says so, where not the layout failed but the place that was to
        run it.

        It is asked anew whether anything can run there. A package that is missing is the layout's
        own (a precision's, say) only where another layout has run.
        """
        failure, probe = measurement.measured.failure, self.job.probe
        self.ran.update({measurement.id} if failure is None else ())
        if failure not in OF_THE_PLACE or probe is None:
            return measurement
        try:
            self.wiring.pool(probe.pool).check(Need.of(self.job, probe.trainer))
        except PlannerError as error:
            return _broken(measurement, "; ".join(lines_of(error)))
        nothing_runs = failure == FailureKind.IMPORT and not self.ran
        return (
            _broken(measurement, measurement.measured.message or failure)
            if nothing_runs
            else measurement
        )

    def teach(self) -> None:
        """Teaches what was measured since the last time: at once what ran itself, looks with it,
        for making a calibration takes as long as some looks do.
        """
        teach_ended(self.wiring, self.untaught)
        self.untaught.clear()

    def refusal(self, layout: "Layout") -> str | None:
        """Why the probe program cannot run this layout; None where it can."""
        assert self.job.probe is not None, "a study has probes to spend"
        device = "cpu" if self.job.cluster.gpu.name == "cpu" else "cuda"
        return trainer_of(self.job.probe.trainer).refusal(self.job, layout, device)

    def timed_before(self) -> "list[KernelTiming]":
        """Kernels timed on this GPU before, by whatever study, oldest first."""
        return [
            timing
            for probe in kernel_probes(self.wiring, self.job.cluster.gpu.name)
            for timing in timings_of(probe)
        ]

    def _asked(self, question: "Proposal") -> Asked | Measurement:
        """The probe of a question; of a look that this pool cannot make a measurement that says
        so.
        """
        assert self.job.probe is not None, "a study has probes to spend"
        if question.micro is not None:
            kernels = {
                "job": job_without_layout(self.job),
                "kernels": [shape.as_dict() for shape in question.micro.kernels],
                "pool": self.job.probe.pool,
                "time_limit_seconds": max(1.0, min(MICRO_SECONDS, question.gpu_seconds_limit)),
            }
            timing, bare = ProbeRequest.from_user(kernels, allow_files=False)
            return Asked(request=timing, job=bare, plan_id=self.study.id)
        assert question.layout is not None, "a layout is asked for, or kernels"
        request = {
            "job": job_with_layout(
                self.job, question.layout.model_dump(mode="json"), question.layout.num_gpus
            ),
            "emulate": question.fidelity == "emulated",
            "imitate_gpus": question.num_gpus if question.fidelity == "imitated" else None,
            "pool": self.job.probe.pool,
            "trainer": self.job.probe.trainer,
            "steps": self.job.probe.steps,
        }
        parsed, job = ProbeRequest.from_user(request, allow_files=False)
        from planner.study.study import UNABLE

        capacity = self.wiring.pool(parsed.pool).capacity(job.cluster)
        try:
            in_turn = sum(
                task.num_processes() for task in Campaign.of(parsed, job, "probe-0", capacity).tasks
            )
        except PlannerError as error:
            if question.fidelity != "probed":
                numbers = Measured(
                    status="failed",
                    rung=_rung_of(parsed),
                    failure=UNABLE,
                    message="; ".join(lines_of(error)),
                )
                return Measurement(id="", created_at="", job=job, measured=numbers)
            in_turn = job.cluster.num_gpus  # it fails when its turn comes, and says why
        limit = max(1.0, min(PROBE_SECONDS, question.gpu_seconds_limit / in_turn))
        return Asked(
            request=parsed.model_copy(update={"time_limit_seconds": limit}),
            job=job,
            plan_id=self.study.id,
        )

    def _words(self, record: ProbeRecord) -> Callable[[str], None]:
        def say(words: str) -> None:
            self.heart.words = f"{record.layout}: {words}"
            self.onlooker.say(self.heart.words)

        return say

    def _result(self, record: ProbeRecord) -> Measurement | None:
        """The record's measurement as the study takes it; of a failed or interrupted probe one
        without numbers; none of kernels.
        """
        if record.request.get("kernels"):
            return None
        if record.measurement_id is not None:
            return self.wiring.measurements.get(record.measurement_id)
        if record.state not in ("failed", "cancelled"):
            return None
        request, job = ProbeRequest.from_user(record.request, allow_files=False)
        failure = FailureKind.INTERRUPTED.value if record.state == "cancelled" else record.failure
        numbers = Measured(
            status="failed",
            rung=_rung_of(request),
            failure=failure,
            message=record.message,
            gpu_seconds=gpu_seconds_of(record),
        )
        moment = (record.finished_at or record.created_at).isoformat()
        return Measurement(
            id=record.id, created_at=moment, job=job, measured=numbers, source=f"probe {record.id}"
        )

    def done_before(self) -> "DoneBefore":
        """What this study has measured already: it counts against its budget."""
        records = probes_of(self.wiring, self.study.id)
        found = {
            record.id: _of_the_layout(one)
            for record in records
            if (one := self._result(record)) is not None
        }
        self.ran.update(one.id for one in found.values() if one.measured.failure is None)
        said = self.wiring.tasks.events(self.study.id)
        asked = {
            found[record.id].id: body
            for record in records
            if record.id in found and (body := _question(record, said)) is not None
        }
        return DoneBefore(
            measurements=list(found.values()),
            reasons={key: str(body["message"]) for key, body in asked.items()},
            as_probes={
                key: bool(body["counts"]) for key, body in asked.items() if "counts" in body
            },
            micro_gpu_seconds=sum(
                gpu_seconds_of(record) for record in records if record.request.get("kernels")
            ),
        )

    def measured_before(self) -> Iterator[Measurement]:
        """Runs of the same question from before, on this kind of machine."""
        for num_gpus in self.job.cluster.num_gpus_choices:
            for one in self.wiring.measurements.matching(question_hash(self.job, num_gpus)):
                if one.measured.status in ("ok", "oom"):
                    yield one

    def told(self, event: "Event") -> None:
        """Passes an event on: into the database for who follows from elsewhere, and to who watches
        here.
        """
        body = event_body(event)
        self.heart.words = body["message"]
        self.wiring.tasks.say(self.study, body, self.wiring.clock.now())
        self.onlooker.tell(body)


def _of_the_layout(measurement: Measurement) -> Measurement:
    """What was measured before a study went on; what the place of the probes lacked then says
    nothing of the layout.
    """
    if measurement.measured.failure not in OF_THE_PLACE:
        return measurement
    numbers = measurement.measured.model_copy(update={"failure": FailureKind.INTERRUPTED.value})
    return measurement.model_copy(update={"measured": numbers})


def _broken(measurement: Measurement, message: str) -> Measurement:
    numbers = measurement.measured.model_copy(update={"failure": BROKEN, "message": message})
    return measurement.model_copy(update={"measured": numbers})


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneBefore:
    """A study's own probes from before it was resumed. measurements: oldest first.  reasons: why
    each was asked, as_probes: whether it counted as one, by its id.
    """

    measurements: Sequence[Measurement]
    reasons: Mapping[str, str]
    as_probes: Mapping[str, bool]
    micro_gpu_seconds: float


def _question(record: ProbeRecord, said: Sequence[TaskEvent]) -> Mapping[str, Any] | None:
    """The event with which the study last asked for this layout before the probe."""
    asked = [
        event.body
        for event in said
        if event.body["event"] == "asked" and event.created_at <= record.created_at
    ]
    return next((body for body in reversed(asked) if body["layout"] == record.layout), None)


def _rung_of(request: ProbeRequest) -> Rung:
    return (
        "emulated"
        if request.emulate
        else "imitated"
        if request.imitate_gpus is not None
        else "probed"
    )


def gpu_seconds_of(record: ProbeRecord) -> float:
    """What a probe has used: by its runs' own account, else from its start to its end, at most its
    time limit (a dead runner's end is noticed late).
    """
    if record.results or record.started_at is None or record.finished_at is None:
        return sum(float(result["gpu_seconds"]) for result in record.results)
    emulated, imitated = record.request.get("emulate"), record.request.get("imitate_gpus")
    limit = float(record.request["time_limit_seconds"]) * (
        MOST_RANKS if emulated else MOST_DEPTHS if imitated else 1
    )
    held = 1 if emulated else min(record.num_gpus, imitated or record.num_gpus)
    return min((record.finished_at - record.started_at).total_seconds(), limit) * held


def job_without_layout(job: Job) -> dict[str, Any]:
    """The job as it was asked, without what only a search or a run needs."""
    return {
        key: value
        for key, value in job.request.items()
        if key not in ("search", "probe", "layout", "measured")
    }


def job_with_layout(job: Job, layout: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """The job as a request to measure this layout."""
    values = job_without_layout(job)
    if isinstance(values["cluster"], Mapping):
        values["cluster"] = {**values["cluster"], "num_gpus": num_gpus}
    return {**values, "layout": dict(layout)}


def event_body(event: "Event") -> dict[str, Any]:
    """An event of the loop, JSON-safe."""
    asked = event.asked
    return {
        "event": event.kind,
        "message": event.message,
        "layout": None if asked is None or asked.layout is None else asked.layout.short(),
        "rung": None if asked is None else asked.fidelity,
        "counts": None if asked is None else asked.counts,
        "best_step_seconds": event.best_seconds,
        "best_rung": event.best_fidelity,
        "best_layout": None if event.best_layout is None else event.best_layout.short(),
        "expected_regret": None if event.regret is None else event.regret.expected_share,
        "probes": event.spent.probes,
        "probes_left": event.probes_left,
        "gpu_seconds": event.spent.gpu_seconds,
        "gpu_seconds_left": event.gpu_seconds_left,
        "ruled_out": event.ruled_out,
    }
