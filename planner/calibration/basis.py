"""The basis of an estimate: runs of this trainer on this kind of GPU, other runs, or none."""

from collections.abc import Iterable, Mapping

from planner.cost.machine.knobs import Calibration
from planner.specs.estimate import Basis
from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import is_known_family
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec

AXES = ("tp", "cp", "pp", "ep")
MEMORY = "memory"


def features(model: ModelSpec, layout: Layout) -> Iterable[str]:
    """What a run exercises: compute and memory, precision, experts, the axes it splits over."""
    yield "compute"
    yield f"precision {layout.precision}"
    if model.num_experts:
        yield "experts"
    yield from (axis for axis in AXES if getattr(layout, axis) > 1)
    if layout.dp_shard * layout.cp > 1:
        yield "fsdp"
    if layout.dp_replicate > 1:
        yield "dp"


def seen(jobs: Iterable[Job]) -> frozenset[tuple[str, str, str]]:
    """(trainer, GPU family, feature) of measured runs; `memory` if a peak was measured."""
    return frozenset(
        (job.training.trainer, job.cluster.gpu.family, feature)
        for job in jobs
        if job.layout is not None
        for feature in (*features(job.model, job.layout), *([MEMORY] if _has_peak(job) else []))
    )


def _has_peak(job: Job) -> bool:
    measured = job.labels.get("measured") or {}
    return any(measured.get(key) for key in ("peak_allocated_bytes", "peak_reserved_bytes"))


def basis(
    calibration: Calibration, trainer: str, gpu: GpuSpec, model: ModelSpec, layout: Layout
) -> Mapping[str, Basis]:
    """The basis of each feature of a layout.

    calibrated: runs of this trainer on this GPU family had the feature.
    interpolated: other runs of this trainer or of this family had it.
    extrapolated: neither had it.

    An unknown GPU family uses another family's kernels, so other runs show too little: there a
    feature is `extrapolated` until it is measured itself.
    """
    found = {
        feature: _one(calibration, trainer, gpu.family, feature)
        for feature in features(model, layout)
    }
    if is_known_family(gpu.family):
        return found
    return {
        feature: "calibrated" if basis == "calibrated" else "extrapolated"
        for feature, basis in found.items()
    }


def memory_basis(calibration: Calibration, trainer: str) -> Basis:
    """`calibrated` if peaks of this trainer were measured, else `interpolated`.

    torch allocates in the same way for all trainers.
    """
    return (
        "calibrated"
        if any(name == MEMORY and trainer == one for one, _, name in calibration.seen)
        else "interpolated"
    )


def _one(calibration: Calibration, trainer: str, family: str, feature: str) -> Basis:
    where = {
        (one_trainer, one_family)
        for one_trainer, one_family, name in calibration.seen
        if name == feature
    }
    if (trainer, family) in where:
        return "calibrated"
    if any(trainer == one_trainer or family == one_family for one_trainer, one_family in where):
        return "interpolated"
    return "extrapolated"
