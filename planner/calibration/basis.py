"""The basis of an estimate: runs of this trainer on this kind of GPU, other runs, or none.

It is stated for each mechanism that a layout uses (`mechanisms`), from what the calibration's runs
used. So it follows from data alone: a run of one's own makes its mechanisms measured.
Letters: N layouts, U unmeasured mechanisms.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import numpy as np

from planner.calibration.kernel_doubt import measured_gpu
from planner.calibration.mechanisms import MECHANISMS, Mechanism, Setting, used_by
from planner.columns import BoolColumn, FloatColumn, LayoutBatch
from planner.cost.machine.knobs import Calibration
from planner.specs.estimate import Basis
from planner.specs.gpu_families import KERNEL_ROWS
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.trainers.registry import code_of

MEMORY = "memory"
# A prediction is this much less sure (standard deviation of its own error) if a mechanism that it
# uses was not measured with its trainer on its GPU family. Independent runs of kinds of stacks that
# no fitted run has were off twice as far as those of kinds that some had.
WIDER = 2.0

Seen = frozenset[tuple[str, str, str]]


def seen(jobs: Iterable[Job]) -> Seen:
    """(trainer, GPU family, mechanism) of measured runs.

    `memory` if a peak was measured; `kernel_doubt.measured_gpu` for the product itself.
    """
    found: set[tuple[str, str, str]] = set()
    for job in jobs:
        if job.layout is not None:
            found |= used_in(job, [job.layout])
            gpu = job.cluster.gpu
            found.add((code_of(job.training), gpu.family, measured_gpu(gpu)))
            if _has_peak(job):
                found.add((code_of(job.training), job.cluster.gpu.family, MEMORY))
    return frozenset(found)


def used_in(setting: Setting, layouts: Iterable[Layout]) -> Seen:
    """(trainer, GPU family, mechanism) of runs of these layouts."""
    trainer, family = code_of(setting.training), setting.cluster.gpu.family
    return frozenset(
        (trainer, family, one.name) for layout in layouts for one in used_by(layout, setting)
    )


def _has_peak(job: Job) -> bool:
    measured = job.labels.get("measured") or {}
    return any(measured.get(key) for key in ("peak_allocated_bytes", "peak_reserved_bytes"))


def basis(
    calibration: Calibration, setting: Setting, batch: LayoutBatch
) -> list[Mapping[str, Basis]]:
    """The basis of each mechanism that each of N layouts uses.

    calibrated: runs of this trainer on this GPU family used it; for a kernel of the GPU, which
        software does not change, runs of any trainer on the family.
    interpolated: other runs of this trainer or of this family used it; of a number format of
        fewer than 16 bits, of this family.
    extrapolated: neither used it.

    An unknown GPU family uses another family's kernels, so other runs show too little: there a
    mechanism is `extrapolated` until it is measured itself.
    """
    trainer, family = code_of(setting.training), setting.cluster.gpu.family
    stands = _stands(calibration.seen, trainer, family)
    if family not in KERNEL_ROWS:
        stands = {
            name: "calibrated" if kind == "calibrated" else "extrapolated"
            for name, kind in stands.items()
        }
    used = uses(batch, setting, MECHANISMS)
    alike, found = np.unique(used, axis=0, return_inverse=True)
    each = [
        {one.name: stands[one.name] for one, here in zip(MECHANISMS, row, strict=True) if here}
        for row in alike
    ]
    return [each[place] for place in found.ravel()]


def memory_basis(calibration: Calibration, trainer: str) -> Basis:
    """`calibrated` if peaks of this trainer were measured, else `interpolated`.

    torch allocates in the same way for all trainers.
    """
    measured = any(name == MEMORY and trainer == one for one, _, name in calibration.seen)
    return "calibrated" if measured else "interpolated"


def unmeasured_mechanisms(calibration: Calibration, setting: Setting) -> tuple[Mechanism, ...]:
    """`unseen_mechanisms` without what practitioners run in such a job (`Mechanism.practised`)."""
    return tuple(o for o in unseen_mechanisms(calibration, setting) if not o.practised(setting))


def unseen_mechanisms(calibration: Calibration, setting: Setting) -> tuple[Mechanism, ...]:
    """The U mechanisms that no run of this trainer and none on this GPU family used.

    Those that do not lead by themselves (`Mechanism.leads`) count where no run of this trainer on
    this family used them. They are the same for clusters of every size.
    """
    stands = _stands(calibration.seen, code_of(setting.training), setting.cluster.gpu.family)
    return tuple(
        one
        for one in MECHANISMS
        if stands[one.name] == "extrapolated" or not (one.leads or stands[one.name] == "calibrated")
    )


def unmeasured(batch: LayoutBatch, setting: Setting, calibration: Calibration) -> BoolColumn:
    return uses(batch, setting, unmeasured_mechanisms(calibration, setting))


def uses(batch: LayoutBatch, setting: Setting, mechanisms: Collection[Mechanism]) -> BoolColumn:
    """Which of these mechanisms each layout uses, one column for each."""
    found = np.zeros((len(batch), len(mechanisms)), dtype=np.bool_)
    for column, mechanism in enumerate(mechanisms):
        found[:, column] = mechanism.used(batch, setting)
    return found


def rests_on(layout: Layout, setting: Setting, calibration: Calibration) -> tuple[Mechanism, ...]:
    """The mechanisms of one layout that no run of this trainer and none on this family used."""
    lacking = unmeasured_mechanisms(calibration, setting)
    return tuple(mechanism for mechanism in used_by(layout, setting) if mechanism in lacking)


def widening(batch: LayoutBatch, setting: Setting, calibration: Calibration) -> FloatColumn:
    """Factor on the standard deviation of each layout's own error, (N,).

    1 where runs of this trainer on this GPU family used every mechanism of the layout, WIDER where
    one of them is not `calibrated`.
    """
    stands = _stands(calibration.seen, code_of(setting.training), setting.cluster.gpu.family)
    unsure = np.zeros(len(batch), dtype=np.bool_)
    for mechanism in MECHANISMS:
        if stands[mechanism.name] != "calibrated" and not unsure.all():
            unsure |= mechanism.used(batch, setting)
    return np.where(unsure, WIDER, 1.0)


@lru_cache(maxsize=256)
def _stands(measured: Seen, trainer: str, family: str) -> Mapping[str, Basis]:
    """The basis of every mechanism for one trainer on one GPU family, unknown ones as known."""
    found: dict[str, Basis] = dict.fromkeys((one.name for one in MECHANISMS), "extrapolated")
    of_gpu = {one.name for one in MECHANISMS if one.of_gpu}
    travel = {one.name for one in MECHANISMS if one.travels}
    for one_trainer, one_family, name in measured:
        if name in found and found[name] != "calibrated":
            if family == one_family and (trainer == one_trainer or name in of_gpu):
                found[name] = "calibrated"
            elif family == one_family or (trainer == one_trainer and name in travel):
                found[name] = "interpolated"
    return found
