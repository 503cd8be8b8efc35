"""HTTP connection to one service: retries, pagination, server-sent events."""

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from planner.api.http.schemas import Problem
from planner.errors import MissingPackageError, PlannerError, how_to_install

try:
    import httpx
except ModuleNotFoundError:
    raise MissingPackageError(f"no httpx here; {how_to_install('client')}") from None

CSV, JSON_LINES = "text/csv", "application/jsonl"
PAGE = 200
AGAIN = frozenset({429, 502, 503, 504})  # statuses that another try may pass
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 30.0
Answer = TypeVar("Answer")
Transport = httpx.BaseTransport


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


class Connection:
    """Requests to one service. Raises ServiceError, UnreachableError.

    A POST carries an Idempotency-Key, so that nothing is done twice.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        timeout_seconds: float = 120.0,
        tries: int = 4,
        transport: Transport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(
            base_url=address, headers=headers, timeout=timeout_seconds, transport=transport
        )
        self._tries, self._sleep = tries, sleep

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def pages(self, path: str, kind: type[Answer], **wanted: Any) -> Iterator[Answer]:
        """Every item of a list, page after page."""
        adapter, cursor = TypeAdapter(list[kind]), None  # type: ignore[valid-type]
        while True:
            page = json.loads(self.get(path, limit=PAGE, cursor=cursor, **wanted))
            yield from adapter.validate_python(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def get(self, path: str, **wanted: Any) -> str:
        asked = {name: value for name, value in wanted.items() if value is not None}
        return self.send("GET", path, params=asked).text

    def post(self, path: str, body: Any = None, *, media_type: str = CSV) -> str:
        """Posts a body. media_type: of a text body."""
        headers, content = {"idempotency-key": str(uuid.uuid4())}, None
        if isinstance(body, str):
            headers["content-type"], content = media_type, body.encode()
        elif body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body, default=plain).encode()
        return self.send("POST", path, headers=headers, content=content).text

    def send(self, method: str, url: str, **given: Any) -> httpx.Response:
        """Sends a request, with retries. Raises ServiceError, UnreachableError."""
        for tried in range(1, self._tries + 1):
            last = tried == self._tries
            try:
                answer = self._http.request(method, url, **given)
            except httpx.TransportError as error:
                if last:
                    raise UnreachableError(f"{self._http.base_url}: {error}") from error
                self._sleep(wait_seconds(tried, None))
                continue
            if answer.status_code not in AGAIN or last:
                break
            self._sleep(wait_seconds(tried, answer.headers.get("retry-after")))
        if answer.is_error:
            raise _error(answer)
        return answer

    def follow(self, path: str, after: int = 0) -> Iterator[ServerEvent]:
        """Events until one is `done`."""
        lost = 0
        while True:
            headers = {"last-event-id": str(after)} if after else {}
            try:
                with self._http.stream("GET", path, headers=headers, timeout=None) as answer:
                    if answer.is_error:
                        answer.read()
                        raise _error(answer)
                    for event in parse_events(answer.iter_lines()):
                        after, lost = event.number or after, 0
                        yield event
                        if event.name == "done":
                            return
            except httpx.TransportError as error:
                lost += 1
                if lost >= self._tries:
                    raise UnreachableError(f"{self._http.base_url}: {error}") from error
            self._sleep(wait_seconds(lost, None))


def wait_seconds(tried: int, retry_after: str | None) -> float:
    """Seconds before the next try: what the service asks for, or twice as long as before."""
    if retry_after is not None and retry_after.isdecimal():
        return min(float(retry_after), LONGEST_WAIT_SECONDS)
    longest = min(FIRST_WAIT_SECONDS * 2.0 ** max(tried - 1, 0), LONGEST_WAIT_SECONDS)
    return longest * random.uniform(0.5, 1.0)


def _error(answer: httpx.Response) -> ServiceError:
    try:
        return ServiceError(Problem.model_validate_json(answer.text))
    except ValueError:  # something between us and the service answered
        title, status = answer.reason_phrase or "error", answer.status_code
        detail = f"{status} {title}: {answer.text[:200]}"
        return ServiceError(Problem(type="http_error", title=title, status=status, detail=detail))


def plain(value: object) -> Any:
    """Values a job may hold besides JSON's own: the planner's types."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no part of a job")


def parse_events(lines: Iterator[str]) -> Iterator[ServerEvent]:
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
