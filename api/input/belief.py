"""Belief in measured numbers: impossible ones are refused, far ones asked about."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from planner.api.calibration.read import among, learned_by_gpu
from planner.api.wiring import Wiring
from planner.calibration.plausible import CLOCK_MARGIN, MEMORY_MARGIN, implausible
from planner.catalog.clusters import gpu_names
from planner.errors import ConflictError, PlannerError
from planner.estimates import Estimator
from planner.intake.machines import load_gpu, read_gpu
from planner.intake.measurements import with_catalogue_gpu
from planner.specs.gpu import GpuSpec
from planner.specs.job import Job
from planner.specs.measurement import Measurement

AHEAD = timedelta(days=1)  # by which the clock of who measured may be wrong
REASON_CHARACTERS = 1000
# Judgements: times beyond an interval twice as wide (in log) as that of 90%, which is what the
# model can explain; no published run is more than 2.5 times beyond the 90% one. The CPU pool's
# figures are of no particular machine.
FAR, FAR_ON_CPU = 10.0, 1000.0


def checked(measurement: Measurement, now: datetime) -> Measurement:
    """The measurement; refused, with the reason, where it cannot be true.

    Refused ones are kept and shown. They teach nothing and rank no plan.
    """
    return _refused(measurement, "; ".join(impossible(measurement, now)))


def _refused(measurement: Measurement, reason: str) -> Measurement:
    if not reason:
        return measurement
    return measurement.model_copy(update={"refused": reason[:REASON_CHARACTERS]})


def impossible(measurement: Measurement, now: datetime) -> list[str]:
    """Why these numbers cannot be true, whoever vouches for them."""
    job = measurement.job
    judged = measurement.model_copy(update={"job": with_catalogue_gpu(job)})
    reasons = implausible(judged)
    gpu = _claimed(job)
    if gpu.name in gpu_names():
        reasons += _not_as_known(gpu, load_gpu(gpu.name))
    measured_at = datetime.fromisoformat(measurement.created_at)
    if measured_at.tzinfo is not None and measured_at > now + AHEAD:
        reasons.append(f"it was measured in the future, at {measurement.created_at}")
    return reasons


def _claimed(job: Job) -> GpuSpec:
    """The GPU as the row describes it, which may not be the catalogue's of that name."""
    cluster = job.request.get("cluster")
    gpu = cluster.get("gpu") if isinstance(cluster, Mapping) else None
    return read_gpu(gpu) if isinstance(gpu, Mapping) else job.cluster.gpu


def _not_as_known(gpu: GpuSpec, known: GpuSpec) -> list[str]:
    """How the GPU in a row exceeds the catalogue's GPU of the same name."""
    more = [
        f"peak_flops.{dtype}"
        for dtype, peak in gpu.peak_flops_per_second.items()
        if peak > known.peak_flops_per_second.get(dtype, 0.0) * CLOCK_MARGIN
    ]
    if gpu.memory_bytes > known.memory_bytes * MEMORY_MARGIN:
        more.append("memory")
    return [f"its {gpu.name} has more {', '.join(more)} than the catalogue's"] if more else []


def checked_rows(
    wiring: Wiring, measurements: Sequence[Measurement], owner: str
) -> list[Measurement]:
    """Rows that somebody typed: refused where they cannot be true, or are too far off.

    Far off: neither the shipped calibration nor the owner's explains it, so the owner is asked. One
    that only the owner's explains is vouched for by that.
    """
    found = [checked(one, wiring.clock.now()) for one in measurements]
    questions = far_off(found, Estimator())
    again = [one for one in found if one.id in questions]
    learnt = learned_by_gpu(wiring, owner) if again else {}
    still = far_off(again, Estimator(among(learnt)))
    for index, one in enumerate(found):
        if one.id in still:
            found[index] = _refused(one, still[one.id])
        elif one.id in questions:
            found[index] = one.model_copy(update={"confirmed": owner})
    return found


def far_off(measurements: Sequence[Measurement], estimator: Estimator) -> dict[str, str]:
    """Questions about believed rows far outside their predicted interval, by id."""
    rows = [
        (one, seconds)
        for one in measurements
        if one.refused is None
        and one.confirmed is None
        and one.measured.rung != "emulated"  # its communication comes from the model
        and (seconds := one.step_seconds)
    ]
    found = {}
    answers = estimator.estimates([one.job for one, _ in rows])
    for (one, seconds), answer in zip(rows, answers, strict=True):
        if isinstance(answer, PlannerError) or not (answer.interval and answer.step_seconds):
            continue
        most = FAR_ON_CPU if one.job.cluster.gpu.vendor == "cpu" else FAR
        low, high = answer.interval.step_seconds
        predicted = answer.step_seconds
        if not low**2 / predicted / most <= seconds <= high**2 / predicted * most:
            found[one.id] = (
                f"a step of {seconds:.4g} s is {seconds / predicted:.3g} times the "
                f"{predicted:.4g} s that is predicted: is it in seconds, and of this job? "
                f"`planner-cli measurements believe {one.id}` says that it is"
            )
    return found


def believe(wiring: Wiring, measurement_id: str, by: str) -> Measurement:
    """Counts a measurement that was asked about, because `by` vouches for it.

    Raises NotFoundError, and ConflictError for numbers that cannot be true.
    """
    found = wiring.measurements.get(measurement_id)
    if reasons := impossible(found, wiring.clock.now()):
        raise ConflictError(
            f"measurement {measurement_id} cannot be true: {'; '.join(reasons)}; delete it, and "
            "import the row with what was measured"
        )
    wiring.measurements.believe(measurement_id, by)
    return wiring.measurements.get(measurement_id)
