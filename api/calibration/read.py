"""What the database says about calibrations: the newest, and the runs that they were made from."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from api.storage.records import CalibrationRecord, ProbeRecord, RunRow, Subject
from planner.calibration.kernels import KernelShape, KernelTiming
from planner.calibration.own_runs import PricedRun, priced
from planner.calibration.plausible import implausible
from planner.calibration.update import KernelRun, learn_priced
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.errors import NotFoundError, SpecError, StoreError
from probes.campaign import ProbeRequest

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job

log = logging.getLogger("planner.learning")


def learned(
    wiring: "Wiring", job: "Job", owner: str = "", *, until: datetime | None = None
) -> "Calibration | None":
    """The calibration in use of the job's trainer on its GPU; None for the shipped one.

    owner: whose own runs count besides the shared ones.
    until: the one in use then, so that work resumed after an interruption sees what it saw before.
    """
    record = _in_use(wiring, job, owner, until)
    return None if record is None else from_document(record.document)


def learned_without(
    wiring: "Wiring",
    job: "Job",
    excluded: Collection[str],
    owner: str = "",
    *,
    until: datetime | None = None,
) -> "tuple[Calibration | None, CalibrationRecord | None]":
    """(the calibration in use as it is without these measurements, its record where it is new).

    A study counts its own measurements itself, so its calibration must not know them. The record
    is one that was never in use.
    """
    newest = _in_use(wiring, job, owner, until)
    if newest is None:
        return None, None
    rows = wiring.learning.inputs(newest.subject, newest.software).runs
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
        document=to_document(calibration),
    )


def _in_use(
    wiring: "Wiring", job: "Job", owner: str, until: datetime | None
) -> CalibrationRecord | None:
    """The owner's record, or everyone's; only one that rests on what ships today."""
    trainer, gpu = job.training.trainer, job.cluster.gpu.name
    for whose in dict.fromkeys((owner, "")):
        subject = Subject(trainer=trainer, gpu=gpu, owner=whose)
        record = wiring.calibrations.latest(subject, until=until)
        if record is not None and rests_on_shipped(record):
            return record
    return None


def learned_by_gpu(wiring: "Wiring", owner: str) -> "dict[tuple[str, str], Calibration]":
    """All that `learned` answers to this owner, by trainer and GPU."""
    found: dict[tuple[str, str], Calibration] = {}
    for whose in ("", owner):
        for subject in wiring.calibrations.subjects(whose):
            record = wiring.calibrations.latest(subject)
            if record is not None and rests_on_shipped(record):
                found[subject.trainer, subject.gpu] = from_document(record.document)
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

    wiring: "Wiring"
    owner: str = ""
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
            return learned(self.wiring, job, self.owner)
        except StoreError as error:
            self.shipped_alone = str(error)
            return None


# ---- what calibrations are made from -------------------------------------------------------------


def priced_runs(wiring: "Wiring", rows: "Sequence[RunRow]") -> list[PricedRun]:
    """These runs as learning reads them. What was not priced yet is priced and kept.

    One that turns out to be impossible is refused from now on, and left out.
    """
    found: dict[str, PricedRun] = {}
    for row in rows:
        known = row.priced and PricedRun.from_dict(
            row.priced, run_id=row.id, layout=row.layout, step_seconds=row.step_seconds
        )
        if known:
            found[row.id] = known
    fresh = []
    for row in rows:
        if row.id in found:
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
    now = priced(shipped_calibration(), fresh)
    if now:
        wiring.learning.keep({run.id: run.as_dict() for run in now})
    found |= {run.id: run for run in now}
    return [found[row.id] for row in rows if row.id in found]


def kernel_runs_of(
    wiring: "Wiring",
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
    ids = wiring.learning.inputs(subject).kernel_probes if ids is None else ids
    for probe in map(wiring.probes.get, reversed(ids)):
        late = until is not None and probe.finished_at is not None and probe.finished_at > until
        if late or not timed_rows(probe) or not agree(software_of(probe), software):
            continue
        job = job_of_kernels(probe)
        if job is not None and job.training.trainer == subject.trainer:
            found.append(KernelRun(job=job, timings=timings_of(probe)))
    return found


def kernel_probes(wiring: "Wiring", gpu: str) -> list[ProbeRecord]:
    """The newest probes that timed kernels on this GPU, oldest first."""
    ids = wiring.learning.inputs(Subject(trainer="", gpu=gpu)).kernel_probes
    return [wiring.probes.get(one) for one in reversed(ids)]


def timings_of(probe: ProbeRecord) -> tuple[KernelTiming, ...]:
    """What a probe of kernels timed."""
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


def job_of_kernels(probe: ProbeRecord) -> "Job | None":
    """The job whose kernels were timed; None where today's rules refuse the request."""
    try:
        return ProbeRequest.from_user(probe.request, allow_files=False)[1]
    except SpecError as error:
        log.warning("kernels of %s are left out: %s", probe.id, error)
        return None
