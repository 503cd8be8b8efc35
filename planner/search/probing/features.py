"""Layouts as points between which a correlation is defined: how alike the cost model's errors on two layouts are.

Fields are grouped by the mechanism that they act through. A group has few distinct values, so its correlation is a small table, and a
column of correlations between one candidate and all N is a look-up. Letters: N candidates, V distinct values of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch
from planner.specs.layout import AC_KINDS, PRECISIONS

# Share of full recomputation that the fixed policies redo; judgement, only distances between policies follow from it.
REDONE = {"none": 0.0, "full": 1.0, "selective-op": 0.2, "selective-attention": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """codes (N,): each candidate's value.  correlation (V, V) between values, 1 on the diagonal."""

    name: str
    codes: IntColumn
    correlation: FloatColumn

    def column(self, row: int) -> FloatColumn:
        """Correlation of every candidate with this one, (N,)."""
        return np.asarray(self.correlation[self.codes[row]][self.codes])

    def between(self, first: IntColumn, second: IntColumn) -> FloatColumn:
        """Correlations of rows `first` (A,) with rows `second` (B,), (A, B)."""
        return np.asarray(self.correlation[np.ix_(self.codes[first], self.codes[second])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One coordinate of a group. length: distance over which errors stay alike; of a word, w in the correlation exp(-w) when it differs."""

    values: Column
    length: float
    word: bool = False


def groups(batch: LayoutBatch, global_batch_size: int) -> tuple[Group, ...]:
    """The groups in which these candidates differ at all."""
    made = (_group(name, axes) for name, axes in _axes(batch, global_batch_size).items())
    return tuple(group for group in made if len(group.correlation) > 1)


def _group(name: str, axes: Sequence[_Axis]) -> Group:
    """Correlation (1 + sqrt(3 d2)) exp(-sqrt(3 d2) - w): Matern 3/2 over the numbers, times exp(-w) for words that differ."""
    points = np.stack([np.round(np.asarray(axis.values, dtype=np.float64), 6) for axis in axes], axis=1)
    distinct, codes = np.unique(points, axis=0, return_inverse=True)
    squared, words = (np.zeros((len(distinct), len(distinct))) for _ in range(2))
    for place, axis in enumerate(axes):
        difference = distinct[:, None, place] - distinct[None, :, place]
        if axis.word:
            words += axis.length * (difference != 0)
        else:
            squared += (difference / axis.length) ** 2
    distance = np.sqrt(3.0 * squared)
    return Group(name=name, codes=codes.ravel(), correlation=(1.0 + distance) * np.exp(-distance - words))


def _log2(values: Column) -> FloatColumn:
    return np.asarray(np.log2(np.maximum(values, 1)), dtype=np.float64)


def _axes(x: LayoutBatch, global_batch_size: int) -> dict[str, list[_Axis]]:
    """Coordinates by mechanism. Lengths are judgements; the published sweeps' likelihood is flat around them (`benchmarks/replay.py`)."""
    rounds = np.maximum(global_batch_size / (x.micro_batch_size * x.dp_replicate * x.dp_shard), 1.0)
    piped = x.pp > 1
    gathers = np.where(x.zero_stage == 3, 2.0, 1.0) * np.where(piped & (x.zero_stage < 3), 1.0, rounds)
    bubble = np.minimum((x.pp - 1) / (rounds * x.virtual_stages), 2.0)
    float8 = x.precision != PRECISIONS.index("bf16")
    return {
        "sharding": [_Axis(values=_log2(x.dp_replicate), length=2.0), _Axis(values=_log2(x.dp_shard), length=2.0),
                     _Axis(values=x.zero_stage, length=2.0)],
        "traffic": [_Axis(values=_log2(gathers), length=2.0), _Axis(values=_log2(x.dp_shard * x.cp * x.tp), length=2.0)],
        "tp": [_Axis(values=_log2(x.tp), length=1.5), _Axis(values=x.sequence_parallel, length=0.5, word=True),
               _Axis(values=x.async_tp, length=0.3, word=True)],
        "cp": [_Axis(values=_log2(x.cp), length=1.5), _Axis(values=x.cp_method * (x.cp > 1), length=0.3, word=True)],
        "pp": [_Axis(values=_log2(x.pp), length=1.5), _Axis(values=_log2(x.virtual_stages), length=3.0),
               _Axis(values=x.pp_schedule * piped, length=0.5, word=True), _Axis(values=x.split, length=0.1, word=True)],
        "bubble": [_Axis(values=bubble, length=0.3)],
        "ep": [_Axis(values=_log2(x.ep), length=1.5), _Axis(values=_log2(x.etp), length=1.5)],
        "tokens": [_Axis(values=np.log2(x.micro_batch_size / x.cp), length=1.5), _Axis(values=_log2(rounds), length=3.0)],
        "checkpointing": [_Axis(values=_redone(x), length=0.5), _Axis(values=x.ac_kind, length=0.3, word=True)],
        "precision": [_Axis(values=float8, length=0.7, word=True), _Axis(values=x.precision, length=0.3, word=True)]
        + [_Axis(values=v, length=0.1, word=True) for v in (x.float8_all_gather, x.param_dtype, x.reduce_dtype, x.master_dtype)],
        "program": [_Axis(values=x.compile, length=0.7, word=True), _Axis(values=x.optimizer_in_backward, length=0.2, word=True),
                    _Axis(values=x.cpu_offload, length=0.7, word=True)],
    }  # fmt: skip


def _redone(x: LayoutBatch) -> FloatColumn:
    """Share of the forward pass that activation checkpointing runs again, (N,)."""
    fixed = np.array([REDONE.get(kind, 0.0) for kind in AC_KINDS])[x.ac_kind]
    every = np.where(x.ac_kind == AC_KINDS.index("selective-layer"), 1.0 / np.maximum(x.ac_value, 1.0), fixed)
    return np.asarray(np.where(x.ac_kind == AC_KINDS.index("memory-budget"), 1.0 - x.ac_value, every))
