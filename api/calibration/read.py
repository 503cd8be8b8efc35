"""What the database says about calibrations: the newest, and the runs that they were made from."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from api.input.measurements import all_of
from api.storage.records import CalibrationRecord, MeasurementFilter, ProbeFilter, ProbeRecord
from planner.calibration.kernels import KernelShape, KernelTiming
from planner.calibration.update import KernelRun, learn
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.errors import SpecError, StoreError
from probes.campaign import ProbeRequest

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job
    from planner.specs.measurement import Measurement

MOST_RUNS = 2000  # newest measurements that a calibration is made from
PROBE_PAGES, PAGE = 10, 200  # of the newest probes, among which timed kernels are sought
log = logging.getLogger("planner.learning")


def learned(wiring: "Wiring", job: "Job", *, until: datetime | None = None) -> "Calibration | None":
    """The newest calibration of the job's trainer on its GPU; None for the shipped one.

    until: the newest of then, so that work resumed after an interruption sees what it saw before.
    """
    record = _newest(wiring, job, until)
    return None if record is None else from_document(record.document)


def learned_without(
    wiring: "Wiring", job: "Job", excluded: Collection[str], *, until: datetime | None = None
) -> "tuple[Calibration | None, CalibrationRecord | None]":
    """(the newest calibration as it is without these measurements, its record where it is new).

    A study counts its own measurements itself, so its calibration must not know them. The record
    is dated just before the newest, which stays the newest when this one is stored.
    """
    newest = _newest(wiring, job, until)
    if newest is None:
        return None, None
    trainer, gpu = newest.trainer, newest.gpu
    runs = [run for run in runs_of(wiring, trainer, gpu) if dict(run.software) == newest.software]
    if not any(run.id in excluded for run in runs):
        return from_document(newest.document), None
    then = newest.created_at
    others = [run for run in runs if run.id not in excluded and _measured_at(run) <= then]
    kernels = kernel_runs_of(wiring, trainer, gpu, newest.software, until=then)
    calibration = learn(shipped_calibration(), others, kernels)
    if calibration is shipped_calibration():
        return None, None
    return calibration, replace(
        newest,
        id=calibration.id,
        created_at=then - timedelta(microseconds=1),
        num_runs=len(others),
        document=to_document(calibration),
    )


def _newest(wiring: "Wiring", job: "Job", until: datetime | None) -> CalibrationRecord | None:
    """The newest record that rests on the calibration that ships today."""
    record = wiring.calibrations.latest(job.training.trainer, job.cluster.gpu.name, until=until)
    return record if record is not None and rests_on_shipped(record) else None


def rests_on_shipped(record: CalibrationRecord) -> bool:
    """Whether a calibration was made from the one that ships today."""
    return record.id.startswith(f"{shipped_calibration().id}+")


@dataclass
class CalibrationLookup:
    """The learned calibration of each job of a batch; a trainer and GPU is looked up once.

    shipped_alone: why only the shipped calibration is used, where the database gave no answer.
    """

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


# ---- what calibrations are made from -------------------------------------------------------------


def runs_of(
    wiring: "Wiring", trainer: str, gpu: str, software_hash: str | None = None
) -> "list[Measurement]":
    """The newest MOST_RUNS measured runs of this trainer on this GPU, newest first."""
    wanted = MeasurementFilter(gpu=gpu, software_hash=software_hash, status="ok")
    return [
        run
        for _, run in zip(range(MOST_RUNS), all_of(wiring, wanted), strict=False)
        if run.job.training.trainer == trainer
    ]


def _measured_at(run: "Measurement") -> datetime:
    """When it was measured; in UTC where it does not say."""
    moment = datetime.fromisoformat(run.created_at)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def kernel_runs_of(
    wiring: "Wiring",
    trainer: str,
    gpu: str,
    software: Mapping[str, str],
    *,
    until: datetime | None = None,
) -> list[KernelRun]:
    """Kernels timed for this trainer's jobs on this GPU, oldest first.

    Only under versions that do not contradict these.
    """
    found = []
    for probe in kernel_probes(wiring, gpu):
        late = until is not None and probe.finished_at is not None and probe.finished_at > until
        if late or not timed_rows(probe) or not agree(software_of(probe), software):
            continue
        job = job_of_kernels(probe)
        if job is not None and job.training.trainer == trainer:
            found.append(KernelRun(job=job, timings=timings_of(probe)))
    return found


def kernel_probes(wiring: "Wiring", gpu: str | None) -> list[ProbeRecord]:
    """Probes that timed kernels, on this GPU where one is named, oldest first."""
    found: list[ProbeRecord] = []
    cursor = None
    for _ in range(PROBE_PAGES):
        page = wiring.probes.list(ProbeFilter(gpu=gpu, state="done"), cursor, PAGE)
        found += [probe for probe in page.items if probe.request.get("kernels")]
        cursor = page.next_cursor
        if cursor is None:
            break
    return found[::-1]


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
