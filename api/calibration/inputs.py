"""Inputs of calibrations: the runs and the timed kernels that the database holds."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from planner.api.calibration.read import in_use
from planner.api.input.belief import far_off
from planner.api.storage.job_records import ProbeRecord
from planner.api.storage.records import RunRow, Subject
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import Wiring
from planner.calibration.kernels import KernelShape, KernelTiming
from planner.calibration.own_runs import PricedRun, priced
from planner.calibration.plausible import implausible
from planner.calibration.update import KernelRun, learn_priced
from planner.cost.machine.knobs import Calibration
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.errors import NotFoundError, SpecError
from planner.estimates import Estimator
from planner.probes.campaign import ProbeRequest
from planner.specs.job import Job

log = logging.getLogger("planner.learning")


def learned_without(
    wiring: Wiring,
    job: Job,
    excluded: Collection[str],
    owner: str = "",
    *,
    until: datetime | None = None,
) -> tuple[Calibration | None, CalibrationRecord | None]:
    """(the calibration in use, fitted without these measurements; its record where it is new).

    A study counts its own measurements itself, so its calibration must not know them.
    """
    newest = in_use(wiring, job, owner, until)
    if newest is None:
        return None, None
    rows = wiring.calibrations.inputs(newest.subject, newest.software).runs
    if not any(row.id in excluded for row in rows):
        return from_document(newest.document), None
    then = newest.created_at
    others = [row for row in rows if row.id not in excluded and row.created_at <= then]
    kernels = kernel_runs_of(wiring, newest.subject, newest.software, until=then)
    calibration = learn_priced(shipped_calibration(), priced_runs(wiring, others), kernels)
    if calibration is shipped_calibration():
        return None, None
    return calibration, replace(
        newest,
        id=calibration.id,
        superseded_at=then,
        built_from=None,
        num_runs=len(others),
        document={**to_document(calibration), "runs": [run.id for run in others]},
    )


def priced_runs(wiring: Wiring, rows: Sequence[RunRow]) -> list[PricedRun]:
    """The runs as learning reads them; new ones are priced, and their prices stored.

    Impossible runs, and runs so far off that their owner is asked about them, are refused from now
    on and left out.
    """
    found: dict[str, PricedRun] = {}
    fresh = []
    for row in rows:
        known = row.priced and PricedRun.from_dict(
            row.priced, run_id=row.id, layout=row.layout, step_seconds=row.step_seconds
        )
        if known:
            found[row.id] = known
            continue
        try:
            run = wiring.measurements.get(row.id)
        except (NotFoundError, SpecError) as error:  # deleted since, or today's rules refuse it
            log.warning("%s is left out: %s", row.id, error)
            continue
        if reasons := implausible(run):
            wiring.measurements.refuse(run.id, "; ".join(reasons))
        else:
            fresh.append(run)
    typed = [run for run in fresh if not run.source.startswith("probe ")]
    asked = far_off(typed, Estimator())
    for run_id, question in asked.items():
        wiring.measurements.refuse(run_id, question)
    now = priced(shipped_calibration(), [run for run in fresh if run.id not in asked])
    if now:
        wiring.calibrations.keep({run.id: run.as_dict() for run in now})
    found |= {run.id: run for run in now}
    return [found[row.id] for row in rows if row.id in found]


def kernel_runs_of(
    wiring: Wiring,
    subject: Subject,
    software: Mapping[str, str],
    ids: Sequence[str] | None = None,
    *,
    until: datetime | None = None,
) -> list[KernelRun]:
    """Kernels timed for this trainer's jobs on this GPU, oldest first.

    Only under versions that do not contradict these.
    ids: of probes that timed kernels, newest first; where they are left out, all.
    """
    found = []
    ids = wiring.calibrations.inputs(subject).kernel_probes if ids is None else ids
    for probe in map(wiring.probes.get, reversed(ids)):
        late = until is not None and probe.finished_at is not None and probe.finished_at > until
        if late or not timed_rows(probe) or not agree(software_of(probe), software):
            continue
        job = job_of_kernels(probe)
        if job is not None and job.training.trainer == subject.trainer:
            found.append(KernelRun(job=job, timings=timings_of(probe)))
    return found


def kernel_probes(wiring: Wiring, gpu: str) -> list[ProbeRecord]:
    """The newest probes that timed kernels on this GPU, oldest first."""
    ids = wiring.calibrations.inputs(Subject(trainer="", gpu=gpu)).kernel_probes
    return [wiring.probes.get(one) for one in reversed(ids)]


def timings_of(probe: ProbeRecord) -> tuple[KernelTiming, ...]:
    return tuple(
        KernelTiming(shape=KernelShape.from_dict(row), seconds=float(row["seconds"]))
        for row in timed_rows(probe)
    )


def timed_rows(probe: ProbeRecord) -> list[Mapping[str, Any]]:
    """The rows of a probe's results that hold the time of a kernel."""
    return [
        row
        for result in probe.results
        for row in result["outcome"].get("timings") or ()
        if row["status"] == "ok"
    ]


def software_of(probe: ProbeRecord) -> dict[str, str]:
    """Versions under which kernels were timed; no trainer is among them."""
    return next((dict(row["software"]) for row in timed_rows(probe) if row.get("software")), {})


def agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether no version that both name differs; an imported run names few."""
    return all(other.get(name, version) == version for name, version in one.items())


def job_of_kernels(probe: ProbeRecord) -> Job | None:
    """The job whose kernels were timed; None where today's rules refuse the request."""
    try:
        return ProbeRequest.of_record(probe.request)[1]
    except SpecError as error:
        log.warning("kernels of %s are left out: %s", probe.id, error)
        return None
