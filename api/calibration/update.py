"""Updating calibrations, after every measurement and every timed kernel, and undoing them.

The calibration of a trainer on a GPU is made anew from the runs that the database holds of it, and
taken into use if the database still holds the same ones then. Runs that are not shared make a
calibration of their owner's besides.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from planner.api.calibration.inputs import (
    job_of_kernels,
    kernel_probes,
    kernel_runs_of,
    learned_without,
    priced_runs,
    software_of,
    timed_rows,
)
from planner.api.storage.job_records import ProbeRecord
from planner.api.storage.records import LearningInputs, Subject
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring
from planner.calibration.update import learn_priced
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import shipped_calibration, to_document
from planner.errors import ConflictError, PlannerError
from planner.specs.job import Job
from planner.specs.measurement import Measurement
from planner.units import counted

# to make a calibration while others store runs; each of them updates it too, so the last succeeds
MOST_ATTEMPTS = 20
OWNER_DIGITS = 8
log = logging.getLogger("planner.learning")


def calibration_for_study(
    wiring: Wiring, job: Job, excluded: Collection[str], owner: str, *, until: datetime | None
) -> Calibration | None:
    """Stores the result of `learned_without`, so that the plan's calibration is found by its id."""
    calibration, record = learned_without(wiring, job, excluded, owner, until=until)
    if record is not None:
        wiring.calibrations.save(record)
    return calibration


def all_measured(wiring: Wiring, gpu: str | None) -> list[tuple[str, str]]:
    """(trainer, GPU) of all runs and timed kernels; of one GPU where it is named."""
    found = set(wiring.calibrations.measured(gpu))
    for timed in wiring.calibrations.timed_gpus(gpu):
        jobs = map(job_of_kernels, kernel_probes(wiring, timed))
        found |= {(job.training.trainer, timed) for job in jobs if job is not None}
    return sorted(found)


def update_calibrations(
    wiring: Wiring, about: Iterable[tuple[str, str]], *, anew: bool = False
) -> list[CalibrationRecord]:
    """Updates the calibrations of these (trainer, GPU) pairs and returns the new ones.

    Each pair has one calibration for everyone and one for every owner of unshared runs.
    anew: whether to make calibrations again that are up to date.
    """
    made = []
    for trainer, gpu in sorted(set(about)):
        for owner in ("", *wiring.calibrations.owners(trainer, gpu)):
            subject = Subject(trainer=trainer, gpu=gpu, owner=owner)
            with wiring.teaching.turn(subject) as ours:
                record = _update(wiring, subject, anew) if ours else None
            if record is not None:
                made.append(record)
    return made


def _update(wiring: Wiring, subject: Subject, anew: bool) -> CalibrationRecord | None:
    """The subject's new calibration, in use; None where it stays, or where it has none."""
    for _ in range(MOST_ATTEMPTS):
        inputs = wiring.calibrations.inputs(subject)
        before = wiring.calibrations.latest(subject)
        if before is not None and before.built_from == inputs.digest and not anew:
            return None
        record = _made(wiring, subject, inputs)
        if record is None and before is None:
            return None
        if not wiring.calibrations.put_in_use(subject, record, inputs, wiring.clock.now()):
            continue  # others have stored or deleted runs meanwhile
        if record is not None and before is not None and record.id == before.id and not anew:
            return None
        about = f"{subject.trainer} on {subject.gpu}"
        if record is None:
            log.info("%s has nothing to learn from any more", about)
        else:
            log.info("calibration %s of %s from %d runs", record.id, about, record.num_runs)
        return record
    log.warning("the runs of %s change too fast to learn from; the next one tries again", subject)
    return None


