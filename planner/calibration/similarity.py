"""Correlation between layouts: how similar the cost model's errors on two layouts are.

Fields are grouped by the mechanism through which they act. A group has few distinct values, so its
correlation is a small table, and a column of correlations between one candidate and all N is a
table look-up. Letters: N candidates, V distinct values of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch
from planner.precision import PRECISIONS
from planner.specs.layout import AC_KINDS

# Share of full recomputation that the fixed policies recompute; judgement. Only distances between
# policies follow from it.
REDONE = {
    "none": 0.0,
    "full": 1.0,
    "selective-op": 0.2,
    "selective-attention": 0.1,
    "block": 0.5,  # of how many layers N are, the columns do not say
    "uniform": 1.0,
    "modules": 0.3,  # most sets hold experts or norms; the bits do not say what they weigh
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of fields and its correlation.

    codes (N,): each candidate's value.
    correlation (V, V): between values, 1 on the diagonal.
    """

    name: str
    codes: IntColumn
    correlation: FloatColumn

    def between(self, first: IntColumn, second: IntColumn) -> FloatColumn:
        """Correlations of rows `first` (A,) with rows `second` (B,), (A, B)."""
        return np.asarray(self.correlation[np.ix_(self.codes[first], self.codes[second])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One coordinate of a group.

    length: distance over which errors are similar.
    loss: for a category, w in exp(-w) if it differs; replaces length.
    """

    values: Column
    length: float = 1.0
    loss: float = 0.0


def groups(
    batch: LayoutBatch, global_batch_size: int, *, stretch: float = 1.0
) -> tuple[Group, ...]:
    """The groups in which these candidates differ at all. stretch: factor on every length."""
    made = (_group(name, axes, stretch) for name, axes in _axes(batch, global_batch_size).items())
    return tuple(group for group in made if len(group.correlation) > 1)


def _group(name: str, axes: Sequence[_Axis], stretch: float) -> Group:
    """Correlation (1 + sqrt(3 d2)) exp(-sqrt(3 d2) - w).

    Matern 3/2 over the numbers, times exp(-w) for categories that differ.
    """
    points = np.stack(
        [np.round(np.asarray(axis.values, dtype=np.float64), 6) for axis in axes], axis=1
    )
    distinct, codes = np.unique(points, axis=0, return_inverse=True)
    squared, words = (np.zeros((len(distinct), len(distinct))) for _ in range(2))
    for index, axis in enumerate(axes):
        difference = distinct[:, None, index] - distinct[None, :, index]
        if axis.loss:
            words += axis.loss / stretch * (difference != 0)
        else:
            squared += (difference / (axis.length * stretch)) ** 2
    distance = np.sqrt(3.0 * squared)
    return Group(
        name=name, codes=codes.ravel(), correlation=(1.0 + distance) * np.exp(-distance - words)
    )


def _log2(values: Column) -> FloatColumn:
    return np.asarray(np.log2(np.maximum(values, 1)), dtype=np.float64)


def _axes(x: LayoutBatch, global_batch_size: int) -> dict[str, list[_Axis]]:
    """Coordinates by mechanism.

    Lengths are judgements, longer than the published sweeps ask for (`correlated.TIME`).
    """
    rounds = np.maximum(global_batch_size / (x.micro_batch_size * x.dp_replicate * x.dp_shard), 1.0)
    piped = x.pp > 1
    gathers = np.where(x.zero_stage == 3, 2.0, 1.0) * np.where(
        piped & (x.zero_stage < 3), 1.0, rounds
    )
    bubble = np.minimum((x.pp - 1) / (rounds * x.virtual_stages), 2.0)
    float8 = x.precision != PRECISIONS.names.index("bf16")
    return {
        "sharding": [
            _Axis(values=_log2(x.dp_replicate), length=4.0),
            _Axis(values=_log2(x.dp_shard), length=4.0),
            _Axis(values=x.zero_stage, length=4.0),
        ],
        "traffic": [
            _Axis(values=_log2(gathers), length=4.0),
            _Axis(values=_log2(x.dp_shard * x.cp * x.tp), length=4.0),
        ],
        "tp": [
            _Axis(values=_log2(x.tp), length=3.0),
            _Axis(values=x.sequence_parallel, loss=0.25),
            _Axis(values=x.async_tp, loss=0.15),
        ],
        "cp": [
            _Axis(values=_log2(x.cp), length=3.0),
            _Axis(values=x.cp_method * (x.cp > 1), loss=0.15),
        ],
        "pp": [
            _Axis(values=_log2(x.pp), length=3.0),
            _Axis(values=_log2(x.virtual_stages), length=6.0),
            _Axis(values=x.pp_schedule * piped, loss=0.25),
            _Axis(values=x.split, loss=0.05),
        ],
        "bubble": [_Axis(values=bubble, length=0.6)],
        "ep": [
            _Axis(values=_log2(x.ep), length=3.0),
            _Axis(values=_log2(x.etp), length=3.0),
            _Axis(values=x.moe_dispatcher * (x.ep > 1), loss=0.25),
        ],
        "tokens": [
            _Axis(values=np.log2(x.micro_batch_size / x.cp), length=3.0),
            _Axis(values=_log2(rounds), length=6.0),
        ],
        "checkpointing": [_Axis(values=redone(x), length=1.0), _Axis(values=x.ac_kind, loss=0.15)],
        "precision": [_Axis(values=float8, loss=0.35), _Axis(values=x.precision, loss=0.15)]
        + [
            _Axis(values=v, loss=0.05)
            for v in (x.float8_all_gather, x.param_dtype, x.reduce_dtype, x.master_dtype)
        ],
        "program": [
            _Axis(values=x.compile, loss=0.35),
            _Axis(values=x.optimizer_in_backward, loss=0.1),
            _Axis(values=x.cpu_offload, loss=0.35),
            _Axis(values=x.optimizer_offload_fraction, length=2.0),
            _Axis(values=_log2(1 + x.activation_offload_layers), length=6.0),
        ],
    }


def redone(x: LayoutBatch) -> FloatColumn:
    """Share of the forward pass that activation checkpointing runs again, (N,)."""
    fixed = np.array([REDONE.get(kind, 0.0) for kind in AC_KINDS])[x.ac_kind]
    every = np.where(
        x.ac_kind == AC_KINDS.index("selective-layer"), 1.0 / np.maximum(x.ac_value, 1.0), fixed
    )
    return np.asarray(
        np.where(x.ac_kind == AC_KINDS.index("memory-budget"), 1.0 - x.ac_value, every)
    )
