"""Which calibration of the database is in use: the newest that rests on the shipped one."""

from dataclasses import dataclass, field
from datetime import datetime

from planner.api.storage.records import CalibrationRecord, Subject
from planner.api.wiring import Wiring
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import from_document, shipped_calibration
from planner.errors import StoreError
from planner.specs.job import Job


def learned(
    wiring: Wiring, job: Job, owner: str = "", *, until: datetime | None = None
) -> Calibration | None:
    """The calibration in use of the job's trainer on its GPU; None for the shipped one.

    owner: whose own runs count besides the shared ones.
    until: the one in use then, so that work resumed after an interruption sees what it saw before.
    """
    record = in_use(wiring, job, owner, until)
    return None if record is None else calibration_of(record)


def in_use(
    wiring: Wiring, job: Job, owner: str, until: datetime | None
) -> CalibrationRecord | None:
    """The owner's record, or everyone's; only one that rests on what ships today."""
    trainer, gpu = job.training.trainer, job.cluster.gpu.name
    for whose in dict.fromkeys((owner, "")):
        subject = Subject(trainer=trainer, gpu=gpu, owner=whose)
        record = wiring.calibrations.latest(subject, until=until)
        if record is not None and rests_on_shipped(record):
            return record
    return None


def calibration_of(record: CalibrationRecord) -> Calibration:
    return from_document(record.document)


def learned_by_gpu(wiring: Wiring, owner: str) -> dict[tuple[str, str], Calibration]:
    """All that `learned` answers to this owner, by trainer and GPU."""
    found: dict[tuple[str, str], Calibration] = {}
    for whose in ("", owner):
        for subject in wiring.calibrations.subjects(whose):
            record = wiring.calibrations.latest(subject)
            if record is not None and rests_on_shipped(record):
                found[subject.trainer, subject.gpu] = calibration_of(record)
    return found


def rests_on_shipped(record: CalibrationRecord) -> bool:
    """Whether a calibration was made from the one that ships today."""
    return record.id.startswith(f"{shipped_calibration().id}+")


@dataclass
class CalibrationLookup:
    """The learned calibration of each job of a batch; a trainer and GPU is looked up once.

    owner: see `learned`.
    shipped_alone: why only the shipped calibration is used, where the database gave no answer.
    """

    wiring: Wiring
    owner: str = ""
    shipped_alone: str | None = None
    _known: dict[tuple[str, str], Calibration | None] = field(default_factory=dict)

    def __call__(self, job: Job) -> Calibration | None:
        """The calibration for the job's trainer on its GPU; None for the shipped one."""
        key = (job.training.trainer, job.cluster.gpu.name)
        if key not in self._known:
            self._known[key] = None if self.shipped_alone else self._found(job)
        return self._known[key]

    def _found(self, job: Job) -> Calibration | None:
        try:
            return learned(self.wiring, job, self.owner)
        except StoreError as error:
            self.shipped_alone = str(error)
            return None
