"""The bytes of each kind that every pipeline rank holds, which `cost.memory.peak` makes a peak of.

Letters: N layouts, R pipeline ranks priced, K + 2 units (layers by kind, embedding, head), L loads,
T pipelines (`cost.loads`).
"""

from dataclasses import replace
from functools import reduce

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.cost_inputs import CostInputs
from planner.cost.layer.trainer_kernels import chunks_loss, fuses_cross_entropy
from planner.cost.loads import Loads, Pipelines, at_rows, sums
from planner.cost.memory import host_activations, reserved
from planner.cost.memory.peak import LayerNeeds, RankShapes, Widths, layer_phases
from planner.cost.pipeline.schedule_columns import filled
from planner.rules import cuda_graphs
from planner.work.checkpointing import BLOCK

NOWHERE = -1e300  # bytes of a layer that stands nowhere: less than any other's, and 0 times it is 0


def rank_shapes(inputs: CostInputs) -> RankShapes:
    """Bytes on each rank of every kind: of each load (L,), and by its index (R, N)."""
    load, unit, shards = inputs.loads.of_ranks, inputs.unit, inputs.shards
    batch, units, at_unit, at_shard = load.batch, load.units, load.at_unit, load.at_shard
    job = inputs.job
    rules, zero = job.rules, np.zeros(len(load))
    local, shard = at_rows(shards.local, at_shard), at_rows(shards.shard, at_shard)
    narrow = bool((shards.gathered != shards.local).any())
    gathered = at_rows(shards.gathered, at_shard) if narrow else local
    saved, transient = (at_rows(unit.saved_bytes, at_unit), at_rows(unit.transient_bytes, at_unit))
    stream = at_rows(unit.boundary_bytes, at_unit)
    holds = _held_kinds(load)
    head, table, held_local = units[-1], units[-2], sums(units, local)
    copies = (
        sums(units, at_rows(shards.copies_bytes, at_shard)) if rules.sharding.keeps_copies else zero
    )
    graphs = cuda_graphs.captured(batch, job.rules_context)
    chunked = chunks_loss(job.training, rules)
    widths = Widths.of(batch, load.m, rules, chunked)
    needs = LayerNeeds(
        running=transient[:-2],
        done=at_rows(unit.done_bytes[:-2], at_unit),
        following=at_rows(unit.next_bytes[:-2], at_unit),
        second=at_rows(unit.second_bytes[:-2], at_unit),
        reduced=at_rows(shards.together[:-2], at_shard),
        shard=shard[:-2],
        gathered=gathered[:-2],
    )
    needs, first_saved, working = _in_blocks(
        load, needs, saved[:-2], at_rows(unit.working_bytes[:-2], at_unit)
    )
    phases = layer_phases(needs, widths)
    last, following, second = (_largest(holds, phase) for phase in phases)
    largest_shard = _largest(holds, shard[:-2])
    largest_gathered = _largest(holds, gathered[:-2])
    several = reduce(np.add, units[:-2]) > 2
    following = following - np.where(several, 0.0, widths.prefetched * largest_gathered)
    head_gathered, tied = head * gathered[-1], head * table * job.model.tie_word_embeddings
    head_local = head * local[-1] if narrow else head_gathered
    head_bytes, chunks_bytes = head * transient[-1], zero
    if chunked:
        head_bytes, chunks_bytes = _chunked_head(
            inputs, widths, head_local, largest_gathered, head * shard[-1]
        )
        head_local = zero
    root = rules.ends_in_root & (batch.pp == 1) & (batch.zero_stage > 0)
    own_head, own_table = (np.where(root, 0.0, place) for place in (head, table))
    kept, all_saved = sums(units, shard), sums(units, saved)
    gone = host_activations.away(batch, job.model.num_hidden_layers)
    if gone.any():
        all_saved = all_saved - gone * sums(units[:-2], saved[:-2])
    # The first layer's backward prefetches the embedding instead of a layer. One more shard waits,
    # and the activations of one layer less are saved.
    prefetch = (
        widths.prefetched * (own_table * gathered[-2] - largest_gathered)
        - widths.resident * largest_gathered
    )
    first = prefetch + widths.master * largest_shard - _largest(holds, first_saved)
    second = np.where(several, second + np.maximum(first, 0.0), 0.0)
    leftover = at_rows(unit.leftover_bytes, at_unit)
    embedding = table * local[-2]
    return RankShapes(
        local=held_local,
        shard=kept,
        vocabulary_shard=table * shard[-2] + head * shard[-1],
        padding=sums(units, at_rows(shards.padding, at_shard)),
        fixed_shard=reserved.fixed_gradients(graphs, kept),
        late_shard=np.minimum(own_head * shard[-1] + largest_shard, kept),
        early_shard=np.maximum(
            kept - table * shard[-2] - (head - own_head) * shard[-1] - 2.0 * largest_shard, 0.0
        ),
        largest_local=_largest(holds, local[:-2]) if narrow else largest_gathered,
        head_local=np.where(root, 0.0, head_local),
        head_shard=own_head * shard[-1],
        embedding_local=embedding,
        embedding_whole=embedding * batch.tp if rules.framework.whole_table_gradient else embedding,
        gathered=sums(units, gathered) if narrow else held_local,
        largest_gathered=largest_gathered,
        head_gathered=np.where(root, 0.0, head_gathered + tied * gathered[-2]),
        copies_bytes=copies,
        distinct=_largest((units > 0).astype(np.float64), at_rows(shards.distinct, at_shard))
        if rules.sharding.keeps_copies
        else zero,
        root_gathered=np.where(root, table * gathered[-2] + head * gathered[-1], 0.0),
        root_head=np.where(root, head * local[-1] + tied * local[-2], 0.0),
        saved_bytes=all_saved,
        head_saved_bytes=head * saved[-1],
        head_bytes=head_bytes,
        chunks_bytes=chunks_bytes,
        last_layer_bytes=last,
        next_layer_bytes=following,
        second_layer_bytes=second,
        stream_bytes=stream,
        logits_bytes=head
        * (at_rows(unit.logits_bytes, at_unit) + np.where(batch.pp > 1, leftover, 0.0)),
        leftover_bytes=head * leftover,
        graph_bytes=reserved.private_bytes(graphs, last, stream),
        working_bytes=_largest(holds, working),
        **_by_place(inputs, all_saved),
    )


