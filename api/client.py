"""A typed client of the service: `Client("http://host:8000", key="...")`.

Its answers are the planner's own types, its lists read page after page, and what fails is the
service's own error. It tries again what may pass on a second try; a POST carries an
Idempotency-Key, so that nothing is done twice. What has an ETag is fetched once.
"""

import itertools
import json
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, TypeAdapter

from api.http.schemas import (
    CalibrationLine,
    Explained,
    HostReleased,
    MeasurementsStored,
    PlanAccepted,
    PlanState,
    ProbeDetail,
    ProbeLine,
    ProbesAccepted,
    Problem,
    QuarantineLine,
    SweepDetail,
    SweepRunAccepted,
)
from api.storage.records import AuditEvent, PlanLine, QueuedJob
from planner.errors import MissingPackageError, PlannerError, how_to_install
from planner.specs.collective import CollectiveAnswer
from planner.specs.estimate import Estimate
from planner.specs.plan import Plan

try:
    import httpx
except ModuleNotFoundError:
    raise MissingPackageError(f"no httpx here; {how_to_install('client')}") from None

Job = Mapping[str, Any]
CSV, JSON_LINES = "text/csv", "application/jsonl"
PAGE = 200
MOST_KEPT = 64  # answers with an ETag
AGAIN = frozenset({429, 502, 503, 504})  # statuses that another try may pass
CONFLICT, NOT_MODIFIED = 409, 304
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 30.0
Answer = TypeVar("Answer")


class ServiceError(PlannerError):
    """The service refused or failed: its problem details."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.kind, self.problem, self.status = problem.type, problem, problem.status


class UnreachableError(PlannerError):
    """No answer came, however often it was asked."""

    kind = "unreachable"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event of a plan that spends probes, or of a sweep's run.

    number: of `study` events, to go on from.
    """

    name: str
    data: Any
    number: int | None = None


