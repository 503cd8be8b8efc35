"""`LayoutBatch`: layouts as columns of shape (N,), in which they are checked, priced and ranked.

A single layout is a batch of one. Words become codes: an index into the names in `CODES`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.precision import PRECISIONS
from planner.schedules import SCHEDULES, Schedule
from planner.specs.layout import (
    AC_KINDS,
    CP_METHODS,
    DTYPES,
    FLAGS,
    MOE_DISPATCHERS,
    SHARES,
    Layout,
    format_ac,
    parse_ac,
)

Column = NDArray[Any]
IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

CODES: Mapping[str, Sequence[str]] = {
    "cp_method": CP_METHODS,
    "moe_dispatcher": MOE_DISPATCHERS,
    "pp_schedule": SCHEDULES.names,
    "precision": PRECISIONS.names,
    "param_dtype": DTYPES,
    "reduce_dtype": DTYPES,
    "master_dtype": DTYPES,
}
DTYPE_BYTES = np.array([{"bfloat16": 2.0, "float32": 4.0}[name] for name in DTYPES])
TRAINER_SPLIT = -1
_ONE_NUMBER = (0,)  # strides of a column that is one number for all rows
_NARROW_BYTES = 4
_new, _set = object.__new__, object.__setattr__


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBatch:
    """N layouts. Integers and codes are int64, flags bool, `ac_value` and shares
    float64.

    ac_kind: index into AC_KINDS.
    ac_value: N of selective-layer-N, block-N and uniform-N, X of memory-budget-X, or the bits of
        modules-A+B; else 0.
    split: index into `splits` (layers per stage, first stage first), or TRAINER_SPLIT.
    """

    dp_replicate: IntColumn
    dp_shard: IntColumn
    cp: IntColumn
    tp: IntColumn
    pp: IntColumn
    ep: IntColumn
    etp: IntColumn
    moe_dispatcher: IntColumn
    zero_stage: IntColumn
    sequence_parallel: BoolColumn
    async_tp: BoolColumn
    cp_method: IntColumn
    pp_schedule: IntColumn
    virtual_stages: IntColumn
    split: IntColumn
    micro_batch_size: IntColumn
    ac_kind: IntColumn
    ac_value: FloatColumn
    precision: IntColumn
    float8_all_gather: BoolColumn
    param_dtype: IntColumn
    reduce_dtype: IntColumn
    master_dtype: IntColumn
    compile: BoolColumn
    optimizer_in_backward: BoolColumn
    cpu_offload: BoolColumn
    optimizer_offload_fraction: FloatColumn
    activation_offload_layers: IntColumn
    splits: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def host_share(self) -> FloatColumn:
        """Share of the optimizer's states and update on the host, (N,)."""
        return np.where(self.cpu_offload, self.optimizer_offload_fraction, 0.0)

    @property
    def param_bytes(self) -> FloatColumn:
        """Bytes of an element in `param_dtype`, (N,)."""
        return DTYPE_BYTES[self.param_dtype]

    @property
    def reduce_bytes(self) -> FloatColumn:
        return DTYPE_BYTES[self.reduce_dtype]

    @property
    def master_bytes(self) -> FloatColumn:
        return DTYPE_BYTES[self.master_dtype]

    def columns(self) -> Iterator[tuple[str, Column]]:
        """(name, column) of every field but the table of splits."""
        for name in COLUMNS:
            yield name, getattr(self, name)

    def take(self, rows: Column | slice) -> "LayoutBatch":
        """The rows at these indices (or where this mask is true)."""
        if not isinstance(rows, slice) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)  # once, not for each column
        batch = _new(LayoutBatch)
        for name in COLUMNS:
            column = getattr(self, name)
            # most are whole and wide, and most batches few rows: a call for each would take longer
            plain = column.strides != _ONE_NUMBER and column.itemsize != _NARROW_BYTES
            _set(batch, name, column[rows] if plain else taken(column, rows))
        _set(batch, "splits", self.splits)
        return batch

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout]) -> "LayoutBatch":
        """Columns from N layouts; inverse of `row`."""
        splits = tuple(
            dict.fromkeys(
                layout.layers_per_stage for layout in layouts if layout.layers_per_stage is not None
            )
        )
        parsed = [parse_ac(layout.ac) for layout in layouts]
        columns: dict[str, Column] = {
            "ac_kind": np.array([AC_KINDS.index(kind) for kind, _ in parsed], dtype=np.int64),
            "ac_value": np.array([value for _, value in parsed], dtype=np.float64),
            "split": np.array(
                [
                    TRAINER_SPLIT
                    if x.layers_per_stage is None
                    else splits.index(x.layers_per_stage)
                    for x in layouts
                ],
                dtype=np.int64,
            ),
        }
        for name in COLUMNS:
            if name in columns:
                continue
            values = [getattr(layout, name) for layout in layouts]
            if name in CODES:
                values = [CODES[name].index(value) for value in values]
            columns[name] = np.array(values, dtype=dtype_of(name))
        return cls(**columns, splits=splits)

    @classmethod
    def concatenate(cls, batches: Sequence["LayoutBatch"]) -> "LayoutBatch":
        """One batch of all rows; the tables of splits are merged."""
        splits = tuple(dict.fromkeys(split for batch in batches for split in batch.splits))
        columns: dict[str, Column] = {}
        for name in COLUMNS:
            if name != "split":
                columns[name] = _joined([getattr(batch, name) for batch in batches])
        columns["split"] = np.concatenate([_renumbered(batch, splits) for batch in batches])
        return cls(**columns, splits=splits)

    def row(self, index: int) -> Layout:
        return self.take(np.array([index])).layouts()[0]

    def layouts(self) -> list[Layout]:
        """All layouts as the objects that users see; inverse of `from_layouts`."""
        values: dict[str, list[Any]] = {name: column.tolist() for name, column in self.columns()}
        for name, words in CODES.items():
            values[name] = [words[code] for code in values[name]]
        kinds, numbers, splits = (values.pop(name) for name in ("ac_kind", "ac_value", "split"))
        values["ac"] = [
            format_ac(AC_KINDS[kind], number) for kind, number in zip(kinds, numbers, strict=True)
        ]
        values["layers_per_stage"] = [
            None if split == TRAINER_SPLIT else self.splits[split] for split in splits
        ]
        rows = zip(*values.values(), strict=True)
        return [Layout.model_validate(dict(zip(values, row, strict=True))) for row in rows]


