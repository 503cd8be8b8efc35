"""Prunes by memory: what must need more than a layout that ran out, or less than one that ran.

Only orders that hold by construction count: the same kernels, degrees and schedule, with more saved
or less sharded. Speed is irrelevant here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, Column, FloatColumn, LayoutBatch
from planner.cost.pipeline.schedule_columns import by_schedule
from planner.schedules import SCHEDULES
from planner.specs.layout import AC_KINDS, DTYPES

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "master_dtype")
# Fields that must be equal for two layouts to be comparable at all.
SAME = (
    "cp", "tp", "pp", "ep", "etp", "async_tp", "cp_method", "moe_dispatcher", "virtual_stages",
    "split", "precision", "float8_all_gather", "compile",
)  # fmt: skip
# A larger value means more memory, all else equal: name of the column, sign (+1: a larger value
# needs more), reason.
ORDERED: Mapping[str, tuple[int, str]] = {
    "micro_batch_size": (1, "a larger microbatch keeps larger activations"),
    "zero_stage": (-1, "a lower ZeRO stage shards less"),
    "dp_shard": (-1, "the same ranks in fewer shards hold larger ones"),
    "sequence_parallel": (-1, "without sequence parallelism norms keep whole activations"),
    "cpu_offload": (-1, "without offload the states stay on the device"),
    "optimizer_offload_fraction": (-1, "a smaller share on the host leaves more on the device"),
    "activation_offload_layers": (-1, "fewer layers on the host leave more activations"),
    "optimizer_in_backward": (-1, "without the optimizer in backward all gradients live at once"),
}
# Full recomputation saves least, none saves most; the selective kinds lie between and are not
# compared with each other. uniform-N saves fewer inputs than full, but holds N layers in backward.
KEPT = {
    "full": 0, "selective-op": 1, "selective-layer": 1, "selective-attention": 1, "block": 1,
    "modules": 1, "none": 2,
}  # fmt: skip
FEWER_KEEPS_MORE = [AC_KINDS.index(kind) for kind in ("block",)]  # a larger N recomputes more
NOT_COMPARED = [AC_KINDS.index(kind) for kind in ("uniform", "modules")]  # by their numbers
WIDE = DTYPES.index("float32")
GPIPE, ONE_F_ONE_B = SCHEDULES.names.index("GPipe"), SCHEDULES.names.index("1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rows that need at least as much memory as the reference (N,)."""

    mask: BoolColumn
    reference: int

    def reason(self, batch: LayoutBatch, row: int) -> str:
        """The reason why the row needs at least as much as the reference."""
        said = [
            why
            for name, (_, why) in ORDERED.items()
            if getattr(batch, name)[row] != getattr(batch, name)[self.reference]
        ]
        if (
            batch.ac_kind[row] != batch.ac_kind[self.reference]
            or batch.ac_value[row] != batch.ac_value[self.reference]
        ):
            said.append("less is recomputed")
        if any(
            getattr(batch, name)[row] != getattr(batch, name)[self.reference]
            for name in DTYPE_FIELDS
        ):
            said.append("a wider dtype is kept")
        if batch.pp_schedule[row] != batch.pp_schedule[self.reference]:
            said.append("GPipe keeps every microbatch")
        return "; ".join(said) or "it is the same layout"


def at_least(batch: LayoutBatch, row: int, global_batch_size: int) -> Order:
    """The rows that need at least the memory of this one, itself included."""
    return _order(batch, row, global_batch_size, 1)


def at_most(batch: LayoutBatch, row: int, global_batch_size: int) -> Order:
    """The rows that need at most the memory of this one, itself included."""
    return _order(batch, row, global_batch_size, -1)


def _order(batch: LayoutBatch, row: int, global_batch_size: int, direction: int) -> Order:
    """The order of memory in one direction.

    Gradients that accumulate over microbatches need memory that a single one does not, so the two
    are not compared. Neither are ZeRO stages under a pipeline, where two gathered layers may be
    the whole stage. Nor is a larger microbatch above a smaller one where a rank holds all of them
    at once: beside the gradients, which the first backward leaves, there is one less, and that one
    is larger.
    """
    ranks = batch.dp_replicate * batch.dp_shard
    count = global_batch_size / (batch.micro_batch_size * ranks)
    accumulates = count > 1
    mask = (accumulates == accumulates[row]) & (
        (batch.pp == 1) | (batch.zero_stage == batch.zero_stage[row])
    )
    at_once = _all_in_flight(batch, count)
    mask &= (batch.micro_batch_size == batch.micro_batch_size[row]) | ~(
        at_once if direction > 0 else at_once[row]
    )
    mask &= ranks == ranks[row]
    for name in SAME:
        column: Column = getattr(batch, name)
        mask &= column == column[row]
    for name, (sign, _) in ORDERED.items():
        values = np.asarray(getattr(batch, name), dtype=np.float64)
        mask &= direction * sign * (values - values[row]) >= 0
    for name in DTYPE_FIELDS:
        wide = np.asarray(getattr(batch, name) == WIDE, dtype=np.int64)
        mask &= direction * (wide - wide[row]) >= 0
    return Order(
        mask=mask & _checkpointing(batch, row, direction) & _schedule(batch, row, direction),
        reference=row,
    )


def _all_in_flight(batch: LayoutBatch, count: FloatColumn) -> BoolColumn:
    """Whether the first rank of a pipeline, which holds most, runs all forwards first, (N,)."""
    m = count.astype(np.int64)
    held = by_schedule(
        batch,
        lambda s, rows: s.in_flight(0, batch.pp[rows], batch.virtual_stages[rows], m[rows]),
        0.0,
    )
    return np.asarray((batch.pp > 1) & (held >= m))


def _checkpointing(batch: LayoutBatch, row: int, direction: int) -> BoolColumn:
    """Same kind with at least its N or budget; or a kind that saves more."""
    sign = np.where(np.isin(batch.ac_kind, FEWER_KEEPS_MORE), -direction, direction)
    more = np.where(
        np.isin(batch.ac_kind, NOT_COMPARED),
        batch.ac_value == batch.ac_value[row],
        sign * (batch.ac_value - batch.ac_value[row]) >= 0,
    )
    same = (batch.ac_kind == batch.ac_kind[row]) & more
    kept = np.array([KEPT.get(kind, -1) for kind in AC_KINDS])[batch.ac_kind]
    comparable = (kept >= 0) & (kept[row] >= 0)
    return np.asarray(same | (comparable & (direction * (kept - kept[row]) > 0)))


def _schedule(batch: LayoutBatch, row: int, direction: int) -> BoolColumn:
    """Layout with its schedule, or GPipe above 1F1B; without a pipeline all are alike."""
    less, more = (ONE_F_ONE_B, GPIPE) if direction > 0 else (GPIPE, ONE_F_ONE_B)
    above = (batch.pp_schedule[row] == less) & (batch.pp_schedule == more)
    return np.asarray((batch.pp == 1) | (batch.pp_schedule == batch.pp_schedule[row]) | above)
