"""What measurements and timed kernels teach: after each, the calibration of its trainer, GPU and
software is made anew; plans ask for the newest.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from api.input.measurements import all_of
from planner.calibration.kernels import KernelShape, KernelTiming
from planner.calibration.update import KernelRun, learn
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.errors import PlannerError, SpecError, StoreError
from planner.ports import CalibrationRecord, MeasurementFilter, ProbeFilter, ProbeRecord
from planner.units import counted
from probes.campaign import ProbeRequest

if TYPE_CHECKING:
    from api.wiring import Wiring
    from planner.cost.machine.knobs import Calibration
    from planner.specs.job import Job
    from planner.specs.measurement import Measurement

MOST_RUNS = 2000  # the newest that teach
PROBE_PAGES, PAGE = 10, 200  # of the newest probes, among which timed kernels are sought
log = logging.getLogger("planner.learning")


def learned(
    wiring: "Wiring", job: "Job", *, until: datetime | None = None, without: Collection[str] = ()
) -> "Calibration | None":
    """The newest calibration of the job's trainer on its GPU that rests on the shipped one; None
    when nothing was learnt.

    until: what was learnt by then, so that work which goes on after an interruption sees what it
        saw at its start.
    without: ids of measurements that it shall not have learnt from, because they are counted
        elsewhere.
    """
    trainer, gpu = job.training.trainer, job.cluster.gpu.name
    record = wiring.calibrations.latest(trainer, gpu, until=until)
    if record is None or not record.id.startswith(f"{shipped_calibration().id}+"):
        return None
    runs = [
        run
        for run in _runs(wiring, trainer, gpu)
        if without and dict(run.software) == record.software
    ]
    if not any(run.id in without for run in runs):
        return from_document(record.document)
    then = record.created_at
    others = [run for run in runs if run.id not in without and _moment(run) <= then]
    calibration = learn(
        shipped_calibration(),
        others,
        _kernel_runs(wiring, trainer, gpu, record.software, until=then),
    )
    if calibration is shipped_calibration():
        return None
    # Stored, so that a plan's calibration is found by its id, but not as the newest.
    before = replace(
        record,
        id=calibration.id,
        created_at=then - timedelta(microseconds=1),
        num_runs=len(others),
        document=to_document(calibration),
    )
    wiring.calibrations.save(before)
    return calibration


def _moment(run: "Measurement") -> datetime:
    """When it was measured; in UTC where it does not say."""
    moment = datetime.fromisoformat(run.created_at)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass
class Learnt:
    """What was learnt, job by job of a batch; each trainer and GPU is looked up once.
    shipped_alone: why, where the database cannot say.
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


def teach(
    wiring: "Wiring",
    measurements: "Iterable[Measurement]" = (),
    kernels: Iterable[ProbeRecord] = (),
) -> list[CalibrationRecord]:
    """Makes the calibration of every trainer, GPU and software among these anew, and stores it.
    Returns the new ones.

    kernels: probes that timed kernels; they count for runs whose versions do not contradict theirs.
    Where all do, they wait for a run that does not; where there is no run, they make a calibration
    alone.
    """
    touched = {
        (one.job.training.trainer, one.job.cluster.gpu.name, one.key().software_hash): dict(
            one.software
        )
        for one in measurements
    }
    for probe in kernels:
        job = _job_of(probe)
        if job is None:
            continue
        trainer, gpu = job.training.trainer, probe.gpu
        runs = _runs(wiring, trainer, gpu)
        run = next((run for run in runs if _agree(_software(probe), run.software)), None)
        if run is not None or not runs:
            touched[trainer, gpu, run.key().software_hash if run else ""] = (
                dict(run.software) if run else _software(probe)
            )
    made = []
    for (trainer, gpu, software_hash), software in sorted(
        touched.items(), key=lambda item: item[0]
    ):
        runs = _runs(wiring, trainer, gpu, software_hash) if software_hash else []
        calibration = learn(
            shipped_calibration(), runs, _kernel_runs(wiring, trainer, gpu, software)
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


def _runs(
    wiring: "Wiring", trainer: str, gpu: str, software_hash: str | None = None
) -> "list[Measurement]":
    """The newest that teach, newest first."""
    wanted = MeasurementFilter(gpu=gpu, software_hash=software_hash, status="ok")
    return [
        run
        for _, run in zip(range(MOST_RUNS), all_of(wiring, wanted), strict=False)
        if run.job.training.trainer == trainer
    ]


def _kernel_runs(
    wiring: "Wiring",
    trainer: str,
    gpu: str,
    software: Mapping[str, str],
    *,
    until: datetime | None = None,
) -> list[KernelRun]:
    """Kernels timed for this trainer's jobs on this GPU under versions that do not contradict
    these, oldest first.
    """
    found = []
    for probe in kernel_probes(wiring, gpu):
        late = until is not None and probe.finished_at is not None and probe.finished_at > until
        if late or not _rows(probe) or not _agree(_software(probe), software):
            continue
        job = _job_of(probe)
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
        for row in _rows(probe)
    )


def _rows(probe: ProbeRecord) -> list[Mapping[str, Any]]:
    return [
        row
        for result in probe.results
        for row in result["outcome"].get("timings") or ()
        if row["status"] == "ok"
    ]


def _software(probe: ProbeRecord) -> dict[str, str]:
    """Versions under which kernels were timed; no trainer is among them."""
    return next((dict(row["software"]) for row in _rows(probe) if row.get("software")), {})


def _agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether no version that both name differs; an imported run names few."""
    return all(other.get(name, version) == version for name, version in one.items())


def _job_of(probe: ProbeRecord) -> "Job | None":
    """Whose kernels were timed; None where the request is none by today's rules."""
    try:
        return ProbeRequest.from_user(probe.request, allow_files=False)[1]
    except SpecError as error:
        log.warning("kernels of %s teach nothing: %s", probe.id, error)
        return None


def teach_stored(wiring: "Wiring", ids: Sequence[str]) -> list[CalibrationRecord]:
    """Teaches what these stored measurements say. Where that fails they stay, and teach next
    time.
    """
    return _attempt(lambda: teach(wiring, [wiring.measurements.get(one) for one in ids]))


def teach_ended(wiring: "Wiring", probes: Sequence[ProbeRecord]) -> list[CalibrationRecord]:
    """Teaches what these probes measured: a layout, kernels, or nothing. Where that fails it stays
    stored, and teaches next time.
    """
    ids = [probe.measurement_id for probe in probes if probe.measurement_id is not None]
    kernels = [probe for probe in probes if probe.request.get("kernels") and _rows(probe)]
    return _attempt(lambda: teach(wiring, [wiring.measurements.get(one) for one in ids], kernels))


def _attempt(teaching: Callable[[], list[CalibrationRecord]]) -> list[CalibrationRecord]:
    try:
        return teaching()
    except PlannerError as error:
        log.warning("nothing was learnt: %s", error)
        return []


def words_of(record: CalibrationRecord) -> str:
    """One line about a new calibration."""
    taught = counted(record.num_runs, "measurement") if record.num_runs else "timed kernels"
    return (
        f"learnt: {record.id}, {record.trainer} on {record.gpu} from {taught}; plans and "
        "estimates use it"
    )
