"""Probes of a study: queues what it asks and turns the results into measurements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.api.calibration.inputs import kernel_probes, timings_of
from planner.api.calibration.update import update_from_probes
from planner.api.errors import lines_of
from planner.api.jobs.leases import Claimed, Observer
from planner.api.jobs.plans import job_with_layout, job_without_layout
from planner.api.jobs.probes import RequestedProbe, probe_of_job, probes_of, run_all
from planner.api.jobs.side_by_side import enqueue_in_room
from planner.api.storage.job_records import ProbeRecord, TaskEvent, TaskRecord
from planner.api.storage.records import Subject
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.wiring import Wiring
from planner.calibration.kernels import KernelTiming
from planner.errors import PlannerError
from planner.probes.campaign import Campaign, ProbeRequest
from planner.probes.launch import Watch
from planner.probes.preflight import Need
from planner.probes.protocol import FailureKind, device_of
from planner.probes.trainers import trainer_of
from planner.specs.job import Job, ProbeSpec
from planner.specs.layout import Layout
from planner.specs.measurement import BLAMELESS, MACHINE, Measured, Measurement, Rung, question_hash
from planner.study.ask_tell import Event, Result
from planner.study.evaluations import Proposal
from planner.study.study import BROKEN, UNABLE, AskedBefore, MicroResult
from planner.units import counted

PROBE_SECONDS = 600.0
KERNEL_SECONDS = 180.0
# failures that may come from the machine, not from the layout
OF_THE_MACHINE = BLAMELESS | {FailureKind.IMPORT}
IMPLAUSIBLE = "implausible"  # it ran, and its numbers cannot be true


@dataclass(frozen=True, kw_only=True)
class StudyProbes:
    """Runs a study's questions as probes, and turns their ends into measurements.

    untaught: probes that the calibration does not count yet.
    succeeded: ids of measurements of layouts that ran.
    """

    wiring: Wiring
    job: Job
    observer: Observer
    claimed: Claimed[TaskRecord]
    untaught: list[ProbeRecord] = field(default_factory=list)
    succeeded: set[str] = field(default_factory=set)

    def measure(self, question: Proposal) -> Result | None:
        """The question's measurement or timings; None where timing was interrupted."""
        probe = self._requested(question)
        if isinstance(probe, Measurement):
            return probe
        record = enqueue_in_room(self.wiring, probe, self.claimed)
        progress = self.claimed.reporter(record.layout, self.observer)
        watch = Watch(stop=self.observer.stop, progress=progress)
        (record,) = run_all(self.wiring, [record], {record.id: watch})
        if question.micro is not None:
            if record.state == "cancelled":
                return None
            update_from_probes(self.wiring, [record])
            return MicroResult(
                observed=question.micro.observed(timings_of(record)),
                gpu_seconds=gpu_seconds_of(record),
                message=record.message or "",
            )
        measurement = self._measurement(record)
        if measurement is None:
            return None
        measurement = self._with_cause(measurement)
        self.untaught.append(record)
        if question.fidelity == "probed":
            self.update_calibration()
        return measurement

    @property
    def spec(self) -> ProbeSpec:
        assert self.job.probe is not None, "a study has probes to spend"
        return self.job.probe

    def _requested(self, question: Proposal) -> RequestedProbe | Measurement:
        """The probe of a question; of one that this pool cannot run a measurement that says so."""
        if question.micro is not None:
            return self._requested_kernels(question)
        assert question.layout is not None, "a layout is asked for, or kernels"
        request = {
            "job": job_with_layout(self.job.request, question.layout, question.layout.num_gpus),
            "emulate": question.fidelity == "emulated",
            **self.spec.model_dump(include={"pool", "trainer", "steps"}),
        }
        asked = probe_of_job(request, allow_files=False, plan_id=self.claimed.record.id)[0]
        parsed, job = asked.request, asked.job
        capacity = self.wiring.pool(parsed.pool).capacity(job.cluster)
        try:
            num_processes = Campaign.of(parsed, job, "probe-0", capacity).gpus_at_limit
        except PlannerError as error:
            if question.fidelity != "probed":
                rung, why = _rung_of(parsed), "; ".join(lines_of(error))
                numbers = Measured(status="failed", rung=rung, failure=UNABLE, message=why)
                return Measurement(id="", created_at="", job=job, measured=numbers)
            num_processes = job.cluster.num_gpus  # it fails when its turn comes, and says why
        limit = max(1.0, min(PROBE_SECONDS, question.gpu_seconds_limit / num_processes))
        return replace(asked, request=parsed.model_copy(update={"time_limit_seconds": limit}))

    def _requested_kernels(self, question: Proposal) -> RequestedProbe:
        assert question.micro is not None, "kernels are asked for"
        request = {
            "job": job_without_layout(self.job.request),
            "kernels": [shape.as_dict() for shape in question.micro.kernels],
            "pool": self.spec.pool,
            "time_limit_seconds": max(1.0, min(KERNEL_SECONDS, question.gpu_seconds_limit)),
        }
        return probe_of_job(request, allow_files=False, plan_id=self.claimed.record.id)[0]

    def _measurement(self, record: ProbeRecord) -> Measurement | None:
        """The record's measurement, without numbers if it failed or was interrupted.

        None of kernels, and of a probe that has not ended.
        """
        if record.request.get("kernels"):
            return None
        if record.measurement_id is not None:
            found = self.wiring.measurements.get(record.measurement_id)
            believed = found.refused is None and found.measured.rung != "imitated"
            return found if believed else _not_believed(found)
        if record.state not in ("failed", "cancelled"):
            return None
        request, job = ProbeRequest.of_record(record.request)
        failure = FailureKind.INTERRUPTED.value if record.state == "cancelled" else record.failure
        if any(result.get("outcome", {}).get("machine") for result in record.results):
            failure = MACHINE
        numbers = Measured(
            status="failed",
            rung=_rung_of(request),
            failure=failure,
            message=record.message,
            gpu_seconds=gpu_seconds_of(record),
        )
        ended_at = (record.finished_at or record.created_at).isoformat()
        return Measurement(
            id=record.id,
            created_at=ended_at,
            job=job,
            measured=numbers,
            source=f"probe {record.id}",
        )

    def _with_cause(self, measurement: Measurement) -> Measurement:
        """Marks a measurement as failed where the machine failed and not the layout.

        The pool is asked again whether anything can run. A missing package is the layout's own (a
        precision's, say) only where another layout has run.
        """
        failure = measurement.measured.failure
        if failure is None:
            self.succeeded.add(measurement.id)
        if failure not in {*OF_THE_MACHINE, FailureKind.CRASH}:
            return measurement
        try:
            self.wiring.pool(self.spec.pool).check(Need.of(self.job, self.spec.trainer))
        except PlannerError as error:
            return _failing(measurement, failure=BROKEN, message="; ".join(lines_of(error)))
        if failure == FailureKind.IMPORT and not self.succeeded:
            message = measurement.measured.message or failure
            return _failing(measurement, failure=BROKEN, message=message)
        return measurement

    def update_calibration(self) -> None:
        """Updates the calibration with the probes since the last time.

        After a full-fidelity run at once; cheaper ones wait for the next, because an update takes
        as long as some of them.
        """
        update_from_probes(self.wiring, self.untaught)
        self.untaught.clear()

    def on_event(self, event: Event) -> None:
        """Stores an event so that other processes can stream it, and passes it to the observer."""
        body = event_body(event)
        self.claimed.report(body["message"])
        self.wiring.tasks.add_event(self.claimed.record, body, self.wiring.clock.now())
        self.observer.on_event(body)

    def refusal(self, layout: Layout) -> str | None:
        """Why the probe program cannot run this layout; None where it can."""
        device = device_of(self.job.cluster)
        return trainer_of(self.spec.trainer).refusal(self.job, layout, device)

    # ---- what was measured before ---------------------------------------------------------------

    def timed_before(self) -> list[KernelTiming]:
        """Kernels timed on this GPU before, by whatever study, oldest first."""
        probes = kernel_probes(self.wiring, self.job.cluster.gpu.name)
        return [timing for probe in probes for timing in timings_of(probe)]

    def measured_before(self) -> Iterator[Measurement]:
        """Runs of the same question from before, on this kind of machine; not what is stale."""
        subject = Subject(
            trainer=self.job.training.trainer,
            gpu=self.job.cluster.gpu.name,
            owner=self.claimed.record.asked_by or "",
        )
        for num_gpus in self.job.cluster.num_gpus_choices:
            question = question_hash(self.job, num_gpus)
            found, stale = self.wiring.measurements.matching(question, subject)
            if stale is not None:
                runs = f"{counted(stale.runs, 'run')} of this job from before {stale.since[:10]}"
                left = f"{'are' if stale.runs > 1 else 'is'} left out as stale"
                self.observer.on_message(f"{runs} {left}: {stale.statement}")
            for one in found:
                if one.measured.status in ("ok", "oom") and one.measured.rung != "imitated":
                    yield one

    def done_before(self) -> tuple[Sequence[Measurement], AskedBefore, float]:
        """Probes of this study from before it was resumed: they count against its budget.

        (measurements, oldest first; what was asked of each; GPU-seconds spent on kernels).
        """
        study_id = self.claimed.record.id
        records = probes_of(self.wiring, study_id)
        found = {
            record.id: _without_blame(one)
            for record in records
            if (one := self._measurement(record)) is not None
        }
        self.succeeded.update(one.id for one in found.values() if one.measured.failure is None)
        events = self.wiring.tasks.events(study_id)
        asked = {
            found[record.id].id: (body["message"], body.get("counts"))
            for record in records
            if record.id in found and (body := _question_of(record, events)) is not None
        }
        kernels = [record for record in records if record.request.get("kernels")]
        return list(found.values()), asked, sum(map(gpu_seconds_of, kernels))