def _made(wiring: Wiring, subject: Subject, inputs: LearningInputs) -> CalibrationRecord | None:
    """A calibration from these runs and kernels; None where there is nothing to learn from.

    Kernels count beside runs of versions that do not contradict theirs, and where there is no run.
    """
    software = inputs.software
    if not inputs.runs:
        if subject.owner:  # everyone's serves as well
            return None
        software = _software_of_kernels(wiring, subject, inputs.kernel_probes)
    runs = priced_runs(wiring, inputs.runs)
    kernels = kernel_runs_of(wiring, subject, software, inputs.kernel_probes)
    calibration = learn_priced(shipped_calibration(), runs, kernels)
    if calibration is shipped_calibration():
        return None
    calibration = replace(calibration, stale=inputs.stale)
    if subject.owner:  # the same runs may be everyone's later
        whose = hashlib.sha256(subject.owner.encode()).hexdigest()[:OWNER_DIGITS]
        calibration = replace(calibration, id=f"{calibration.id}-{whose}")
    return CalibrationRecord(
        id=calibration.id,
        created_at=wiring.clock.now(),
        trainer=subject.trainer,
        gpu=subject.gpu,
        owner=subject.owner,
        software=dict(software),
        num_runs=len(runs),
        document={**to_document(calibration), "runs": [run.id for run in runs]},
        built_from=inputs.digest,
    )


def _software_of_kernels(wiring: Wiring, subject: Subject, ids: Sequence[str]) -> dict[str, str]:
    """Software of the newest kernels that were timed for this trainer."""
    for probe in map(wiring.probes.get, ids):
        job = job_of_kernels(probe) if timed_rows(probe) else None
        if job is not None and job.training.trainer == subject.trainer:
            return software_of(probe)
    return {}


def update_from_measurements(
    wiring: Wiring, measurements: Iterable[Measurement]
) -> list[CalibrationRecord]:
    """Updates the calibrations that these measurements, newly stored or shared, change.

    Where that fails they count the next time.
    """
    return update_about(
        wiring, [(one.job.training.trainer, one.job.cluster.gpu.name) for one in measurements]
    )


def update_from_probes(wiring: Wiring, probes: Sequence[ProbeRecord]) -> list[CalibrationRecord]:
    """Updates the calibrations that these ended probes teach."""
    about = []
    for probe in probes:
        timed = bool(probe.request.get("kernels")) and bool(timed_rows(probe))
        if timed or probe.measurement_id is not None:
            job = job_of_kernels(probe)
            if job is not None:
                about.append((job.training.trainer, probe.gpu))
    return update_about(wiring, about)


def update_about(wiring: Wiring, about: Iterable[tuple[str, str]]) -> list[CalibrationRecord]:
    """Updates calibrations of these (trainer, GPU) after runs were stored, shared or deleted."""
    try:
        return update_calibrations(wiring, about)
    except PlannerError as error:
        log.warning("no calibration was updated: %s", error)
        return []


def line_about(record: CalibrationRecord) -> str:
    made_from = counted(record.num_runs, "measurement") if record.num_runs else "timed kernels"
    return (
        f"learned: {record.id}, {record.trainer} on {record.gpu} from {made_from}; plans and "
        "estimates use it"
    )


def runs_of(record: CalibrationRecord | None) -> frozenset[str]:
    """Ids of the measurements that a calibration rests on; none for None.

    Raises ConflictError for a calibration of a version that did not store them.
    """
    if record is None:
        return frozenset()
    if "runs" not in record.document:
        raise ConflictError(
            f"calibration {record.id} was made by an earlier version, which did not write down its "
            "runs; delete the runs that mislead it with `planner-cli measurements delete`"
        )
    return frozenset(record.document["runs"])


def revert(
    wiring: Wiring, calibration_id: str, by: str
) -> tuple[Sequence[str], Sequence[CalibrationRecord]]:
    """Undoes a calibration and later ones; returns (runs left out, calibrations made anew).

    Every run is left out that the calibration before it does not rest on. Equal runs give equal
    calibrations, so the one before is in use again, unless its runs were deleted or kernels timed
    since. Raises NotFoundError, ConflictError.
    """
    record = wiring.calibrations.get(calibration_id)
    runs = runs_of(wiring.calibrations.before(record))
    reason = (
        f"left out by {by}, who reverted {calibration_id}; `planner-cli measurements believe ID` "
        "counts it again"
    )
    left: list[str] = []
    # under other versions of the software there may be older runs, which were none of that one's
    while found := [one.id for one in wiring.calibrations.inputs(record.subject).runs]:
        newer = [one for one in found if one not in runs]
        for one in newer:
            wiring.measurements.refuse(one, reason)
        left += newer
        if not newer:
            break
    return left, update_calibrations(wiring, [(record.trainer, record.gpu)])
