"""Undoing calibrations: the runs that they added are left out, and learning begins anew."""

from collections.abc import Sequence

from planner.api.calibration.update import update_calibrations
from planner.api.storage.records import CalibrationRecord
from planner.api.wiring import Wiring
from planner.errors import ConflictError


def runs_of(record: CalibrationRecord | None) -> frozenset[str]:
    """Ids of the measurements that it rests on. Raises ConflictError where nobody wrote them down.

    None: a subject without a calibration.
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
    """Undoes a calibration and those after it; returns (runs left out, calibrations made anew).

    Left out is every run that the one before it does not rest on. The same runs give the same
    calibration, so that one is in use again unless its runs were deleted or kernels timed since.
    Raises NotFoundError, ConflictError.
    """
    record = wiring.calibrations.get(calibration_id)
    runs = runs_of(wiring.calibrations.before(record))
    reason = (
        f"left out by {by}, who reverted {calibration_id}; `planner-cli measurements believe ID` "
        "counts it again"
    )
    left: list[str] = []
    # under other versions of the software there may be older runs, which were none of that one's
    while found := [one.id for one in wiring.learning.inputs(record.subject).runs]:
        newer = [one for one in found if one not in runs]
        for one in newer:
            wiring.measurements.refuse(one, reason)
        left += newer
        if not newer:
            break
    return left, update_calibrations(wiring, [(record.trainer, record.gpu)])