def _without_blame(measurement: Measurement) -> Measurement:
    """A measurement of before; a failure of the machine then says nothing about the layout."""
    if measurement.measured.failure not in OF_THE_MACHINE:
        return measurement
    return _failing(measurement, failure=FailureKind.INTERRUPTED.value)


def _not_believed(measurement: Measurement) -> Measurement:
    """The measurement without its numbers: they rank no layout, nor do extrapolated ones."""
    numbers = Measured(
        status="failed",
        rung=measurement.measured.rung,
        failure=IMPLAUSIBLE,
        message=measurement.refused,
        gpu_seconds=measurement.measured.gpu_seconds,
    )
    return measurement.model_copy(update={"measured": numbers})


def _failing(measurement: Measurement, **changed: str) -> Measurement:
    numbers = measurement.measured.model_copy(update=changed)
    return measurement.model_copy(update={"measured": numbers})


def _question_of(record: ProbeRecord, events: Sequence[TaskEvent]) -> Mapping[str, Any] | None:
    """Last event before the probe in which the study asked for this layout."""
    for event in reversed(events):
        about = (event.body["event"], event.body["layout"])
        if about == ("asked", record.layout) and event.created_at <= record.created_at:
            return event.body
    return None


def _rung_of(request: ProbeRequest) -> Rung:
    return "emulated" if request.emulate else "probed"


def event_body(event: Event) -> dict[str, Any]:
    """An event of the study, JSON-safe."""
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
        "probes_left": event.spent.probes_left(),
        "gpu_seconds": event.spent.gpu_seconds,
        "gpu_seconds_left": event.spent.gpu_seconds_left(),
        "ruled_out": event.ruled_out,
    }
