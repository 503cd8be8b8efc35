"""The bytes of each kind that every pipeline rank holds, which `cost.memory.peak` makes a peak of.

Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head).
"""

from dataclasses import replace
from functools import reduce

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn
from planner.cost.cost_inputs import CostInputs, on_ranks
from planner.cost.layer.trainer_kernels import chunks_loss
from planner.cost.memory import graph_pools, host_activations
from planner.cost.memory.peak import LayerNeeds, RankShapes, Widths, layer_phases
from planner.cost.pipeline.schedule_columns import by_schedule, split_schedules
from planner.rules import cuda_graphs
from planner.work.checkpointing import BLOCK


def rank_shapes(inputs: CostInputs) -> RankShapes:
    """What each rank holds of every kind, (R, N)."""
    batch, units, unit, at_unit = inputs.batch, inputs.units, inputs.unit, inputs.at_unit
    shards, at_shard, rules = inputs.shards, inputs.at_shard, inputs.job.rules
    local, shard, gathered = (
        column[:, at_shard] for column in (shards.local, shards.shard, shards.gathered)
    )
    saved, transient = unit.costs.saved_bytes[:, at_unit], unit.costs.transient_bytes[:, at_unit]
    holds = _held_kinds(inputs)
    head, held_local, narrow = (
        units[:, -1],
        on_ranks(units, local),
        bool((shards.gathered != shards.local).any()),
    )
    copies = (
        on_ranks(units, shards.copies_bytes[:, at_shard])
        if rules.sharding.keeps_copies
        else np.zeros_like(held_local)
    )
    graphs = cuda_graphs.captured(batch, inputs.job.rules_context)
    in_flight = np.array([_in_flight(inputs, r) for r in range(len(units))])
    # A stage's input is the buffer that received it, which `received_bytes` counts.
    inputs_kept = batch.virtual_stages * float(rules.framework.keeps_stage_inputs) - (
        (batch.virtual_stages - units[:, -2]) * float(rules.framework.buffers_every_receive)
    )
    boundary = np.where(batch.pp > 1, unit.costs.boundary_bytes[at_unit] * inputs_kept, 0.0)
    stream = np.broadcast_to(unit.costs.boundary_bytes[at_unit], in_flight.shape)
    chunked = chunks_loss(inputs.job.training, rules)
    widths = Widths.of(batch, inputs.m, rules, chunked)
    needs = LayerNeeds(
        running=transient[:-2],
        done=unit.costs.done_bytes[:-2, at_unit],
        following=unit.costs.next_bytes[:-2, at_unit],
        second=unit.costs.second_bytes[:-2, at_unit],
        reduced=shards.together[:-2, at_shard],
        shard=shard[:-2],
        gathered=gathered[:-2],
    )
    needs, first_saved, working = _in_blocks(
        inputs, needs, saved[:-2], unit.costs.working_bytes[:-2, at_unit]
    )
    phases = layer_phases(needs, widths)
    last, following, second = (_largest(holds, phase) for phase in phases)
    largest_shard = _largest(holds, shard[:-2])
    largest_gathered = _largest(holds, gathered[:-2])
    several = reduce(np.add, [units[:, kind] for kind in range(units.shape[1] - 2)]) > 2
    following = following - np.where(several, 0.0, widths.prefetched * largest_gathered)
    head_gathered, tied = (
        head * gathered[-1],
        head * units[:, -2] * inputs.job.model.tie_word_embeddings,
    )
    head_local = head * local[-1] if narrow else head_gathered
    head_bytes, chunks_bytes = head * transient[-1], np.zeros_like(held_local)
    if chunked:
        head_bytes, chunks_bytes = _chunked_head(
            inputs, widths, head_local, largest_gathered, head * shard[-1]
        )
        head_local = np.zeros_like(head_local)
    root = rules.ends_in_root & (batch.pp == 1) & (batch.zero_stage > 0)
    own_head, own_table = (np.where(root, 0.0, units[:, place]) for place in (-1, -2))
    kept, all_saved = on_ranks(units, shard), on_ranks(units, saved)
    gone = host_activations.away(batch, inputs.job.model.num_hidden_layers)
    if gone.any():
        all_saved = all_saved - gone * on_ranks(units[:, :-2], saved[:-2])
    # The first layer's backward prefetches the embedding instead of a layer. One more shard waits,
    # and the activations of one layer less are saved.
    table = (
        widths.prefetched * (own_table * gathered[-2] - largest_gathered)
        - widths.resident * largest_gathered
    )
    first = table + widths.master * largest_shard - _largest(holds, first_saved)
    second = np.where(several, second + np.maximum(first, 0.0), 0.0)
    return RankShapes(
        local=held_local,
        shard=kept,
        fixed_shard=graph_pools.fixed_gradients(graphs, kept),
        late_shard=np.minimum(own_head * shard[-1] + largest_shard, kept),
        early_shard=np.maximum(
            kept - units[:, -2] * shard[-2] - (head - own_head) * shard[-1] - 2.0 * largest_shard,
            0.0,
        ),
        largest_local=_largest(holds, local[:-2]) if narrow else largest_gathered,
        head_local=np.where(root, 0.0, head_local),
        head_shard=own_head * shard[-1],
        embedding_local=units[:, -2] * local[-2],
        embedding_whole=units[:, -2]
        * local[-2]
        * (batch.tp if rules.framework.whole_table_gradient else 1.0),
        received_bytes=_received_microbatches(inputs) * unit.costs.boundary_bytes[at_unit],
        gathered=on_ranks(units, gathered) if narrow else held_local,
        largest_gathered=largest_gathered,
        head_gathered=np.where(root, 0.0, head_gathered + tied * gathered[-2]),
        copies_bytes=copies,
        distinct=_largest(units > 0, shards.distinct[:, at_shard])
        if rules.sharding.keeps_copies
        else np.zeros_like(held_local),
        root_gathered=np.where(root, units[:, -2] * gathered[-2] + head * gathered[-1], 0.0),
        root_head=np.where(root, head * local[-1] + tied * local[-2], 0.0),
        saved_bytes=all_saved,
        head_saved_bytes=head * saved[-1],
        head_bytes=head_bytes,
        chunks_bytes=chunks_bytes,
        last_layer_bytes=last,
        next_layer_bytes=following,
        second_layer_bytes=second,
        in_flight=in_flight,
        held_bytes=_held_bytes(inputs, in_flight, all_saved, boundary),
        boundary_bytes=np.broadcast_to(boundary, in_flight.shape),
        stream_bytes=stream,
        logits_bytes=head
        * (
            unit.costs.logits_bytes[at_unit]
            + np.where(batch.pp > 1, unit.costs.leftover_bytes[at_unit], 0.0)
        ),
        waiting_loss_bytes=head * _waiting_losses(inputs, in_flight),
        all_in_flight=np.where(batch.pp > 1, in_flight >= inputs.m, False) * 1.0,
        leftover_bytes=head * unit.costs.leftover_bytes[at_unit],
        graph_bytes=graph_pools.private_bytes(graphs, last, stream),
        working_bytes=_largest(holds, working),
    )


