"""What a plan reads of the database, and leaves there.

A command that makes one plan lets a copy of its process do both on a second core. The copy is made
before anything is imported: it imports SQLAlchemy and opens the database while the command reads
the job and imports the search.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from api.storage.records import PlanLabels
    from api.wiring import Wiring
    from planner.beside import OtherCore, Partner, Piece
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job
    from planner.specs.plan import Plan


class PlanRecords(Protocol):
    """The database as a plan needs it."""

    def learned(self, job: "Job", owner: str) -> "Calibration | None":
        """What was learnt for the job; None for the shipped calibration. Raises StoreError."""
        ...

    def save(self, plan: "Plan", labels: "PlanLabels") -> None:
        """Stores a plan. Raises StoreError."""
        ...


@dataclass(slots=True)
class RecordsHere:
    """The database of this process.

    wiring: made from this process's settings unless given.
    """

    wiring: "Wiring | None" = None

    def _wired(self) -> "Wiring":
        if self.wiring is None:
            from api.wiring import wire

            self.wiring = wire()
        return self.wiring

    def get_ready(self) -> None:
        """Imports what the database needs, and touches nothing of it."""
        import api.calibration.read
        import api.storage.calibrations
        import api.storage.migrate
        import api.storage.store
        import api.wiring  # noqa: F401

    def learned(self, job: "Job", owner: str) -> "Calibration | None":
        """See `PlanRecords`."""
        wiring = self._wired()
        _ = wiring.store
        from api.calibration.read import learned

        return learned(wiring, job, owner)

    def save(self, plan: "Plan", labels: "PlanLabels") -> None:
        """See `PlanRecords`."""
        self._wired().store.save_plan(plan, labels)


@dataclass(frozen=True, slots=True)
class RecordsBeside:
    """The database as a copy of this process sees it, once that is ready."""

    partner: "Partner"
    ready: "Piece"

    def learned(self, job: "Job", owner: str) -> "Calibration | None":
        """See `PlanRecords`."""
        import planner.plan.recommend  # noqa: F401  while the copy gets ready

        self.ready.result()
        found = self.partner.start(RecordsHere.learned, job, owner).result()
        return cast("Calibration | None", found)

    def save(self, plan: "Plan", labels: "PlanLabels") -> None:
        """See `PlanRecords`."""
        self.partner.start(RecordsHere.save, plan, labels).result()


@contextmanager
def plan_records(
    core: "OtherCore | None", wiring: "Wiring | None" = None
) -> "Iterator[PlanRecords]":
    """The database for one plan, on a second core where there is one.

    wiring: made from the settings of the process that opens the database unless given.
    """
    here = RecordsHere(wiring)
    partner = None if core is None else core.partner(here)
    if partner is None:
        yield here
        return
    try:
        yield RecordsBeside(partner, partner.start(RecordsHere.get_ready))
    finally:
        partner.stop()
