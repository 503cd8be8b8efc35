"""Several machines priced in one pass, side by side along the columns.

An uncertain number of the machine makes another machine: the same GPU with slower kernels, the same
fabric with a slower network (`calibration.intervals`). The work on each is the same, so their
layouts stand in one batch: those of the first machine, then those of the second, and so on. What
differs between machines is a column instead of a number.
Letters: V machines, S columns of each.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.cost.machine.device import Device
from planner.cost.machine.profile import Profile
from planner.cost.network.topology import Fabric

RATES = (
    "linear_rate", "linear_half_depth", "attention_forward_rate", "attention_backward_rate",
    "memory_rate",
)  # fmt: skip


def profiles(of: Sequence[Profile], size: int) -> Profile:
    """One profile whose numbers are columns (V S,) where the machines' differ."""
    values = {field.name: [getattr(one, field.name) for one in of] for field in fields(Profile)}
    differ = {name: each for name, each in values.items() if len(set(each)) > 1}
    columns: dict[str, Any] = {name: np.repeat(each, size) for name, each in differ.items()}
    return replace(of[0], **columns)


def taken(profile: Profile, rows: IntColumn) -> Profile:
    values = {field.name: getattr(profile, field.name) for field in fields(Profile)}
    columns: dict[str, Any] = {
        name: value[rows] for name, value in values.items() if isinstance(value, np.ndarray)
    }
    return replace(profile, **columns) if columns else profile


def devices(of: Sequence[Device], size: int) -> Device:
    """One device whose rates are columns: (V S,), or (recipes, V S)."""
    columns: dict[str, Any] = {
        name: _repeated([getattr(one, name) for one in of], size) for name in RATES
    }
    return replace(of[0], profile=profiles([one.profile for one in of], size), **columns)


def fabrics(of: Sequence[Fabric], size: int) -> Fabric:
    """One fabric with a bandwidth (L, V S); lines are those of each machine's own (`Fabric.each`).

    Equal machines share what they remember, and so does this one.
    """
    return replace(of[0], bandwidth=_repeated([one.bandwidth for one in of], size), each=tuple(of))


def _repeated(values: Sequence[FloatColumn | float], size: int) -> FloatColumn:
    return np.repeat(np.stack([np.asarray(one) for one in values], axis=-1), size, axis=-1)
