"""Progress of a plan or a sweep as server-sent events: every change as it comes, and the end."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from planner.api.http.requests import Threads, in_thread
from planner.api.storage.common import told
from planner.api.storage.job_records import OPEN, ProbeRecord, TaskEvent, TaskRecord

MEDIA_TYPE = "text/event-stream"
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events", "content": {MEDIA_TYPE: {}}}
}
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
POLL_SECONDS = 1.0
KEEP_ALIVE_POLLS = 15
Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of a plan, a study or a sweep that a client follows.

    events: a study's, since the snapshot before.
    states: by (name, id); each is an event where it is new or has changed.
    done: the body of the last event; None while it goes on.
    """

    events: Sequence[TaskEvent] = ()
    states: Mapping[tuple[str, str], Body] = field(default_factory=dict)
    done: Body | None


def of_plan(
    plan_id: str, probes: Sequence[ProbeRecord], ended: str | None, events: Sequence[TaskEvent] = ()
) -> Snapshot:
    """A plan with all its probes. ended: the status with which it ended."""
    ordered = sorted(probes, key=lambda record: record.id)
    states = {("probe", one.id): described(one) for one in ordered}
    done = {"id": plan_id, "status": ended, "probes": len(probes)}
    return Snapshot(events=events, states=states, done=None if ended is None else done)


def of_sweep(sweep_id: str, run: TaskRecord | None) -> Snapshot:
    """A sweep with its newest run; one that never ran has ended."""
    if run is None:
        return Snapshot(done={"id": sweep_id, "status": None})
    state = {"run": run.id, **told(run, "state", "progress", "message", "standing")}
    return Snapshot(
        states={("sweep", sweep_id): state},
        done=None if run.state in OPEN else {"id": sweep_id, "status": run.state},
    )


def described(record: ProbeRecord) -> Body:
    """The body of a `probe` event."""
    shown = ("id", "state", "progress", "failure", "message", "measurement_id")
    return {**told(record, *shown), "rank": record.plan_rank}


def stream(request: Request, read: Callable[[], Snapshot]) -> Response:
    """The answer that follows the snapshots of `read`, which runs in a thread."""

    async def snapshot() -> Snapshot:
        return await in_thread(request, read, Threads.EVENTS)

    followed = follow(snapshot, anyio.sleep, request.app.state.stopping.is_set)
    return StreamingResponse(followed, media_type=MEDIA_TYPE, headers=HEADERS)


async def follow(
    snapshot: Callable[[], Awaitable[Snapshot]],
    wait: Callable[[float], Awaitable[None]],
    stopping: Callable[[], bool] = bool,
) -> AsyncIterator[str]:
    """Changes from snapshot to snapshot, until one shows the end or the service stops.

    A client that comes back is sent every state again, so nothing is lost between two connections.
    A comment is sent where nothing changes for long, because proxies close a silent connection.
    """
    sent: dict[tuple[str, str], Body] = {}
    silent = 0
    while True:
        now = await snapshot()
        for event in now.events:
            silent = 0
            body = {"number": event.number, "at": event.created_at.isoformat(), **event.body}
            yield encoded("study", body, event.number)
        for key, state in now.states.items():
            if sent.get(key) != state:
                sent[key], silent = state, 0
                yield encoded(key[0], state)
        if now.done is not None:
            yield encoded("done", now.done)
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        if stopping():
            return  # the client comes back, and says which event it had
        await wait(POLL_SECONDS)


def encoded(name: str, data: Body, number: int | None = None) -> str:
    """One event on the wire. number: a client that comes back sends it as `Last-Event-ID`.

    Source: WHATWG HTML, section 9.2 (server-sent events).
    """
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n"
