"""What a plan reads of the database, and leaves there.

A command that makes one plan lets a copy of its process do both on a second core. The copy is made
before anything but pydantic is imported: it imports SQLAlchemy and opens the database while the
command reads the job and imports the search.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from api.storage.plan_values import PlanValues

if TYPE_CHECKING:
    from api.storage.plan_values import PlanLabels
    from api.storage.records import CalibrationRecord
    from api.wiring import Wiring
    from planner.beside import OtherCore, Partner
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job
    from planner.specs.plan import Plan


class PlanRecords(Protocol):
    """The database as a plan needs it."""

    def learned(
        self, job: "Job", owner: str, meanwhile: Callable[[], object] = lambda: None
    ) -> "Calibration | None":
        """What was learnt for the job; None for the shipped calibration. Raises StoreError.

        meanwhile: called if the answer is waited for.
        """
        ...

    def save(self, plan: "Plan", labels: "PlanLabels") -> Callable[[], object]:
        """Stores a plan, or begins to; what is returned waits until it is there.

        Both raise StoreError.
        """
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
        """Imports what it takes to read calibrations, and touches nothing of the database."""
        import api.calibration.read
        import api.storage.calibrations
        import api.storage.migrate
        import api.wiring  # noqa: F401

    def get_ready_to_save(self) -> None:
        """Imports what it takes to store a plan; the command waits for none of it at its end."""
        from sqlalchemy.orm import configure_mappers

        import api.storage.store  # noqa: F401

        configure_mappers()

    def learned(
        self, job: "Job", owner: str, meanwhile: Callable[[], object] = lambda: None
    ) -> "Calibration | None":
        """See `PlanRecords`; nothing is waited for."""
        wiring = self._wired()
        _ = wiring.store
        from api.calibration.read import learned

        return learned(wiring, job, owner)

    def in_use(self, trainer: str, gpu: str, owner: str) -> "list[CalibrationRecord]":
        """The calibrations that may count. Raises StoreError."""
        from api.calibration.read import subjects_of
        from api.storage.calibrations import latest_calibration

        engine = self._wired().current_engine
        found = [latest_calibration(engine, one) for one in subjects_of(trainer, gpu, owner)]
        return [record for record in found if record is not None]

    def save(self, plan: "Plan", labels: "PlanLabels") -> Callable[[], object]:
        """See `PlanRecords`; nothing is waited for."""
        self._wired().store.save_plan(plan, labels)
        return lambda: None

    def save_values(self, values: PlanValues) -> None:
        """Stores a plan. Raises StoreError."""
        self._wired().store.save_values(values)


@dataclass(frozen=True, slots=True)
class RecordsBeside:
    """The database as a copy of this process sees it, which knows nothing of planning."""

    partner: "Partner"

    def learned(
        self, job: "Job", owner: str, meanwhile: Callable[[], object] = lambda: None
    ) -> "Calibration | None":
        """See `PlanRecords`."""
        asked = (job.training.trainer, job.cluster.gpu.name, owner)
        piece = self.partner.start(RecordsHere.in_use, *asked)
        self.partner.start(RecordsHere.get_ready_to_save)
        meanwhile()
        records = cast("list[CalibrationRecord]", piece.result())
        if not records:
            return None
        from api.calibration.read import calibration_of, first_resting

        record = first_resting(records)
        return None if record is None else calibration_of(record)

    def save(self, plan: "Plan", labels: "PlanLabels") -> Callable[[], object]:
        """See `PlanRecords`."""
        return self.partner.start(RecordsHere.save_values, PlanValues.of(plan, labels)).result


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
        partner.start(RecordsHere.get_ready)
        yield RecordsBeside(partner)
    finally:
        partner.stop()
