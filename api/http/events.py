"""What happens to a plan, as server-sent events: its probes as they go, and the end."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from api.storage.records import ProbeRecord, TaskEvent

MEDIA_TYPE = "text/event-stream"
POLL_SECONDS = 1.0
KEEP_ALIVE_POLLS = 15  # proxies close what is silent for long
OPEN: tuple[Literal["queued", "running"], ...] = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a plan: its probes, a study's events since the last look, and how it ended; None
    while it goes on.
    """

    probes: Sequence[ProbeRecord]
    ended: str | None
    events: Sequence[TaskEvent] = ()


def encoded(name: str, data: dict[str, Any], number: int | None = None) -> str:
    """One event on the wire. number: what a client that comes back names as the last it had.

    Source: WHATWG HTML, section 9.2 (server-sent events).
    """
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n"


def described(record: ProbeRecord) -> dict[str, Any]:
    """What a follower is told of a probe."""
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
) -> AsyncIterator[str]:
    """A `probe` event for every probe of the plan and every change of one, then `done`; at once
    `done` where none is queued or running.

    A client that comes back is told where everything stands, so nothing is lost between two
    connections.  read: the plan's probes now.
    """

    async def look() -> Look:
        records = await read()
        ended = not any(record.state in OPEN for record in records)
        return Look(probes=records, ended=status if ended else None)

    async for part in _told(plan_id, look, wait):
        yield part


async def follow_study(
    plan_id: str,
    read: Callable[[], Awaitable[list[ProbeRecord]]],
    stand: Callable[[int], Awaitable[tuple[str, Sequence[TaskEvent]]]],
    wait: Callable[[float], Awaitable[None]],
    after: int = 0,
) -> AsyncIterator[str]:
    """`study` events (asked, told, stopped, in order) and `probe` events of a plan that spends
    probes, then `done` with how it ended.

    stand: the study's state and its events after a number.  after: the last that the client has
    had; where its probes stand is told anew, so that it misses nothing.
    """

    async def look() -> Look:
        nonlocal after
        state, events = await stand(after)
        after = events[-1].number if events else after
        return Look(probes=await read(), ended=None if state in OPEN else state, events=events)

    async for part in _told(plan_id, look, wait):
        yield part


async def _told(
    plan_id: str, look: Callable[[], Awaitable[Look]], wait: Callable[[float], Awaitable[None]]
) -> AsyncIterator[str]:
    """What every look shows anew, and a sign of life where that is nothing for long, until a look
    shows the end.
    """
    told: dict[str, dict[str, Any]] = {}
    silent = 0
    while True:
        seen = await look()
        for event in seen.events:
            silent = 0
            yield encoded(
                "study",
                {"number": event.number, "at": event.created_at.isoformat(), **event.body},
                event.number,
            )
        for record in sorted(seen.probes, key=lambda record: record.id):
            now = described(record)
            if told.get(record.id) != now:
                told[record.id], silent = now, 0
                yield encoded("probe", now)
        if seen.ended is not None:
            yield encoded("done", {"id": plan_id, "status": seen.ended, "probes": len(seen.probes)})
            return
        silent += 1
        if silent % KEEP_ALIVE_POLLS == 0:
            yield ": still here\n\n"
        await wait(POLL_SECONDS)
