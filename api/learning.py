"""What measurements teach: after each, the calibration of its trainer, GPU and software is made anew; plans ask for the newest."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from api.importing import all_of
from planner.calibration.learn import learn
from planner.catalog.calibrations import from_document, shipped_calibration, to_document
from planner.errors import PlannerError, StoreError
from planner.ports import CalibrationRecord, MeasurementFilter

if TYPE_CHECKING:
    from datetime import datetime

    from api.wiring import Wiring
    from planner.cost.calibration import Calibration
    from planner.specs.job import Job
    from planner.specs.measurement import Measurement

MOST_RUNS = 2000  # the newest that teach
log = logging.getLogger("planner.learning")


def learned(wiring: "Wiring", job: "Job", *, until: "datetime | None" = None) -> "Calibration | None":
    """The newest calibration of the job's trainer on its GPU that rests on the shipped one; None when nothing was learnt.

    until: what was learnt by then, so that work which goes on after an interruption sees what it saw at its start.
    """
    record = wiring.calibrations.latest(job.training.trainer, job.cluster.gpu.name, until=until)
    if record is None or not record.id.startswith(f"{shipped_calibration().id}+"):
        return None
    return from_document(record.document)


@dataclass
class Learnt:
    """What was learnt, job by job of a batch; each trainer and GPU is looked up once. shipped_alone: why, where the database cannot say."""

    wiring: "Wiring"
    shipped_alone: str | None = None
    _known: "dict[tuple[str, str], Calibration | None]" = field(default_factory=dict)

    def __call__(self, job: "Job") -> "Calibration | None":
        """Of the job's trainer on its GPU; None for the shipped one."""
        key = (job.training.trainer, job.cluster.gpu.name)
        if key not in self._known:
            self._known[key] = None if self.shipped_alone else self._found(job)
        return self._known[key]

    def _found(self, job: "Job") -> "Calibration | None":
        try:
            return learned(self.wiring, job)
        except StoreError as error:
            self.shipped_alone = str(error)
            return None


def teach(wiring: "Wiring", measurements: "Iterable[Measurement]") -> list[CalibrationRecord]:
    """Makes the calibration of every trainer, GPU and software among these measurements anew, and stores it. Returns the new ones."""
    touched = {(one.job.training.trainer, one.job.cluster.gpu.name, one.key().software_hash): one for one in measurements}
    made = []
    for (trainer, gpu, software_hash), sample in sorted(touched.items(), key=lambda item: item[0]):
        wanted = MeasurementFilter(gpu=gpu, software_hash=software_hash, status="ok")
        runs = [run for _, run in zip(range(MOST_RUNS), all_of(wiring, wanted), strict=False) if run.job.training.trainer == trainer]
        calibration = learn(shipped_calibration(), runs)
        if calibration is shipped_calibration():
            continue
        record = CalibrationRecord(
            id=calibration.id, created_at=wiring.clock.now(), trainer=trainer, gpu=gpu, software=dict(sample.software), num_runs=len(runs),
            document=to_document(calibration),
        )  # fmt: skip
        wiring.calibrations.save(record)
        made.append(record)
        log.info("calibration %s of %s on %s from %d runs", record.id, trainer, gpu, len(runs))
    return made


def teach_stored(wiring: "Wiring", ids: Sequence[str | None]) -> list[CalibrationRecord]:
    """Teaches what these stored measurements say (None: a probe without one). Where that fails they stay, and teach next time."""
    try:
        return teach(wiring, [wiring.measurements.get(one) for one in ids if one is not None])
    except PlannerError as error:
        log.warning("nothing was learnt: %s", error)
        return []


def words_of(record: CalibrationRecord) -> str:
    """One line about a new calibration."""
    return f"learnt: {record.id}, {record.trainer} on {record.gpu} from {record.num_runs} measurements; plans and estimates use it"