def taken(column: Column, rows: IntColumn | slice) -> Column:
    """The column at these rows; one number for all rows (stride 0) stays one number.

    A narrow column becomes as wide as the others, so that nothing counted with it overflows.
    """
    if isinstance(rows, slice) or column.strides != _ONE_NUMBER or not len(column):
        return wide(column[rows])
    if len(rows) <= len(column):
        return wide(column[: len(rows)])
    return np.broadcast_to(column[0], len(rows))


def one_number(value: int, count: int) -> IntColumn:
    """A column with the same whole number in all rows, which it holds once."""
    return np.broadcast_to(np.int64(value), count)


def narrow(column: Column) -> Column:
    """Whole numbers in half the memory, where many rows are kept and nothing is counted."""
    return column.astype(np.int32) if column.dtype == np.int64 else column


def wide(column: Column) -> Column:
    """The inverse of `narrow`."""
    return column.astype(np.int64) if column.itemsize == _NARROW_BYTES else column


COLUMNS = tuple(f.name for f in fields(LayoutBatch) if f.name != "splits")


def dtype_of(name: str) -> type[np.generic]:
    return np.bool_ if name in FLAGS else np.float64 if name in SHARES else np.int64


def schedule_is(codes: IntColumn, holds: Callable[[Schedule], bool]) -> BoolColumn:
    return np.array([holds(schedule) for schedule in SCHEDULES.values()], dtype=np.bool_)[codes]


def in_order(summands: Sequence[NDArray[np.float64]] | NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over the first axis, in order; 0 of nothing.

    `np.sum` adds in pairs where the other axes hold one number, and the order of a matrix product
    follows its width: a row alone would differ in its last bit from the same row among others.
    """
    total = np.array(summands[0] if len(summands) else 0.0, dtype=np.float64)
    for summand in summands[1:]:
        total += summand
    return total


def _joined(columns: Sequence[Column]) -> Column:
    """One column after the other; one number for all rows stays one number."""
    filled = [column for column in columns if len(column)]
    if filled and all(column.strides == _ONE_NUMBER for column in filled):
        first = filled[0][0]
        if all(column[0] == first for column in filled):
            return np.broadcast_to(first, sum(map(len, filled)))
    return np.concatenate(columns)


def _renumbered(batch: LayoutBatch, splits: tuple[tuple[int, ...], ...]) -> IntColumn:
    places = np.array(
        [splits.index(split) for split in batch.splits] + [TRAINER_SPLIT], dtype=np.int64
    )
    return places[batch.split]
