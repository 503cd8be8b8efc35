"""The outside world of the planner: the system clock, random ids, SQL stores, pools."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Engine

from planner.api.identity import TimeOrderedIds
from planner.api.settings import Settings, load_settings
from planner.api.storage.audit import SqlAuditTrail
from planner.api.storage.calibrations import SqlCalibrationStore
from planner.api.storage.engine import Limits, make_engine, normalise_url
from planner.api.storage.idempotency import IdempotencyStore
from planner.api.storage.measurements import SqlMeasurementStore
from planner.api.storage.migrate import ensure_current
from planner.api.storage.own_entries import SqlOwnEntries
from planner.api.storage.store import SqlStore
from planner.api.storage.sweeps import SqlDriftStore, SqlQuarantine, SqlSweepStore
from planner.api.storage.tasks import SqlProbeStore, SqlTaskStore
from planner.api.turns import Turns
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.pipeline.recently_used import RecentlyUsed
from planner.probes.launch import LaunchSettings
from planner.probes.pools import open_pool
from planner.probes.pools.protocol import Pool, PoolSettings
from planner.probes.pools.slurm_options import SlurmOptions
from planner.specs.plan import Plan
from planner.units import GIB
from planner.version import MODEL_VERSION

MOST_ANSWERED = 64
Store = TypeVar("Store")
Question = tuple[str, str]  # hash of the job, id of the calibration


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)


def _on_engine(make: Callable[[Engine], Store]) -> "cached_property[Store]":
    """A store of a Wiring, on a database that is at the right revision. Raises StoreError."""
    return cached_property(lambda wiring: make(wiring.current_engine))


@dataclass
class Wiring:
    """Everything outside the planner, made when first asked for."""

    settings: Settings
    clock: SystemClock
    ids: TimeOrderedIds

    @cached_property
    def answered(self) -> RecentlyUsed[Question, Plan]:
        """Plans on paper that this process made; they depend only on job and calibration."""
        return RecentlyUsed(MOST_ANSWERED)

    @cached_property
    def engine(self) -> Engine:
        """The database of the settings, not yet checked. Raises SpecError for a wrong URL."""
        settings = self.settings
        limits = Limits(settings.database_timeout_seconds, settings.database_connections)
        return make_engine(normalise_url(settings.database_url), limits)

    @cached_property
    def current_engine(self) -> Engine:
        """The engine, of a database that is at the right revision. Raises StoreError."""
        ensure_current(self.engine)
        return self.engine

    store = _on_engine(SqlStore)
    idempotency = _on_engine(IdempotencyStore)
    measurements = _on_engine(SqlMeasurementStore)
    probes = _on_engine(SqlProbeStore)
    tasks = _on_engine(SqlTaskStore)
    sweeps = _on_engine(SqlSweepStore)
    quarantine = _on_engine(SqlQuarantine)
    audit = _on_engine(SqlAuditTrail)
    own_entries = _on_engine(SqlOwnEntries)
    drift = _on_engine(SqlDriftStore)
    calibrations = _on_engine(lambda engine: SqlCalibrationStore(engine, learning_basis()))

    @cached_property
    def teaching(self) -> Turns:
        """Whose turn it is to update a calibration."""
        return Turns()

    def pool(self, name: str, *, files: bool = True) -> Pool:
        """The pool of this name, as `planner.probes.pools` registers it.

        files: whether a pool may read a file of this machine. Raises SpecError, ProbeError.
        """
        chosen = self.settings
        launch = LaunchSettings(
            folder=chosen.probe_folder,
            python=chosen.probe_python,
            worker=chosen.probe_program,
            tolerated_bytes=chosen.probe_tolerated_gib * GIB,
            inherit=tuple(chosen.probe_environment.replace(",", " ").split()),
        )
        given = {one.name: getattr(chosen, f"slurm_{one.name}") for one in fields(SlurmOptions)}
        unset: dict[str, Any] = {name: None if one == "" else one for name, one in given.items()}
        slurm = SlurmOptions(**unset)
        settings = PoolSettings(launch=launch, leases=chosen.lease_folder, slurm=slurm)
        return open_pool(name, settings, files=files)


def learning_basis() -> str:
    """Basis of the prices of stored runs besides the run: the model and its shipped knobs."""
    return f"{MODEL_VERSION} {shipped_calibration().id}"


def wire(settings: Settings | None = None) -> Wiring:
    """The real outside world. Raises SpecError for a wrong setting."""
    return Wiring(settings=settings or load_settings(), clock=SystemClock(), ids=TimeOrderedIds())
