"""What happens to a plan, as server-sent events: its probes as they go, and the end."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from planner.ports import ProbeRecord, TaskEvent

MEDIA_TYPE = "text/event-stream"
POLL_SECONDS = 1.0
KEEP_ALIVE_POLLS = 15  # proxies close what is silent for long
OPEN = ("queued", "running")


def encoded(name: str, data: dict[str, Any]) -> str:
    """One event on the wire. Source: WHATWG HTML, section 9.2 (server-sent events)."""
    return f"event: {name}\ndata: {json.dumps(data, default=str)}\n\n"


def described(record: ProbeRecord) -> dict[str, Any]:
    """What a follower is told of a probe."""
    return {
        "id": record.id, "rank": record.plan_rank, "state": record.state, "progress": record.progress, "failure": record.failure,
        "message": record.message, "measurement_id": record.measurement_id,
    }  # fmt: skip


async def follow(
    plan_id: str, status: str, read: Callable[[], Awaitable[list[ProbeRecord]]], wait: Callable[[float], Awaitable[None]]
) -> AsyncIterator[str]:
    """A `probe` event for every probe of the plan and every change of one, then `done`; at once `done` where none is queued or running.

    A client that comes back is told where everything stands, so nothing is lost between two connections.  read: the plan's probes now.
    """
    told: dict[str, dict[str, Any]] = {}
    silent = 0
    while True:
        records = await read()
        for record in sorted(records, key=lambda record: record.id):
            now = described(record)
            if told.get(record.id) != now:
                told[record.id], silent = now, 0
                yield encoded("probe", now)
        if not any(record.state in OPEN for record in records):
            yield encoded("done", {"id": plan_id, "status": status, "probes": len(records)})
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        await wait(POLL_SECONDS)


async def follow_study(
    plan_id: str,
    read: Callable[[], Awaitable[list[ProbeRecord]]],
    stand: Callable[[int], Awaitable[tuple[str, Sequence[TaskEvent]]]],
    wait: Callable[[float], Awaitable[None]],
) -> AsyncIterator[str]:
    """`study` events (asked, told, stopped, in order) and `probe` events of a plan that spends probes, then `done` with how it ended.

    stand: the study's state and its events after a number.  All are told from the first on, so a client that comes back misses nothing.
    """
    told: dict[str, dict[str, Any]] = {}
    after = silent = 0
    while True:
        state, events = await stand(after)
        for event in events:
            after, silent = event.number, 0
            yield encoded("study", {"number": event.number, "at": event.created_at, **event.body})
        records = await read()
        for record in sorted(records, key=lambda record: record.id):
            now = described(record)
            if told.get(record.id) != now:
                told[record.id], silent = now, 0
                yield encoded("probe", now)
        if state not in OPEN:
            yield encoded("done", {"id": plan_id, "status": state, "probes": len(records)})
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        await wait(POLL_SECONDS)
