"""Updating calibrations: after every measurement and every timed kernel.

The calibration of its trainer, GPU and software is made anew and stored; plans use the newest.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from api.calibration.read import (
    agree,
    job_of_kernels,
    kernel_runs_of,
    learned_without,
    runs_of,
    software_of,
    timed_rows,
)
from api.storage.records import CalibrationRecord, ProbeRecord
from planner.calibration.update import learn
from planner.cost.machine.shipped import shipped_calibration, to_document
from planner.errors import PlannerError
from planner.units import counted

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job
    from planner.specs.measurement import Measurement

log = logging.getLogger("planner.learning")


def calibration_for_study(
    wiring: "Wiring", job: "Job", excluded: Collection[str], *, until: datetime | None
) -> "Calibration | None":
    """What `learned_without` gives, stored, so that the plan's calibration is found by its id."""
    calibration, record = learned_without(wiring, job, excluded, until=until)
    if record is not None:
        wiring.calibrations.save(record)
    return calibration


def update_calibrations(
    wiring: "Wiring",
    measurements: "Iterable[Measurement]" = (),
    kernels: Iterable[ProbeRecord] = (),
) -> list[CalibrationRecord]:
    """Makes and stores the calibration of every trainer, GPU and software among these.

    Returns the new ones.

    kernels: probes that timed kernels. They count for runs whose versions do not contradict
        theirs; where all do, they wait for a run that does not; where there is no run, they make
        a calibration alone.
    """
    updated = {
        (one.job.training.trainer, one.job.cluster.gpu.name, one.key().software_hash): dict(
            one.software
        )
        for one in measurements
    }
    for probe in kernels:
        job = job_of_kernels(probe)
        if job is None:
            continue
        trainer, gpu = job.training.trainer, probe.gpu
        runs = runs_of(wiring, trainer, gpu)
        run = next((run for run in runs if agree(software_of(probe), run.software)), None)
        if run is not None:
            updated[trainer, gpu, run.key().software_hash] = dict(run.software)
        elif not runs:
            updated[trainer, gpu, ""] = software_of(probe)
    made = []
    for (trainer, gpu, software_hash), software in sorted(
        updated.items(), key=lambda item: item[0]
    ):
        runs = runs_of(wiring, trainer, gpu, software_hash) if software_hash else []
        calibration = learn(
            shipped_calibration(), runs, kernel_runs_of(wiring, trainer, gpu, software)
        )
        if calibration is shipped_calibration():
            continue
        record = CalibrationRecord(
            id=calibration.id,
            created_at=wiring.clock.now(),
            trainer=trainer,
            gpu=gpu,
            software=software,
            num_runs=len(runs),
            document=to_document(calibration),
        )
        wiring.calibrations.save(record)
        made.append(record)
        log.info("calibration %s of %s on %s from %d runs", record.id, trainer, gpu, len(runs))
    return made


def update_from_measurements(wiring: "Wiring", ids: Sequence[str]) -> list[CalibrationRecord]:
    """The calibrations made from these stored measurements, and stored.

    Where that fails the measurements stay, and count the next time.
    """
    return _attempt(
        lambda: update_calibrations(wiring, [wiring.measurements.get(one) for one in ids])
    )


def update_from_probes(wiring: "Wiring", probes: Sequence[ProbeRecord]) -> list[CalibrationRecord]:
    """The calibrations made from what these ended probes measured, and stored.

    Where that fails the results stay stored, and count the next time.
    """
    ids = [probe.measurement_id for probe in probes if probe.measurement_id is not None]
    kernels = [probe for probe in probes if probe.request.get("kernels") and timed_rows(probe)]
    return _attempt(
        lambda: update_calibrations(wiring, [wiring.measurements.get(one) for one in ids], kernels)
    )


def _attempt(update: Callable[[], list[CalibrationRecord]]) -> list[CalibrationRecord]:
    try:
        return update()
    except PlannerError as error:
        log.warning("no calibration was updated: %s", error)
        return []


def line_about(record: CalibrationRecord) -> str:
    """One line about a new calibration."""
    made_from = counted(record.num_runs, "measurement") if record.num_runs else "timed kernels"
    return (
        f"learned: {record.id}, {record.trainer} on {record.gpu} from {made_from}; plans and "
        "estimates use it"
    )
