"""A typed client of the service: `Client("http://host:8000", key="...")`.

Its answers are the planner's own types, its lists read page after page, and what fails is the
service's own error. It tries again what may pass on a second try; a POST carries an
Idempotency-Key, so that nothing is done twice.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import TypeAdapter

from planner.api.connection import JSON_LINES, PAGE, Connection, plain
from planner.api.connection import ServerEvent as ServerEvent
from planner.api.connection import ServiceError as ServiceError
from planner.api.connection import UnreachableError as UnreachableError
from planner.api.http.schemas import (
    CalibrationLine,
    Explained,
    MeasurementsStored,
    PlanAccepted,
    PlanState,
    ProbeDetail,
    ProbeLine,
    ProbesAccepted,
)
from planner.api.http.sweep_schemas import (
    HostReleased,
    QuarantineLine,
    SweepDetail,
    SweepRunAccepted,
)
from planner.api.storage.job_records import QueuedJob
from planner.api.storage.records import AuditEvent, PlanLine
from planner.specs.collective import CollectiveAnswer
from planner.specs.estimate import Estimate
from planner.specs.plan import Plan

Job = Mapping[str, Any]


class Client(Connection):
    """Asks one service. Close it, or use it in a `with`.

    key: a secret of the service; none where it needs none.
    tries: at most, of one request.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- plans and estimates ----

    def plan(self, job: Job) -> Plan:
        """Plans a job. For a job with `probe` see `start_plan`."""
        return Plan.model_validate_json(self.post("/plan", job))

    def start_plan(self, job: Job) -> PlanAccepted:
        """Queues a plan that spends probes; follow its `events`."""
        return PlanAccepted.model_validate_json(self.post("/plan", job))

    def get_plan(self, plan_id: str) -> Plan | PlanAccepted:
        """Fetches a stored plan, or its state while it spends probes or after it failed."""
        text = self.get(f"/plans/{plan_id}")
        kind = Plan if "ranked" in json.loads(text) else PlanAccepted
        return kind.model_validate_json(text)

    def plans(self, *, open: bool = False) -> Iterator[PlanLine]:
        """Stored plans, newest first. open: only those that probes are still spent on."""
        return self.pages("/plans", PlanLine, open=open)

    def explain(self, plan_id: str, rank: int = 1, versus: int | None = None) -> Explained:
        """Why a layout, or what it gains and loses against another."""
        text = self.get(f"/plans/{plan_id}/explain", rank=rank, versus=versus)
        return Explained.model_validate_json(text)

    def cancel_plan(self, plan_id: str) -> PlanState:
        """Ends what still runs for a plan."""
        return PlanState.model_validate_json(self.send("DELETE", f"/plans/{plan_id}").text)

    def events(self, plan_id: str, after: int = 0) -> Iterator[ServerEvent]:
        """Events of a plan until it is done; a lost connection is taken up again."""
        return self.follow(f"/plans/{plan_id}/events", after)

    def estimate(self, job: Job) -> Estimate:
        """Estimates a job with its layout."""
        return Estimate.model_validate_json(self.post("/estimate", job))

    def estimate_many(self, jobs: Sequence[Job]) -> list[Estimate | dict[str, Any]]:
        """Many of them, in order; a malformed one is answered by its error object."""
        answers = json.loads(self.post("/estimate", list(jobs)))
        return [one if "error" in one else Estimate.model_validate(one) for one in answers]

    def estimate_lines(
        self, jobs: Iterable[Job], at_once: int = 500
    ) -> Iterator[Estimate | dict[str, Any]]:
        """Any number of them, `at_once` a request, each as soon as it is there; nothing is kept."""
        left = iter(jobs)
        while chunk := list(itertools.islice(left, at_once)):
            lines = "".join(f"{json.dumps(job, default=plain)}\n" for job in chunk)
            for line in self.post("/estimate", lines, media_type=JSON_LINES).splitlines():
                one = json.loads(line)
                yield one if "error" in one else Estimate.model_validate(one)

    def collective(self, question: Mapping[str, Any]) -> CollectiveAnswer:
        """Seconds and bytes of one operation on a cluster."""
        return CollectiveAnswer.model_validate_json(self.post("/collective", question))

    def simulate(self, job: Job) -> dict[str, Any]:
        """The pipeline's timeline as a Chrome trace."""
        trace: dict[str, Any] = json.loads(self.post("/simulate", job))
        return trace

    # ---- probes, measurements, sweeps ----

    def start_probes(self, request: Mapping[str, Any]) -> ProbesAccepted:
        """Queues a job with its layout, or `{"plan": ID, "top_k": N}`, to be measured."""
        return ProbesAccepted.model_validate_json(self.post("/probes", request))

    def probes(self, **wanted: str | None) -> Iterator[ProbeLine]:
        """Probes, newest first. wanted: state, model, gpu, plan, pool."""
        return self.pages("/probes", ProbeLine, **wanted)

    def get_probe(self, probe_id: str) -> ProbeDetail:
        """One probe with the results of its runs."""
        return ProbeDetail.model_validate_json(self.get(f"/probes/{probe_id}"))

    def cancel_probe(self, probe_id: str) -> ProbeDetail:
        """Cancels a probe that is queued or runs."""
        return ProbeDetail.model_validate_json(self.send("DELETE", f"/probes/{probe_id}").text)

    def measurements(self, **wanted: str | None) -> Iterator[dict[str, Any]]:
        """Measured rows, newest first. wanted: model, gpu, status, rung, job_hash."""
        return self.pages("/measurements", dict[str, Any], **wanted)

    def store_measurements(
        self, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str
    ) -> MeasurementsStored:
        """Stores rows, all or none. A text is CSV."""
        return MeasurementsStored.model_validate_json(self.post("/measurements", rows))

    def delete_measurement(self, measurement_id: str) -> None:
        """Deletes a measurement, and what was learnt from it."""
        self.send("DELETE", f"/measurements/{measurement_id}")

    def share_measurement(self, measurement_id: str) -> dict[str, Any]:
        """Lets a measurement count for everyone's plans; returns its row."""
        return self._object(self.post(f"/measurements/{measurement_id}/share"))

    def add_sweep(self, spec: Mapping[str, Any]) -> SweepDetail:
        """Stores a sweep; workers run it by its schedule."""
        return SweepDetail.model_validate_json(self.post("/sweeps", spec))

    def sweeps(self) -> Iterator[SweepDetail]:
        """Stored sweeps, newest first, each with its newest run."""
        return self.pages("/sweeps", SweepDetail)

    def get_sweep(self, sweep_id: str) -> SweepDetail:
        """One sweep with its newest runs and their reports."""
        return SweepDetail.model_validate_json(self.get(f"/sweeps/{sweep_id}"))

    def sweep_events(self, sweep_id: str) -> Iterator[ServerEvent]:
        """Events of its newest run: `sweep` for every change, then `done`."""
        return self.follow(f"/sweeps/{sweep_id}/events")

    def quarantine(self, pool: str | None = None) -> list[QuarantineLine]:
        """Hosts that no run uses for now, each with the evidence."""
        found = self.get("/quarantine", pool=pool)
        return TypeAdapter(list[QuarantineLine]).validate_json(found)

    def release_host(self, host: str) -> HostReleased:
        """Lets a host in again, in every pool."""
        return HostReleased.model_validate_json(self.send("DELETE", f"/quarantine/{host}").text)

    def run_sweep(self, sweep_id: str) -> SweepRunAccepted:
        """Queues a run for the next free worker."""
        return SweepRunAccepted.model_validate_json(self.post(f"/sweeps/{sweep_id}/run"))

    def pause_sweep(self, sweep_id: str) -> SweepDetail:
        """No more runs until it is resumed."""
        return SweepDetail.model_validate_json(self.post(f"/sweeps/{sweep_id}/pause"))

    def resume_sweep(self, sweep_id: str) -> SweepDetail:
        """Runs again from the next moment of its schedule on."""
        return SweepDetail.model_validate_json(self.post(f"/sweeps/{sweep_id}/resume"))

    def cancel_sweep(self, sweep_id: str) -> SweepDetail:
        """Never again; its reports stay."""
        return SweepDetail.model_validate_json(self.send("DELETE", f"/sweeps/{sweep_id}").text)

    # ---- what waits, and who did what ----

    def queue(self, failed: bool = False) -> list[QueuedJob]:
        """Lists tasks that wait or run. failed: lists those that failed for good instead."""
        text = self.get("/queue", failed=str(failed).lower(), limit=PAGE)
        return TypeAdapter(list[QueuedJob]).validate_json(text)

    def retry_job(self, job_id: str) -> QueuedJob:
        """Gives a failed job new attempts."""
        return TypeAdapter(QueuedJob).validate_json(self.post(f"/queue/{job_id}/retry"))

    def audit(self, **wanted: str | None) -> Iterator[AuditEvent]:
        """The audit trail, newest first. wanted: asked_by, action, subject."""
        return self.pages("/audit", AuditEvent, **wanted)

    # ---- what is known ----

    def calibrations(self) -> Iterator[CalibrationLine]:
        """Calibrations, those in use first."""
        return self.pages("/calibrations", CalibrationLine)

    def add_entry(self, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a model, GPU or cluster of one's own, which jobs mean as `own/NAME`."""
        return self._object(self.post(f"/catalog/{kind}", {"name": name, "spec": spec}))

    def catalog(self, kind: str) -> list[dict[str, Any]]:
        """Lists the entries of models, gpus, clusters, schedules or defaults."""
        return list(self.pages(f"/catalog/{kind}", dict[str, Any]))

    def catalog_entry(self, kind: str, name: str) -> dict[str, Any]:
        """One entry in full, with its sources."""
        return self._object(self.get(f"/catalog/{kind}/{name}"))

    def job_schema(self) -> dict[str, Any]:
        """The JSON schema of a job."""
        return self._object(self.get("/jobs/schema"))

    def _object(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text)
        return found