def _by_place(inputs: CostInputs, saved: FloatColumn) -> dict[str, FloatColumn]:
    """Bytes of ranks by their index in the pipeline, (R, N).

    Counts depend on pipelines alone, and bytes of each on loads.
    saved (L,): of one microbatch.
    """
    framework, pipes = inputs.job.rules.framework, inputs.loads.pipelines
    batch, of_layouts = pipes.batch, pipes.of_layouts
    in_flight, piped = _in_flight(pipes), batch.pp > 1
    all_in_flight = piped & (in_flight >= pipes.m)
    # A stage's input is the buffer that received it, which `received_bytes` counts.
    ends_kept = batch.virtual_stages * float(framework.keeps_stage_outputs) - (
        (batch.virtual_stages - pipes.tables) * float(framework.buffers_every_receive)
    )
    stream = at_rows(inputs.unit.boundary_bytes, inputs.at_unit)
    boundary = of_layouts(piped * ends_kept) * stream
    microbatches = of_layouts(in_flight)
    all_at_once = all_in_flight.astype(np.float64)
    return {
        "in_flight": microbatches,
        "all_in_flight": of_layouts(all_at_once) if all_in_flight.any() else all_at_once[:, :1],
        "boundary_bytes": boundary,
        "received_bytes": of_layouts(_received_microbatches(inputs)) * stream,
        "waiting_loss_bytes": _waiting_losses(inputs, in_flight, all_in_flight),
        "held_bytes": _held_bytes(inputs, microbatches, saved, boundary),
    }


def _held_kinds(load: Loads) -> FloatColumn | None:
    """1 where a rank holds layers of a kind, else 0, (K, L); None where all hold all.

    Without block-N, the kinds that it recomputes are those of the layout's mode again.
    """
    holds = load.units[:-2] > 0
    blocks = load.batch.ac_kind == BLOCK
    if blocks.any():
        kinds = len(holds) // 2
        holds[kinds:] = np.where(blocks, holds[kinds:], holds[:kinds])
    return None if holds.all() else holds.astype(np.float64)


def _in_blocks(
    load: Loads, needs: LayerNeeds, saved: FloatColumn, working: FloatColumn
) -> tuple[LayerNeeds, FloatColumn, FloatColumn]:
    """(needs, what the first layer saves, what a layer's forward frees), (K, L) each, by place.

    block-N recomputes the first N layers of each stage, so that the layers behind them, which run
    backward first, recompute nothing. A kind that does not stand in a place does not count there.
    saved, working: of layers of each kind.
    """
    batch, others = load.batch, load.spared
    blocks = batch.ac_kind == BLOCK
    if not blocks.any():
        return needs, saved, working
    kinds = len(saved) // 2
    least = np.full_like(saved, NOWHERE)
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
    """(what the head's backward needs besides, what is there at the loss of a chunk), (L,) each.

    Both under a chunked loss. Head gradients of earlier chunks are a whole sum in the dtype of the
    reduction. With the last chunk it goes through the reduction's buffer, before the backward of
    the layers, so that no buffer is left for the last one.
    Source: torchtitan 0.3.0 components/loss.py (ChunkedLossWrapper: set_requires_gradient_sync),
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (post_backward).
    """
    load, costs = inputs.loads.of_ranks, inputs.unit
    at_unit, head = load.at_unit, load.units[-1]
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


