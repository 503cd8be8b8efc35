"""Progress of a plan as server-sent events: its probes as they go, and the end."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.api.storage.job_records import OPEN, ProbeRecord, TaskEvent, TaskRecord

MEDIA_TYPE = "text/event-stream"
POLL_SECONDS = 1.0
KEEP_ALIVE_POLLS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """A plan at one moment.

    probes: all of the plan.
    ended: the status with which it ended; None while it goes on.
    events: a study's, since the snapshot before.
    """

    probes: Sequence[ProbeRecord]
    ended: str | None
    events: Sequence[TaskEvent] = ()


def encoded(name: str, data: dict[str, Any], number: int | None = None) -> str:
    """One event on the wire. number: a client that comes back sends it as `Last-Event-ID`.

    Source: WHATWG HTML, section 9.2 (server-sent events).
    """
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n"


def described(record: ProbeRecord) -> dict[str, Any]:
    """The body of a `probe` event."""
    return {
        "id": record.id,
        "rank": record.plan_rank,
        "state": record.state,
        "progress": record.progress,
        "failure": record.failure,
        "message": record.message,
        "measurement_id": record.measurement_id,
    }


async def follow(
    plan_id: str,
    status: str,
    read: Callable[[], Awaitable[list[ProbeRecord]]],
    wait: Callable[[float], Awaitable[None]],
    stopping: Callable[[], bool] = bool,
) -> AsyncIterator[str]:
    """A `probe` event for every probe of the plan and every change of one, then `done`.

    Where none is queued or running, `done` comes at once. A client that comes back is sent the
    state of every probe again, so nothing is lost between two connections.

    read: gives the plan's probes.
    """

    async def snapshot() -> _Snapshot:
        records = await read()
        ended = not any(record.state in OPEN for record in records)
        return _Snapshot(probes=records, ended=status if ended else None)

    async for event in _changes(plan_id, snapshot, wait, stopping):
        yield event


async def follow_study(
    plan_id: str,
    read: Callable[[], Awaitable[list[ProbeRecord]]],
    study: Callable[[int], Awaitable[tuple[str, Sequence[TaskEvent]]]],
    wait: Callable[[float], Awaitable[None]],
    after: int = 0,
    stopping: Callable[[], bool] = bool,
) -> AsyncIterator[str]:
    """`study` and `probe` events of a plan that spends probes, then `done` with its end.

    study: gives the study's state, and its events (asked, told, stopped) after a number.
    after: the last event that the client has received. The state of the probes is sent again.
    """

    async def snapshot() -> _Snapshot:
        nonlocal after
        state, events = await study(after)
        after = events[-1].number if events else after
        return _Snapshot(probes=await read(), ended=None if state in OPEN else state, events=events)

    async for event in _changes(plan_id, snapshot, wait, stopping):
        yield event


async def follow_run(
    sweep_id: str,
    read: Callable[[], Awaitable[TaskRecord | None]],
    wait: Callable[[float], Awaitable[None]],
    stopping: Callable[[], bool] = bool,
) -> AsyncIterator[str]:
    """A `sweep` event for every change of a sweep's newest run, then `done` with its end.

    Of a sweep that never ran `done` comes at once. read: gives its newest run.
    """
    sent: dict[str, Any] = {}
    silent = 0
    while True:
        run = await read()
        now = {} if run is None else described_run(run)
        if now != sent:
            sent, silent = now, 0
            yield encoded("sweep", now)
        if run is None or run.state not in OPEN:
            yield encoded("done", {"id": sweep_id, "status": now.get("state")})
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        if stopping():
            return
        await wait(POLL_SECONDS)


def described_run(run: TaskRecord) -> dict[str, Any]:
    """The body of a `sweep` event."""
    return {
        "run": run.id,
        "state": run.state,
        "progress": run.progress,
        "message": run.message,
        "standing": None if run.standing is None else dict(run.standing),
    }


async def _changes(
    plan_id: str,
    snapshot: Callable[[], Awaitable[_Snapshot]],
    wait: Callable[[float], Awaitable[None]],
    stopping: Callable[[], bool],
) -> AsyncIterator[str]:
    """Changes from snapshot to snapshot, until one shows the end or the service stops.

    A comment is sent where nothing changes for long, because proxies close a silent connection.
    """
    sent: dict[str, dict[str, Any]] = {}
    silent = 0
    while True:
        now = await snapshot()
        for event in now.events:
            silent = 0
            body = {"number": event.number, "at": event.created_at.isoformat(), **event.body}
            yield encoded("study", body, event.number)
        for record in sorted(now.probes, key=lambda record: record.id):
            probe = described(record)
            if sent.get(record.id) != probe:
                sent[record.id], silent = probe, 0
                yield encoded("probe", probe)
        if now.ended is not None:
            yield encoded("done", {"id": plan_id, "status": now.ended, "probes": len(now.probes)})
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        if stopping():
            return  # the client comes back, and says which event it had
        await wait(POLL_SECONDS)
