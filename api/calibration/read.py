"""Which calibration of the database is in use: the newest that rests on the shipped one."""

from datetime import datetime

from planner.api.storage.records import Subject
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import from_document, shipped_calibration
from planner.estimates import CalibrationOf
from planner.specs.job import Job

Learned = dict[tuple[str, str], Calibration]


def learned(
    wiring: Wiring, job: Job, owner: str = "", *, until: datetime | None = None
) -> Calibration | None:
    """The calibration in use of the job's trainer on its GPU; None for the shipped one.

    owner: whose own runs count besides the shared ones.
    until: the one in use then, so that resumed work goes on with the calibration it began with.
    """
    record = in_use(wiring, job, owner, until)
    return None if record is None else from_document(record.document)


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


def learned_by_gpu(wiring: Wiring, owner: str) -> Learned:
    """The calibration in use of each trainer and GPU, for this owner's plans."""
    found: Learned = {}
    for whose in ("", owner):
        for subject in wiring.calibrations.subjects(whose):
            record = wiring.calibrations.latest(subject)
            if record is not None and rests_on_shipped(record):
                found[subject.trainer, subject.gpu] = from_document(record.document)
    return found


def among(learnt: Learned) -> CalibrationOf:
    """The calibration for a job's trainer on its GPU; None for the shipped one."""
    return lambda job: learnt.get((job.training.trainer, job.cluster.gpu.name))


def rests_on_shipped(record: CalibrationRecord) -> bool:
    """Whether a calibration was made from the one that ships today."""
    return record.id.startswith(f"{shipped_calibration().id}+")