class Client:
    """Asks one service. Close it, or use it in a `with`.

    key: a secret of the service; none where it needs none.
    tries: at most, of one request.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        timeout_seconds: float = 120.0,
        tries: int = 4,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(
            base_url=address, headers=headers, timeout=timeout_seconds, transport=transport
        )
        self._tries, self._sleep = tries, sleep
        self._kept: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    # ---- plans and estimates ----

    def plan(self, job: Job) -> Plan:
        """The plan of a job. For one with `probe` see `start_plan`."""
        return Plan.model_validate_json(self._post("/plan", job))

    def start_plan(self, job: Job) -> PlanAccepted:
        """Queues a plan that spends probes; follow its `events`."""
        return PlanAccepted.model_validate_json(self._post("/plan", job))

    def get_plan(self, plan_id: str) -> Plan | PlanAccepted:
        """A stored plan; how it stands while it spends probes, or if it came to nothing."""
        text = self._get(f"/plans/{plan_id}")
        kind = Plan if "ranked" in json.loads(text) else PlanAccepted
        return kind.model_validate_json(text)

    def plans(self, *, open: bool = False) -> Iterator[PlanLine]:
        """Stored plans, newest first. open: only those that probes are still spent on."""
        return self._all("/plans", PlanLine, open=open)

    def explain(self, plan_id: str, rank: int = 1, versus: int | None = None) -> Explained:
        """Why a layout, or what it gains and loses against another."""
        text = self._get(f"/plans/{plan_id}/explain", rank=rank, versus=versus)
        return Explained.model_validate_json(text)

    def cancel_plan(self, plan_id: str) -> PlanState:
        """Ends what still runs for a plan."""
        return PlanState.model_validate_json(self._send("DELETE", f"/plans/{plan_id}").text)

    def events(self, plan_id: str, after: int = 0) -> Iterator[ServerEvent]:
        """Events of a plan until it is done; a lost connection is taken up again."""
        return self._follow(f"/plans/{plan_id}/events", after)

    def _follow(self, path: str, after: int = 0) -> Iterator[ServerEvent]:
        """Events until one is `done`."""
        lost = 0
        while True:
            headers = {"last-event-id": str(after)} if after else {}
            try:
                with self._http.stream("GET", path, headers=headers, timeout=None) as answer:
                    if answer.is_error:
                        answer.read()
                        raise _error(answer)
                    for event in _events(answer.iter_lines()):
                        after, lost = event.number or after, 0
                        yield event
                        if event.name == "done":
                            return
            except httpx.TransportError as error:
                lost += 1
                if lost >= self._tries:
                    raise UnreachableError(f"{self._http.base_url}: {error}") from error
            self._sleep(_wait(lost, None))

    def estimate(self, job: Job) -> Estimate:
        """A job with its layout, priced."""
        return Estimate.model_validate_json(self._post("/estimate", job))

    def estimate_many(self, jobs: Sequence[Job]) -> list[Estimate | dict[str, Any]]:
        """Many of them, in order; a malformed one is answered by its error object."""
        answers = json.loads(self._post("/estimate", list(jobs)))
        return [one if "error" in one else Estimate.model_validate(one) for one in answers]

    def estimate_lines(
        self, jobs: Iterable[Job], at_once: int = 500
    ) -> Iterator[Estimate | dict[str, Any]]:
        """Any number of them, `at_once` a request, each as soon as it is there; nothing is kept."""
        left = iter(jobs)
        while chunk := list(itertools.islice(left, at_once)):
            lines = "".join(f"{json.dumps(job, default=_plain)}\n" for job in chunk)
            for line in self._post("/estimate", lines, media_type=JSON_LINES).splitlines():
                one = json.loads(line)
                yield one if "error" in one else Estimate.model_validate(one)

    def collective(self, question: Mapping[str, Any]) -> CollectiveAnswer:
        """Seconds and bytes of one operation on a cluster."""
        return CollectiveAnswer.model_validate_json(self._post("/collective", question))

    def simulate(self, job: Job) -> dict[str, Any]:
        """The pipeline's timeline as a Chrome trace."""
        trace: dict[str, Any] = json.loads(self._post("/simulate", job))
        return trace

    # ---- probes, measurements, sweeps ----

    def start_probes(self, request: Mapping[str, Any]) -> ProbesAccepted:
        """Queues a job with its layout, or `{"plan": ID, "top_k": N}`, to be measured."""
        return ProbesAccepted.model_validate_json(self._post("/probes", request))

    def probes(self, **wanted: str | None) -> Iterator[ProbeLine]:
        """Probes, newest first. wanted: state, model, gpu, plan, pool."""
        return self._all("/probes", ProbeLine, **wanted)

    def get_probe(self, probe_id: str) -> ProbeDetail:
        """One probe with the results of its runs."""
        return ProbeDetail.model_validate_json(self._get(f"/probes/{probe_id}"))

    def cancel_probe(self, probe_id: str) -> ProbeDetail:
        """Cancels a probe that is queued or runs."""
        return ProbeDetail.model_validate_json(self._send("DELETE", f"/probes/{probe_id}").text)

    def measurements(self, **wanted: str | None) -> Iterator[dict[str, Any]]:
        """Measured rows, newest first. wanted: model, gpu, status, rung, job_hash."""
        return self._all("/measurements", dict[str, Any], **wanted)

    def store_measurements(
        self, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str
    ) -> MeasurementsStored:
        """Stores rows, all or none. A text is CSV."""
        return MeasurementsStored.model_validate_json(self._post("/measurements", rows))

    def delete_measurement(self, measurement_id: str) -> None:
        """Deletes a measurement, and what was learnt from it."""
        self._send("DELETE", f"/measurements/{measurement_id}")

    def share_measurement(self, measurement_id: str) -> dict[str, Any]:
        """Lets a measurement count for everyone's plans; returns its row."""
        return self._object(self._post(f"/measurements/{measurement_id}/share"))

    def add_sweep(self, spec: Mapping[str, Any]) -> SweepDetail:
        """Stores a sweep; workers run it by its schedule."""
        return SweepDetail.model_validate_json(self._post("/sweeps", spec))

    def sweeps(self) -> Iterator[SweepDetail]:
        """Stored sweeps, newest first, each with its newest run."""
        return self._all("/sweeps", SweepDetail)

    def get_sweep(self, sweep_id: str) -> SweepDetail:
        """One sweep with its newest runs and their reports."""
        return SweepDetail.model_validate_json(self._get(f"/sweeps/{sweep_id}"))

    def sweep_events(self, sweep_id: str) -> Iterator[ServerEvent]:
        """Events of its newest run: `sweep` for every change, then `done`."""
        return self._follow(f"/sweeps/{sweep_id}/events")

    def quarantine(self, pool: str | None = None) -> list[QuarantineLine]:
        """Hosts that no run uses for now, each with the evidence."""
        found = self._get("/quarantine", pool=pool)
        return TypeAdapter(list[QuarantineLine]).validate_json(found)

    def release_host(self, host: str) -> HostReleased:
        """Lets a host in again, in every pool."""
        return HostReleased.model_validate_json(self._send("DELETE", f"/quarantine/{host}").text)

    def run_sweep(self, sweep_id: str) -> SweepRunAccepted:
        """Queues a run for the next free worker."""
        return SweepRunAccepted.model_validate_json(self._post(f"/sweeps/{sweep_id}/run"))

    def pause_sweep(self, sweep_id: str) -> SweepDetail:
        """No more runs until it is resumed."""
        return SweepDetail.model_validate_json(self._post(f"/sweeps/{sweep_id}/pause"))

    def resume_sweep(self, sweep_id: str) -> SweepDetail:
        """Runs again from the next moment of its schedule on."""
        return SweepDetail.model_validate_json(self._post(f"/sweeps/{sweep_id}/resume"))

    def cancel_sweep(self, sweep_id: str) -> SweepDetail:
        """Never again; its reports stay."""
        return SweepDetail.model_validate_json(self._send("DELETE", f"/sweeps/{sweep_id}").text)

    # ---- what waits, and who did what ----

    def queue(self, failed: bool = False) -> list[QueuedJob]:
        """Probes, studies and runs of sweeps that wait or run. failed: what was given up."""
        text = self._get("/queue", failed=str(failed).lower(), limit=PAGE)
        return TypeAdapter(list[QueuedJob]).validate_json(text)

    def retry_job(self, job_id: str) -> QueuedJob:
        """Gives a failed job new attempts."""
        return TypeAdapter(QueuedJob).validate_json(self._post(f"/queue/{job_id}/retry"))

    def audit(self, **wanted: str | None) -> Iterator[AuditEvent]:
        """The audit trail, newest first. wanted: asked_by, action, subject."""
        return self._all("/audit", AuditEvent, **wanted)

    # ---- what is known ----

    def calibrations(self) -> Iterator[CalibrationLine]:
        """Calibrations, those in use first."""
        return self._all("/calibrations", CalibrationLine)

    def add_entry(self, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a model, GPU or cluster of one's own, which jobs mean as `own/NAME`."""
        return self._object(self._post(f"/catalog/{kind}", {"name": name, "spec": spec}))

    def catalog(self, kind: str) -> list[dict[str, Any]]:
        """One line an entry of models, gpus, clusters, schedules or defaults."""
        return list(self._all(f"/catalog/{kind}", dict[str, Any]))

    def catalog_entry(self, kind: str, name: str) -> dict[str, Any]:
        """One entry in full, with its sources."""
        return self._object(self._get(f"/catalog/{kind}/{name}"))

    def job_schema(self) -> dict[str, Any]:
        """The JSON schema of a job."""
        return self._object(self._get("/jobs/schema"))

    # ---- requests ----

    def _object(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text)
        return found

    def _all(self, path: str, kind: type[Answer], **wanted: Any) -> Iterator[Answer]:
        """Every item of a list, page after page."""
        adapter, cursor = TypeAdapter(list[kind]), None  # type: ignore[valid-type]
        while True:
            page = json.loads(self._get(path, limit=PAGE, cursor=cursor, **wanted))
            yield from adapter.validate_python(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _get(self, path: str, **wanted: Any) -> str:
        asked = {name: value for name, value in wanted.items() if value is not None}
        url = str(httpx.URL(path, params=asked))
        tag, body = self._kept.get(url, (None, ""))
        answer = self._send("GET", url, headers={"if-none-match": tag} if tag else {})
        if answer.status_code == NOT_MODIFIED:
            return body
        if "etag" in answer.headers:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[url] = answer.headers["etag"], answer.text
        return answer.text

    def _post(self, path: str, body: Any = None, *, media_type: str = CSV) -> str:
        """The answer to a POST. media_type: of a body that is a text."""
        headers, content = {"idempotency-key": str(uuid.uuid4())}, None
        if isinstance(body, str):
            headers["content-type"], content = media_type, body.encode()
        elif body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body, default=_plain).encode()
        return self._send("POST", path, headers=headers, content=content).text

    def _send(self, method: str, url: str, **given: Any) -> httpx.Response:
        """The answer, tried again while that may help. Raises ServiceError, UnreachableError."""
        for tried in range(1, self._tries + 1):
            last = tried == self._tries
            try:
                answer = self._http.request(method, url, **given)
            except httpx.TransportError as error:
                if last:
                    raise UnreachableError(f"{self._http.base_url}: {error}") from error
                self._sleep(_wait(tried, None))
                continue
            if answer.status_code not in AGAIN or last:
                break
            self._sleep(_wait(tried, answer.headers.get("retry-after")))
        if answer.is_error:
            raise _error(answer)
        return answer


def _wait(tried: int, retry_after: str | None) -> float:
    """Seconds before the next try: what the service asks for, or twice as long as before."""
    if retry_after is not None and retry_after.isdecimal():
        return min(float(retry_after), LONGEST_WAIT_SECONDS)
    longest = min(FIRST_WAIT_SECONDS * 2.0 ** max(tried - 1, 0), LONGEST_WAIT_SECONDS)
    return longest * random.uniform(0.5, 1.0)


def _error(answer: httpx.Response) -> ServiceError:
    try:
        return ServiceError(Problem.model_validate_json(answer.text))
    except ValueError:  # something between us and the service answered
        title = answer.reason_phrase or "error"
        detail = f"{answer.status_code} {title}: {answer.text[:200]}"
        return ServiceError(
            Problem(type="http_error", title=title, status=answer.status_code, detail=detail)
        )


def _plain(value: object) -> Any:
    """Values a job may hold besides JSON's own: the planner's types."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no part of a job")


def _events(lines: Iterator[str]) -> Iterator[ServerEvent]:
    """Server-sent events. Source: WHATWG HTML, section 9.2.6."""
    name, number = "message", None
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(name, json.loads("\n".join(data)), number)
            name, number, data = "message", None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id" and value.isdecimal():
            number = int(value)
