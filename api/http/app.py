"""The FastAPI app, which `planner-cli serve` runs.

`uvicorn --factory planner.api.http.app:create_app` does too; then mind the address yourself.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module

import anyio
from fastapi import FastAPI

from planner.api.http import openapi, problems
from planner.api.http.lanes import open_lanes
from planner.api.http.metrics import Metrics, Noted
from planner.api.http.requests import limiters
from planner.api.http.routes import web
from planner.api.http.security import OwnSite, Rates
from planner.api.jobs.workers import ProbeWorkers, TaskWorkers
from planner.api.settings import Settings
from planner.api.wiring import Wiring, wire
from planner.errors import StoreError
from planner.version import VERSION

ABOUT = (
    "Finds the parallel layout that trains a large model fastest on a given cluster, and says how "
    "sure it is."
)


MODULES = tuple(
    import_module(f"planner.api.http.routes.{name}")
    for name in (
        *("plans", "charts", "jobs", "estimates", "simulations", "probes", "sweeps"),
        *("measurements", "catalog", "operations", "health", "web"),
    )
)


def create_app(settings: Settings | None = None, wiring: Wiring | None = None) -> FastAPI:
    """The service on these settings, or on the environment's. Raises SpecError for wrong ones."""
    outside = wiring or wire(settings)
    # a wrong setting stops the start, not the first request
    _ = outside.settings.keys, outside.settings.quotas_by_key, outside.engine

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.limiters = limiters()
        await anyio.to_thread.run_sync(_first_use, outside)
        app.state.probe_workers = ProbeWorkers(outside, outside.settings.probe_workers)
        app.state.task_workers = TaskWorkers(outside, outside.settings.task_workers)
        app.state.workers = (app.state.task_workers, app.state.probe_workers)
        for workers in reversed(app.state.workers):
            workers.start()
        yield
        app.state.stopping.set()
        for workers in app.state.workers:
            workers.halt()
        for workers in app.state.workers:
            await anyio.to_thread.run_sync(workers.stop)
        for lane in app.state.lanes.values():
            await anyio.to_thread.run_sync(lane.close)
        if "engine" in outside.__dict__:
            outside.engine.dispose()

    app = FastAPI(
        title="planner",
        version=VERSION,
        description=ABOUT,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from another host
        redoc_url=None,
    )
    app.state.wiring = outside
    app.state.refusals = {}
    app.state.lanes = open_lanes(outside.settings)  # their processes start with the first work
    app.state.metrics = Metrics(VERSION, outside, app.state.lanes.values())
    app.state.stopping = threading.Event()
    settings = outside.settings
    app.state.rates = Rates(settings.requests_per_second)
    app.add_middleware(OwnSite, names=settings.host_names, keys=bool(settings.keys))
    app.add_middleware(Noted, metrics=app.state.metrics)  # the last one is the first to see it
    problems.install(app)
    for module in MODULES:
        app.include_router(module.router)
    app.state.routes = [route for module in MODULES for route in module.router.routes]
    web.mount_files(app)
    openapi.install(app)
    return app


def _first_use(wiring: Wiring) -> None:
    """Creates a SQLite database at the start.

    A database that is down or not migrated shows in /readyz, and may come up later.
    """
    try:
        _ = wiring.store
    except StoreError as error:
        problems.log.warning("%s", error)