def _waiting_losses(
    inputs: CostInputs, in_flight: FloatColumn, all_in_flight: BoolColumn
) -> FloatColumn:
    """Bytes of the losses that wait for their backward besides the one that runs, (R, N).

    A schedule that runs all forwards first (GPipe, LoopedBFS) holds those of all microbatches: the
    log-softmax in fp32 and the 16-bit logits, which are the stage's output, or the logits alone
    where their gradient overwrites them. Where else a rank has several stages, no loss waits at the
    last.
    in_flight, all_in_flight (R, T): of the pipelines.
    Source: torch/distributed/pipelining/stage.py (forward_one_chunk: fwd_cache, output_chunks).
    """
    pipes, costs, at_unit = inputs.loads.pipelines, inputs.unit, inputs.at_unit
    waits = (pipes.batch.pp > 1) & ((pipes.batch.virtual_stages == 1) | all_in_flight)
    others = np.where(waits, in_flight - 1.0, 0.0) * pipes.heads
    logits, leftover = costs.logits_bytes, costs.leftover_bytes
    part = 1.0 if fuses_cross_entropy(inputs.job.training, inputs.job.rules) else 0.5
    waiting = np.where(leftover > 0, 3.0 * leftover, part * logits)[at_unit]
    return np.asarray(pipes.of_layouts(others) * waiting)


def _largest(holds: FloatColumn | None, field: FloatColumn) -> FloatColumn:
    """Largest value over the layers that a rank holds; layers that it does not hold count as 0.

    (K, L) or None for all, (K, L) -> (L,). It goes unit by unit, because NumPy reduces a short axis
    slowly.
    """
    return reduce(np.maximum, field if holds is None else field * holds)


def _in_flight(pipes: Pipelines) -> FloatColumn:
    """Microbatches that the ranks of each pipeline hold at their peak, (R, T); 1 without one."""
    batch, rank, count = pipes.batch, pipes.rank, pipes.counts
    return filled(
        rank.shape,
        pipes.schedules,
        lambda s, rows: s.in_flight(
            rank[:, rows], batch.pp[rows], batch.virtual_stages[rows], count[rows]
        ),
        1.0,
    )


def _received_microbatches(inputs: CostInputs) -> FloatColumn:
    """Activations that the ranks of each pipeline have receive buffers for, (R, T).

    torch's pipelines allocate one for what every microbatch brings to each stage: forward into all
    stages but the first, backward into all but the last. Elsewhere a microbatch's input counts
    while it is held.
    Source: torch/distributed/pipelining/stage.py (_create_act_recv_info, _create_grad_recv_info).
    """
    pipes = inputs.loads.pipelines
    ends = 2.0 * pipes.batch.virtual_stages - pipes.tables - pipes.heads
    buffered = (pipes.batch.pp > 1) & inputs.job.rules.framework.buffers_every_receive
    return np.where(buffered, pipes.m * ends, 0.0)


def _held_bytes(
    inputs: CostInputs, in_flight: FloatColumn, saved: FloatColumn, boundary: FloatColumn
) -> FloatColumn:
    """Bytes, (R, N), that a rank holds at its fullest beyond its microbatches in flight.

    Only where W runs separately from I; (R, 1) where it does nowhere.
    saved (L,): of one microbatch.
    """
    pipes, load = inputs.loads.pipelines, inputs.loads.of_ranks
    split = [(schedule, rows) for schedule, rows in pipes.schedules if schedule.splits_backward]
    if not split:
        return np.zeros((len(in_flight), 1))
    extra = np.zeros_like(in_flight)
    held_bytes, count = at_rows(inputs.unit.held_bytes, load.at_unit), pipes.counts
    held, of_head = sums(load.units, held_bytes), load.units[-1] * held_bytes[-1]
    place = np.full(len(count), -1)
    for schedule, rows in split:
        pp, v = pipes.batch.pp[rows], pipes.batch.virtual_stages[rows]
        place[rows] = np.arange(len(rows))
        of_each = place.take(pipes.at)
        place[rows] = -1
        layouts = np.flatnonzero(of_each >= 0)
        at, loads = of_each[layouts], inputs.loads.at_rank.take(layouts, axis=1)
        own = at_rows(boundary, layouts)
        # Backward starts at the head, so each of its rank's stages counts as if it held the head:
        # its W run late.
        half_bytes = held.take(loads) + (v[at] - 1) * of_head.take(loads) + own
        whole_bytes = saved.take(loads) + own
        fullest = reduce(
            np.maximum,
            [
                at_rows(whole, at) * whole_bytes + at_rows(half, at) * half_bytes
                for whole, half in schedule.peak_candidates(pipes.rank[:, rows], pp, v, count[rows])
            ],
        )
        extra[:, layouts] = fullest - at_rows(in_flight, layouts) * whole_bytes
    return extra
