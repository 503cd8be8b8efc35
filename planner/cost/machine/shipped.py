"""The calibration that ships, `planner/catalog/calibrations/shipped.json`.

`benchmarks/calibrate.py` writes it from the measured runs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from planner.catalog.files import text_of
from planner.columns import FloatColumn
from planner.cost.machine.knobs import KNOBS, PLACE, Calibration, StaleRuns

DIGITS = 5
DEFAULTS = Calibration.prior()  # of what documents of earlier versions do not hold
FIRST = ("id", "run_sd", "memory_sd", "memory_sd_bytes")  # fields that stand in a document as is
LATER = ("stack_sd", "unit_sd", "own_run_sd", "place", "own_runs", "interval_factors")


@lru_cache(maxsize=1)
def shipped_calibration() -> Calibration:
    """The posterior after the published runs."""
    return from_document(json.loads(text_of("calibrations/shipped.json")))


def from_document(document: Mapping[str, Any]) -> Calibration:
    size = len(document["keys"])
    covariance = np.zeros((size, size))
    covariance[np.tril_indices(size)] = document["covariance"]
    covariance = covariance + np.tril(covariance, -1).T
    given = {name: document[name] for name in FIRST}
    given |= {name: document.get(name, getattr(DEFAULTS, name)) for name in LATER}
    return Calibration(
        **given,
        keys=tuple((knob, scope) for knob, scope in document["keys"]),
        shifts=np.array(document["shifts"], dtype=np.float64),
        covariance=covariance,
        sensitivity=_by_knob(document),
        seen=frozenset((trainer, family, feature) for trainer, family, feature in document["seen"]),
        fitted=frozenset(document["fitted"]),
        stale=StaleRuns(**document["stale"]) if document.get("stale") else None,
        waiting=document.get("waiting", {}),
    )


def _by_knob(document: Mapping[str, Any]) -> FloatColumn:
    """The sensitivity in today's order of knobs.

    A knob that was added since then gets zeros; one that was removed is left out.
    """
    names, found = document["knobs"], np.array(document["sensitivity"], dtype=np.float64)
    out = np.zeros((len(KNOBS), len(KNOBS)))
    kept = [name for name in names if name in PLACE]
    there, here = [names.index(name) for name in kept], [PLACE[name] for name in kept]
    out[np.ix_(here, here)] = found[np.ix_(there, there)]
    return out


def to_document(calibration: Calibration) -> dict[str, Any]:
    """JSON-safe form, with the covariance as its lower triangle."""
    lower = calibration.covariance[np.tril_indices(len(calibration.keys))]
    return {
        **{name: getattr(calibration, name) for name in (*FIRST, *LATER)},
        "keys": [list(key) for key in calibration.keys],
        "shifts": _rounded(calibration.shifts),
        "covariance": _rounded(lower),
        "knobs": [knob.name for knob in KNOBS],
        "sensitivity": [_rounded(row) for row in calibration.sensitivity],
        "seen": sorted(list(triple) for triple in calibration.seen),
        "fitted": sorted(calibration.fitted),
        **({"stale": asdict(calibration.stale)} if calibration.stale else {}),
        **({"waiting": calibration.waiting} if calibration.waiting else {}),
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]
