"""GET /healthz, GET /readyz: open to everyone, because load balancers have no key.

So they say what is wrong without naming a host, a user or a path; the log has these.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter, Request

from planner.api.errors import NotReadyError
from planner.api.http.requests import Threads, in_thread, wiring_of
from planner.api.http.routes.parameters import problems
from planner.api.http.schemas import Health, Readiness, ReadinessPart
from planner.api.storage.engine import is_memory
from planner.api.storage.migrate import HEAD, at_revision, current_revision
from planner.errors import StoreError
from planner.probes.folder import free_bytes
from planner.units import format_bytes

router = APIRouter(tags=["health"])
log = logging.getLogger("planner.readiness")
FREE_BYTES = 2**28  # for results, logs and the database's own files


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", responses=problems(503))
async def readyz(request: Request) -> Readiness:
    """The database can be reached and is migrated, the disk has room, workers and planning go on.

    503 names the parts that are not ready.
    """
    parts = await in_thread(request, lambda: list(_parts(request)), Threads.HEALTH)
    wrong = [part for part in parts if not part.ready]
    if wrong:
        said = ". ".join(f"{part.name}: {part.message}" for part in wrong)
        raise NotReadyError(said)
    return Readiness(database_revision=HEAD, parts=parts)


def _parts(request: Request) -> Iterator[ReadinessPart]:
    state, wiring = request.app.state, wiring_of(request)
    yield _part("database", _database(request))
    folders = [wiring.settings.probe_folder]
    url = wiring.engine.url
    if url.get_backend_name() == "sqlite" and not is_memory(url):
        folders.append(Path(str(url.database)).parent)
    free = min(map(free_bytes, folders))
    full = f"{format_bytes(free)} are free; make room for results and the database"
    yield _part("disk", full if free < FREE_BYTES else None)
    busy = any(0 < lane.waiting >= lane.most_waiting for lane in state.lanes.values())
    yield _part("planning", "no more plans can wait; ask again later" if busy else None)
    ended = not all(workers.alive for workers in state.workers)
    yield _part("workers", "a worker's thread has ended; restart the service" if ended else None)


def _part(name: str, message: str | None) -> ReadinessPart:
    return ReadinessPart.model_validate(
        {"name": name, "ready": message is None, "message": message}
    )


def _database(request: Request) -> str | None:
    try:
        revision = current_revision(wiring_of(request).engine)
    except StoreError as error:
        log.error("%s", error)
        return "cannot be reached; the log of the service says why"
    return None if revision == HEAD else at_revision(revision)