def _held_kinds(inputs: CostInputs) -> BoolColumn | None:
    """Whether a rank holds layers of each kind, (R, K, N); None where all hold all.

    Without block-N, the kinds that it recomputes are those of the layout's mode again.
    """
    holds = inputs.units[:, :-2] > 0
    blocks = inputs.batch.ac_kind == BLOCK
    if blocks.any():
        kinds = holds.shape[1] // 2
        holds[:, kinds:] = np.where(blocks, holds[:, kinds:], holds[:, :kinds])
    return None if holds.all() else holds


def _in_blocks(
    inputs: CostInputs, needs: LayerNeeds, saved: FloatColumn, working: FloatColumn
) -> tuple[LayerNeeds, FloatColumn, FloatColumn]:
    """(needs, what the first layer saves, what a layer's forward frees), (K, N) each, by place.

    block-N recomputes the first N layers of each stage, so that the layers behind them, which run
    backward first, recompute nothing. A kind that does not stand in a place does not count there.
    saved, working: of layers of each kind.
    """
    batch = inputs.batch
    blocks = batch.ac_kind == BLOCK
    if not blocks.any():
        return needs, saved, working
    kinds = len(saved) // 2
    others = inputs.units[:, :kinds].sum(axis=1).min(axis=0) / batch.virtual_stages
    least = np.full_like(saved, -np.inf)
    whole, redone = saved[:kinds], saved[kinds:]
    second = needs.second[:kinds] - whole + redone

    # behind one that recomputes nothing, the first layer's backward needs its recomputation besides
    more = needs.running[kinds:] + redone - needs.running[:kinds] - whole
    first = redone - np.where(batch.ac_value > 1, 0.0, more)

    def at(place: FloatColumn, recomputed: BoolColumn, field: FloatColumn) -> FloatColumn:
        """`field` where the kind may stand in this place of a layout with block-N."""
        is_redone = np.arange(2 * kinds)[:, None] >= kinds
        return np.where(blocks & (recomputed != is_redone), least, np.where(blocks, place, field))

    after_one = np.concatenate([needs.following[:kinds], needs.following[kinds:] + redone - whole])
    return (
        replace(
            needs,
            running=at(needs.running, others < 1, needs.running),
            done=at(needs.done, others < 1, needs.done),
            following=at(
                np.where(others < 1, needs.following, after_one), others < 2, needs.following
            ),
            second=at(
                np.concatenate([second, needs.second[kinds:]]), batch.ac_value > 1, needs.second
            ),
        ),
        at(np.concatenate([whole, first]), blocks, saved),
        at(working, others < 1, working),
    )


