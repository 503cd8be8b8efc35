"""GET /healthz, GET /readyz: open to everyone, because load balancers have no key."""

from fastapi import APIRouter, Request

from api.errors import NotReadyError
from api.http.requests import in_thread, wiring_of
from api.http.routes.parameters import problems
from api.http.schemas import Health, Readiness
from api.storage.migrate import HEAD, current_revision

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", responses=problems(503))
async def readyz(request: Request) -> Readiness:
    """The database can be reached and is migrated."""
    revision = await in_thread(request, lambda: current_revision(wiring_of(request).engine))
    if revision != HEAD:
        raise NotReadyError(
            f"the database is at revision {revision or 'none'}, not {HEAD}; run `planner-cli db "
            "upgrade`"
        )
    return Readiness(database_revision=revision)
