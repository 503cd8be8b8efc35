"""The accuracy report that ships: `planner/catalog/calibrations/accuracy.json`."""

from functools import lru_cache

from planner.calibration.comparison import Comparison
from planner.catalog.calibrations import calibration_text


@lru_cache(maxsize=1)
def shipped_comparison() -> Comparison:
    return Comparison.from_document(calibration_text("accuracy"))