def _chunked_head(
    inputs: CostInputs,
    widths: Widths,
    head_local: FloatColumn,
    largest_gathered: FloatColumn,
    head_shard: FloatColumn,
) -> tuple[FloatColumn, FloatColumn]:
    """(what the head's backward needs besides, what is there at the loss of a chunk), (R, N) each.

    Both under a chunked loss. Head gradients of earlier chunks are a whole sum in the dtype of the
    reduction. With the last chunk it goes through the reduction's buffer, before the backward of
    the layers, so that no buffer is left for the last one.
    Source: torchtitan 0.3.0 components/loss.py (ChunkedLossWrapper: set_requires_gradient_sync),
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (post_backward).
    """
    costs, at_unit, head = inputs.unit.costs, inputs.at_unit, inputs.units[:, -1]
    held = head * costs.chunks_bytes[at_unit]
    running = head * costs.chunk_logits_bytes[at_unit]
    total = widths.reduce * head_local
    cast = np.where(widths.reduce != widths.master, widths.master, 0.0)
    return (
        held
        + np.maximum(
            running + widths.compute * head_local + total,
            2.0 * total + (widths.reduce + cast) * head_shard,
        )
        + head * (widths.prefetched - widths.gathered) * largest_gathered,
        held + total + head * widths.prefetched * largest_gathered,
    )


def _waiting_losses(inputs: CostInputs, in_flight: FloatColumn) -> FloatColumn:
    """Bytes of the losses that wait for their backward besides the one that runs, (R, N).

    A schedule that runs all forwards first (GPipe, LoopedBFS) holds those of all microbatches: the
    log-softmax in fp32 and the 16-bit logits, which are the stage's output. Where else a rank has
    several stages, no loss waits at the last.
    Source: torch/distributed/pipelining/stage.py (forward_one_chunk: fwd_cache, output_chunks).
    """
    batch, costs, at_unit = inputs.batch, inputs.unit.costs, inputs.at_unit
    waits = (batch.pp > 1) & ((batch.virtual_stages == 1) | (in_flight >= inputs.m))
    others = np.where(waits, in_flight - 1.0, 0.0)
    logits, leftover = costs.logits_bytes[at_unit], costs.leftover_bytes[at_unit]
    return others * np.where(leftover > 0, 3.0 * leftover, logits / 2.0)


def _largest(holds: BoolColumn | None, field: FloatColumn) -> FloatColumn:
    """Largest value over the layers that a rank holds; layers that it does not hold count as 0.

    (R, K, N) or None for all, (K, N) -> (R, N) or (N,). It goes unit by unit, because NumPy reduces
    a short middle axis slowly.
    """
    columns = [
        field[unit] if holds is None else np.where(holds[:, unit], field[unit], 0.0)
        for unit in range(len(field))
    ]
    return reduce(np.maximum, columns)


def _in_flight(inputs: CostInputs, row: int) -> FloatColumn:
    """Microbatches that one row of the ranks holds at its peak, (N,); 1 without a pipeline."""
    batch, rank, count = inputs.batch, inputs.rank[row], inputs.m.astype(np.int64)
    return by_schedule(
        batch,
        lambda s, rows: s.in_flight(
            rank[rows], batch.pp[rows], batch.virtual_stages[rows], count[rows]
        ),
        1.0,
    )


def _received_microbatches(inputs: CostInputs) -> FloatColumn:
    """Activations that a rank has receive buffers for, (R, N).

    torch's pipelines allocate one for what every microbatch brings to each stage: forward into all
    stages but the first, backward into all but the last. Elsewhere a microbatch's input counts
    while it is held.
    Source: torch/distributed/pipelining/stage.py (_create_act_recv_info, _create_grad_recv_info).
    """
    batch, units = inputs.batch, inputs.units
    ends = 2.0 * batch.virtual_stages - units[:, -2] - units[:, -1]
    return np.where(
        (batch.pp > 1) & inputs.job.rules.framework.buffers_every_receive, inputs.m * ends, 0.0
    )


def _held_bytes(
    inputs: CostInputs, in_flight: FloatColumn, saved: FloatColumn, boundary: FloatColumn
) -> FloatColumn:
    """Bytes, (R, N), that a rank holds at its fullest beyond its microbatches in flight.

    Only where W runs separately from I.
    """
    batch, held_bytes, extra = inputs.batch, inputs.unit.costs.held_bytes, np.zeros_like(in_flight)
    for schedule, rows in split_schedules(batch):
        pp, v, count = batch.pp[rows], batch.virtual_stages[rows], inputs.m[rows].astype(np.int64)
        whole_bytes = saved[:, rows] + boundary[:, rows]
        half_bytes = (
            on_ranks(_late(inputs.units[:, :, rows], v), held_bytes[:, inputs.at_unit[rows]])
            + boundary[:, rows]
        )
        for r in range(len(inputs.units)):
            peak_candidates = schedule.peak_candidates(inputs.rank[r, rows], pp, v, count)
            fullest = np.max(
                [whole * whole_bytes[r] + half * half_bytes[r] for whole, half in peak_candidates],
                axis=0,
            )
            extra[r, rows] = fullest - in_flight[r, rows] * whole_bytes[r]
    return extra


def _late(units: FloatColumn, virtual_stages: IntColumn) -> FloatColumn:
    """Units of a rank as if each of its stages held the head.

    Backward starts at the head, so its stage is the one whose W run late.
    """
    units = units.copy()
    units[:, -1] *= virtual_stages
    return units
