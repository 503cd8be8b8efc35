"""Tensor-parallel communication that runs under the GEMMs of its own linear layers.

Letters: U layouts; arrays are (U,).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.layer.context import CostContext, OpCost
from planner.trainers.registry import training_release
from planner.trainers.tp_overlap import Mechanism, TpOverlap
from planner.work.ops import Collective, Gemm, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """Seconds of the GEMMs that read what a collective makes, or make what it reads."""

    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn


def covers(ops: Sequence[Op], gemms: Mapping[str, OpCost], size: int) -> dict[str, Cover]:
    """The cover of every collective at a border of tensor parallelism, by its name.

    gemms: costs by the GEMM's name.
    """
    found = {}
    for op in ops:
        if isinstance(op, Collective) and op.site in ("tp_enter", "tp_exit"):
            made, read = ({tensor.name for tensor in part} for part in (op.makes, op.reads))
            beside = [
                gemms[other.name]
                for other in ops
                if isinstance(other, Gemm)
                and (
                    other.output.name in read
                    if op.site == "tp_exit"
                    else any(tensor.name in made for tensor in other.reads)
                )
            ]
            zero = np.zeros(size)
            found[op.name] = Cover(
                forward=sum((c.forward for c in beside), zero),
                input_grad=sum((c.input_grad for c in beside), zero),
                weight_grad=sum((c.weight_grad for c in beside), zero),
            )
    return found


def hidden_shares(context: CostContext) -> tuple[tuple[Mechanism, FloatColumn], ...]:
    """The share hidden by each mechanism of the run's release, where it runs, (U,) each.

    In every layout the first row of the release's table that holds counts. Empty where nothing
    hides in any.
    """
    found = []
    rows = context.rules.tp_overlaps_at(training_release(context.training))
    left = (context.batch.tp > 1) & context.training.overlap.tp
    profile = context.device.profile
    for row in rows if left.any() else ():
        mine = left & _runs(context, row)
        if mine.any():
            torch = row.mechanism == "symmetric-memory"
            share = profile.async_tp_hidden if torch else profile.tp_hidden
            found.append((row.mechanism, np.where(mine, share, 0.0)))
            left = left & ~mine
    return tuple(found)


def _runs(context: CostContext, row: TpOverlap) -> BoolColumn:
    """Layouts in which a mechanism runs, (U,)."""
    batch = context.batch
    runs = batch.async_tp if row.asked else np.ones(len(batch), dtype=np.bool_)
    if not row.among_peers:
        return runs
    if row.mechanism == "user-buffers":
        runs = runs & (context.sizes["kv_lora"] == 0)  # MLA has none
    degree, stride = context.group("tp")
    peers = context.fabric.peer_gpus if context.device.gpu.vendor == "nvidia" else 1
    return np.asarray(runs & batch.sequence_parallel & (degree * stride <= peers))


def hidden_seconds(
    context: CostContext, op: Collective, cover: Cover, wire: FloatColumn, *, backward: bool
) -> FloatColumn:
    """Seconds of one TP collective that its mechanism hides, (U,); 0 where there is none.

    hidden = share x min(wire, work)
    wire: seconds of the collective.
    work: of the GEMMs under which it runs. Where a mechanism cuts into n chunks, one for each rank,
        a rank's own needs nothing from others (all-gather) or its last is kept (reduce-scatter),
        so n - 1 transfers run under n - 1 of n parts of the GEMM. Where the reduction of input
        gradients runs whole, that is the GEMM of weight gradients.
    share: `CostContext.tp_hidden`.
    Sources: `planner.trainers.tp_overlap` and the rows there.
    """
    hidden = np.zeros(len(context.batch))
    for mechanism, share in context.tp_hidden:
        work = _work(mechanism, op, cover, context.batch.tp, backward=backward)
        if work is not None:
            hidden = hidden + share * np.minimum(wire, work)
    return hidden


def _work(
    mechanism: Mechanism, op: Collective, cover: Cover, tp: IntColumn, *, backward: bool
) -> FloatColumn | None:
    """Seconds of GEMM under which a collective can run, (U,); None where it runs under none."""
    reduces_gradients = backward and op.site == "tp_enter"
    if reduces_gradients and mechanism != "symmetric-memory":
        return cover.weight_grad
    if mechanism == "deferred" or not op.linear:
        return None
    return (tp - 1.0) / tp * (cover.input_grad if backward else cover.forward)
