"""Memory of pipeline ranks in the phase of the step that needs most.

Letters: R ranks priced, K kinds of layer, N layouts; arrays are (R, N) if not said.
Eight phases compete (`Phase`). What lives in each is written down in `_phases`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.layer.trainer_kernels import fuses_cross_entropy
from planner.cost.memory.reserved import cached_bytes
from planner.cost.memory.worst_phase import (
    OnRanks,
    PhaseBytes,
    PlaceBytes,
    Streams,
    Worst,
    chosen,
    worst_phase,
)
from planner.specs.training import OPTIMIZER_STATE_BYTES, VOCABULARY_STATE_BYTES, TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.registry import training_release

FP32_BYTES = 4.0
SCALES_WITH_MASTER = ("adamw", "sgd", "muon")


class Phase(StrEnum):
    """When memory may peak, in the order of a step; the text completes "during ...".

    NEXT_TO_LAST_LAYER: while the last layer's gradients are being reduced.
    SECOND_LAYER: when almost all shards of gradients wait.
    FIRST_REDUCTION: behind a pipeline, whose gradients wait whole for the last microbatch.
    """

    LOSS = "the loss"
    HEAD = "the backward of the output head"
    LAST_LAYER = "the backward of the last layer"
    NEXT_TO_LAST_LAYER = "the backward of the layer before the last"
    SECOND_LAYER = "the backward of the second layer"
    EMBEDDING = "the backward of the embedding"
    FIRST_REDUCTION = "the first reduction of gradients"
    OPTIMIZER_STEP = "the optimizer step"


PHASES = tuple(Phase)
MOVING = ("gradients", "activations", "logits", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShapes:
    """Shapes behind memory: sums over the units of a rank, unless stated otherwise.

    Elements:
    local: parameters after TP and EP.
    shard: of those, the ones that a rank keeps under full sharding.
    vocabulary_shard: of those, of embedding and head.
    padding: of buffers of parameters and gradients.
    fixed_shard: of those, the ones whose gradients stay from step to step.
    largest_local: of the largest layer.
    head_local, embedding_local: of the head, of the embedding.
    head_shard: of the head's shard.
    late_shard: of the shards of the head and one layer.
    early_shard: of all shards but those of the embedding and two layers.
    embedding_whole: of the embedding's gradient. Under DTensor's TP a rank sums its tokens' rows
        of the whole table.
    gathered, largest_gathered, head_gathered: of `local`, of one layer, of the head, as they are
        gathered. A quantised element counts as the share of a `param_dtype` element that it takes.
    distinct: of `local`, one weight of every shape.
    root_gathered: of FSDP's root unit as it is gathered, where it has embedding and head, which
        other fields then do not count as gathered; 0 elsewhere.
    root_head: of it, what has a gradient since the backward of the head.

    Bytes:
    copies_bytes: quantised copies of weights that stay from step to step, less the parameters they
        replace.
    saved_bytes: activations saved for the backward of one microbatch.
    head_saved_bytes: the head's share of `saved_bytes`.
    head_bytes: what the head's backward needs besides.
    last_layer_bytes, next_layer_bytes, second_layer_bytes: what a layer's backward needs besides
        (`layer_phases`).
    in_flight: microbatches whose activations are saved (a count).
    held_bytes: saved besides those of `in_flight`, where weight gradients are computed later.
    boundary_bytes: stage inputs saved for one microbatch; less than 0 where they are buffers of
        `received_bytes`.
    received_bytes: buffers that a pipeline allocates for what all microbatches receive.
    stream_bytes: one activation between two layers.
    logits_bytes: at the loss; 0 without the head.
    waiting_loss_bytes: of losses whose backward has not begun, while one runs.
    all_in_flight: 1 where the first backward of a pipeline comes after the last forward, else 0.
    chunks_bytes: what a chunked loss holds besides logits while it runs; 0 for a whole one.
    leftover_bytes: of the logits, freed before the peak of the loss and still cached.
    working_bytes: most that a layer's forward computes and frees.
    graph_bytes: reserved for CUDA graphs (`reserved.private_bytes`).
    """

    local: FloatColumn
    shard: FloatColumn
    vocabulary_shard: FloatColumn
    padding: FloatColumn
    fixed_shard: FloatColumn
    largest_local: FloatColumn
    head_local: FloatColumn
    head_shard: FloatColumn
    late_shard: FloatColumn
    early_shard: FloatColumn
    embedding_local: FloatColumn
    embedding_whole: FloatColumn
    gathered: FloatColumn
    largest_gathered: FloatColumn
    head_gathered: FloatColumn
    copies_bytes: FloatColumn
    distinct: FloatColumn
    root_gathered: FloatColumn
    root_head: FloatColumn
    saved_bytes: FloatColumn
    head_saved_bytes: FloatColumn
    head_bytes: FloatColumn
    last_layer_bytes: FloatColumn
    next_layer_bytes: FloatColumn
    second_layer_bytes: FloatColumn
    in_flight: FloatColumn
    held_bytes: FloatColumn
    boundary_bytes: FloatColumn
    received_bytes: FloatColumn
    stream_bytes: FloatColumn
    logits_bytes: FloatColumn
    waiting_loss_bytes: FloatColumn
    all_in_flight: FloatColumn
    chunks_bytes: FloatColumn
    leftover_bytes: FloatColumn
    working_bytes: FloatColumn
    graph_bytes: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes in the worst phase of every rank.

    still: parameters that never leave the device, states of the optimizer with masters where they
        are separate from parameters; of loads.
    moving: activations, logits, buffers and workspace, which come and go within a step.
    cached: reserved besides by the caching allocator (`cost.memory.reserved`).
    pools: reserved besides for CUDA graphs.
    found: the worst phase.
    place: how columns of loads are read on ranks.
    phases: the bytes of every phase on ranks. Only readers of single parts ask for them; a search
        does not.
    """

    still: tuple[FloatColumn, FloatColumn]
    workspace_bytes: float
    moving: FloatColumn
    allocated: FloatColumn
    cached: FloatColumn
    pools: FloatColumn | float
    found: Worst
    place: OnRanks
    phases: Callable[[], Iterator[PhaseBytes]]

    @property
    def resident(self) -> FloatColumn:
        """Parameters that never leave the device."""
        return self.place(self.still[0])

    @property
    def optimizer(self) -> FloatColumn:
        """States of the optimizer, with masters where they are separate from parameters."""
        return self.place(self.still[1])

    @property
    def worst(self) -> IntColumn:
        """Index of the worst phase in PHASES."""
        return 2 * self.found.pair + chosen(self.found.pair, self.found.seconds, self.place)

    def phase(self, rank: int, row: int) -> Phase:
        """The phase in which this rank of this layout peaks."""
        return PHASES[int(self.worst[rank, row])]

    def parts(self) -> dict[str, FloatColumn]:
        """Bytes by part, all but the last of which sum to it.

        parameters: resident ones and gathered copies. gradients, activations, logits, buffers: of
        `PhaseBytes`.
        """
        phases = list(self.phases())
        copies, *others = (
            np.choose(
                self.worst,
                [np.broadcast_to(getattr(one, name), self.worst.shape) for one in phases],
            )
            for name in ("copies", *MOVING)
        )
        return {
            "parameters": self.resident + copies,
            "optimizer": self.optimizer,
            **dict(zip(MOVING, others, strict=True)),
            "workspace": np.full_like(self.allocated, self.workspace_bytes),
            "allocated": self.allocated,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one parameter in each form, (N,).

    compute, reduce, master: in `param_dtype`, `reduce_dtype`, `master_dtype`.
    gathered: in a copy that is gathered for one unit at a time; 0 where there is none.
    resident: in a gathered copy that stays from forward to backward; 0 where there is none.
    prefetched: in the copy that backward gathers for the next unit; 0 where it gathers none.
    reduced: in a reduction's buffer; 0 where a microbatch ends without one.
    piped: there is a pipeline.
    accumulates: there are several microbatches.
    """

    compute: FloatColumn
    reduce: FloatColumn
    master: FloatColumn
    gathered: FloatColumn
    prefetched: FloatColumn
    resident: FloatColumn
    reduced: FloatColumn
    piped: BoolColumn
    accumulates: BoolColumn

    @classmethod
    def of(
        cls,
        batch: LayoutBatch,
        num_microbatches: FloatColumn,
        rules: TrainerRules,
        chunked_loss: bool = False,
    ) -> "Widths":
        """The widths of N layouts under one trainer.

        FSDP: stage 3 gathers unit by unit; stage 2 keeps what it gathered until backward, and so
        does a pipeline below stage 3. A pipeline reduces after its last microbatch. Stage 0 without
        TP and PP copies weights under autocast, for backward as well. A chunked loss ends a
        backward of its own before that of the layers, which clears the order in which FSDP would
        prefetch; with expert parallelism TorchTitan sets its own.
        Source: torch/distributed/fsdp/_fully_shard (FSDPState._root_post_backward_final_callback),
        torchtitan distributed/utils.py (maybe_enable_amp), 0.3.0 distributed/fsdp.py
        (set_modules_to_backward_prefetch).
        """
        compute, reduce, master = batch.param_bytes, batch.reduce_bytes, batch.master_bytes
        piped, accumulates, stage = batch.pp > 1, num_microbatches > 1, batch.zero_stage
        if rules.sharding.keeps_copies:
            gathered = prefetched = np.where(stage == 3, compute, 0.0)
            resident, reduced = np.zeros_like(compute), np.where(stage == 3, reduce, 0.0)
        else:
            stays = (stage == 2) | (piped & (stage < 3)) | (stage == 0)
            copied = (stage > 0) | ((compute < master) & (batch.tp == 1) & ~piped)
            gathered = np.where(stays, 0.0, compute)
            prefetched = np.where(batch.ep > 1, gathered, 0.0) if chunked_loss else gathered
            resident = np.where(stays & copied, compute, 0.0)
            reduced = np.where((piped & accumulates) | (stage == 0), 0.0, reduce)
        return cls(
            compute=compute,
            reduce=reduce,
            master=master,
            gathered=gathered,
            prefetched=prefetched,
            resident=resident,
            reduced=reduced,
            piped=piped,
            accumulates=accumulates,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNeeds:
    """Memory for the backward of a layer itself, before gathers and reductions; (K, N).

    Bytes, fields of `checkpointing.Kept`:
    running: while it runs as the last layer (transient_bytes).
    done: once it has run (done_bytes).
    following: while the layer before it runs (next_bytes).
    second: while the second layer runs (second_bytes).

    Elements:
    reduced: of the parameters whose gradients are reduced together.
    shard: of those, the ones that the rank keeps.
    gathered: of its gathered parameters.
    """

    running: FloatColumn
    done: FloatColumn
    following: FloatColumn
    second: FloatColumn
    reduced: FloatColumn
    shard: FloatColumn
    gathered: FloatColumn


def layer_phases(needs: LayerNeeds, widths: Widths) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Bytes (K, N) that a layer's backward adds as the last layer, the one before it, the second.

        last       running + g + p
        following  max(following + g + p, done + g - s) + r - c
        second     second + g + p + r + 2 c

    g: one layer's gathered parameters.
    p: the same of the next layer, where backward prefetches it.
    r: the buffer in which the gradients of the layer that ran before are being reduced.
    s: the shard of those gradients. While the buffer is filled, the gradients are there and their
        shard is not yet, although `_gradients` counts it; the prefetch has not begun.
    c: the resident copy of a layer's weights, where backward frees it; 0 in a pipeline. The last
        layer's is freed when the layer before it runs, although `_phases` counts it. In the second
        layer `_phases` counts that of no layer, and two are there.
    Source: FSDPParamGroup.pre_backward (one prefetch), post_backward (the reduction's input lives
    until the next reduction).
    """
    gathered = widths.gathered * needs.gathered
    both = gathered + widths.prefetched * needs.gathered
    reduction = widths.reduced * needs.reduced
    copy = np.where(widths.piped, 0.0, widths.resident) * needs.gathered
    filling = needs.done + gathered - widths.master * needs.shard
    return (
        needs.running + both,
        np.maximum(needs.following + both, filling) + reduction - copy,
        needs.second + both + reduction + 2.0 * copy,
    )


def rank_memory(
    shapes: RankShapes,
    batch: LayoutBatch,
    num_microbatches: FloatColumn,
    training: TrainingSpec,
    rules: TrainerRules,
    workspace_bytes: float,
    at: IntColumn | None = None,
) -> PeakMemory:
    """Memory of every rank in its worst phase.

    batch, num_microbatches: of the loads.
    at (R, N): the load of each rank; None where columns of loads are those of ranks.
    Sources: Rajbhandari 2020 (ZeRO); FSDP2 (torch/distributed/fsdp/_fully_shard: unsharded
    accumulated gradients keep reduce_dtype, parameters of the next unit are prefetched);
    Megatron-LM's distributed optimizer.
    """
    widths = Widths.of(batch, num_microbatches, rules)
    on_device = 1.0 - batch.host_share
    side_stream: tuple[FloatColumn, ...] = ()
    if rules.sharding.keeps_copies:
        parameters, optimizer, buffer = _distributed(shapes, batch, widths, training, rules)
        gradients: tuple[FloatColumn, ...] = (buffer,) * len(PHASES)
    else:
        parameters = shapes.shard * widths.master * on_device
        optimizer = _states(shapes, shapes.shard, widths, training)
        gradients, side_stream = _gradients(shapes, batch, widths, on_device)
        if shapes.fixed_shard.any():
            fixed = shapes.fixed_shard * widths.master * on_device
            gradients = tuple(np.maximum(column, fixed) for column in gradients)
    optimizer = optimizer * on_device
    waits = (
        rules.sharding.reduces_by_unit & widths.piped & widths.accumulates & (batch.zero_stage > 0)
    )
    place = OnRanks(at)
    by_place = _by_place(shapes, widths, gradients[0], waits, place)
    phases = list(_phases(shapes, widths, gradients, waits))
    if rules.sharding.keeps_copies:
        found = worst_phase(phases, by_place, None, place)
        cached = place(_large_requests(shapes, widths, training, rules))
    else:
        holes, gathers = _holes_and_gathers(shapes, batch, widths)
        streams = Streams(side_stream, holes)
        found = worst_phase(phases, by_place, streams, place)
        cached = cached_bytes(found.own, place(streams.most_apart + gathers), found.bytes)
    return PeakMemory(
        still=(parameters, optimizer),
        workspace_bytes=workspace_bytes,
        moving=found.moving + workspace_bytes,
        allocated=place(parameters + optimizer + workspace_bytes) + found.bytes,
        cached=cached,
        pools=place(shapes.graph_bytes) if shapes.graph_bytes.any() else 0.0,
        found=found,
        place=place,
        phases=partial(by_place.added, phases, place),
    )


def expandable_segments(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether a run's allocator grows its segments in place."""
    given = training.expandable_segments
    return rules.expandable_segments if given is None else given


def _large_requests(
    shapes: RankShapes, widths: Widths, training: TrainingSpec, rules: TrainerRules
) -> FloatColumn:
    """Bytes that a distributed optimizer's allocator holds beyond the peak, (L,).

    Its step fills buffers that stay, so that the rules of `cached_bytes` do not apply. Its largest
    requests are left, where segments cannot grow: 16-bit logits are cut from the block that was
    freed of their fp32 copy, so that the next copy takes a new one; and the 16-bit gradient of the
    token table or of the head is larger than what a layer frees.
    Source: Megatron-LM core/tensor_parallel/cross_entropy.py (calculate_logits_max: float()),
    layers.py (dummy of grad_weight), CUDACachingAllocator.cpp (get_free_block: the smallest block
    that is large enough; should_split).
    """
    if expandable_segments(training, rules):
        return np.zeros_like(shapes.local)
    whole = not fuses_cross_entropy(training, rules)
    copy = whole * FP32_BYTES / rules.loss_bytes * shapes.logits_bytes
    return np.asarray(copy + widths.compute * np.maximum(shapes.embedding_local, shapes.head_local))


def _holes_and_gathers(
    shapes: RankShapes, batch: LayoutBatch, widths: Widths
) -> tuple[FloatColumn, FloatColumn]:
    """(holes at the loss, all-gathers), (L,): FSDP's for `cached_bytes`.

    At the loss, what the last layer's forward freed is in pieces smaller than the logits. Two
    all-gathers are alive, since one is prefetched.
    """
    loss = shapes.leftover_bytes + np.where(shapes.leftover_bytes > 0, shapes.working_bytes, 0.0)
    second = np.maximum(
        np.maximum(shapes.head_gathered, shapes.embedding_local),
        np.maximum(shapes.root_gathered, shapes.largest_gathered),
    )
    gathers = np.where(
        batch.zero_stage > 0, widths.compute * (shapes.largest_gathered + second), 0.0
    )
    return loss, gathers


def _by_place(
    shapes: RankShapes, widths: Widths, gradients: FloatColumn, waits: BoolColumn, place: OnRanks
) -> PlaceBytes:
    """Bytes that a rank's index in its pipeline adds, by each two of PHASES.

    The microbatch that runs backward has passed its layers in the second layer and the embedding;
    those in flight have not. In the first reduction and the optimizer step none is in flight.
    gradients: at the first backward.
    """
    microbatch = place(shapes.saved_bytes) + shapes.boundary_bytes
    whole = shapes.in_flight * microbatch + shapes.held_bytes
    others, losses = whole - microbatch, shapes.waiting_loss_bytes
    saved: tuple[FloatColumn, ...] = (whole + losses,) * 2
    total, waiting = saved, shapes.all_in_flight
    if waiting.any() and waits.any():
        # Before the first backward there is no gradient, in the last layer's its own and the
        # head's; after the first microbatch there are all, and one microbatch less. The fuller
        # moment counts.
        waiting = waiting * place(waits)
        own = widths.reduce * (shapes.largest_local + shapes.head_local)
        missing = [
            waiting * place(np.maximum(absent, 0.0)) for absent in (gradients, gradients - own)
        ]
        total = tuple(saved[0] - np.minimum(absent, microbatch) for absent in missing)
        saved = tuple(saved[0] - microbatch * (absent > microbatch) for absent in missing)
    return PlaceBytes(
        activations=(*saved, others, 0.0),
        total=(*total, others, 0.0),
        received=shapes.received_bytes,
    )


def _phases(
    shapes: RankShapes, widths: Widths, gradients: tuple[FloatColumn, ...], waits: BoolColumn
) -> Iterator[PhaseBytes]:
    """The bytes of each phase, (L,), in the order of PHASES, but for what `_by_place` adds.

    Backward frees the resident copy of every unit that it passes. A pipeline frees none, because
    its next microbatch needs them.
    waits: whole gradients wait for the last microbatch. Then a unit's copy is freed and its
        gradients are put into the reduction's buffer.
    Source: torch/distributed/pipelining/stage.py (perform_reduce_grad),
    FSDPParamGroup.post_backward.
    """
    all_copies = widths.resident * shapes.gathered
    root = widths.gathered * shapes.root_gathered
    with_root = root + widths.compute * shapes.root_head
    head_gathered = root + widths.gathered * shapes.head_gathered
    # The last gather of forward has its result and its copy at once. Where copies stay they add to
    # all others, before the head's activations and logits are there.
    gathering = np.where(
        widths.piped,
        0.0,
        widths.resident * shapes.largest_gathered - shapes.head_saved_bytes - shapes.logits_bytes,
    )
    yield PhaseBytes(
        copies=all_copies,
        gradients=gradients[0],
        activations=shapes.chunks_bytes,
        logits=shapes.logits_bytes,
        buffers=head_gathered + np.maximum(gathering, 0.0),
    )
    yield PhaseBytes(
        copies=all_copies,
        gradients=gradients[1],
        activations=shapes.head_bytes,
        logits=0.0,
        buffers=head_gathered + widths.gathered * shapes.largest_gathered,
    )
    layer_copies = np.where(
        widths.piped, all_copies, widths.resident * (shapes.gathered - shapes.head_gathered)
    )
    yield PhaseBytes(
        copies=layer_copies,
        gradients=gradients[2],
        activations=shapes.last_layer_bytes - shapes.head_saved_bytes,
        logits=0.0,
        buffers=with_root + widths.reduced * shapes.head_local,
    )
    yield PhaseBytes(
        copies=layer_copies,
        gradients=gradients[3],
        activations=shapes.next_layer_bytes - shapes.head_saved_bytes,
        logits=0.0,
        buffers=with_root,
    )
    table_copy = widths.resident * np.maximum(shapes.embedding_local, shapes.root_gathered)
    table_copy = np.where(widths.piped, all_copies, table_copy)
    yield PhaseBytes(
        copies=table_copy,
        gradients=gradients[4],
        activations=shapes.second_layer_bytes,
        logits=0.0,
        buffers=with_root,
    )
    yield PhaseBytes(
        copies=table_copy,
        gradients=gradients[5],
        activations=shapes.stream_bytes,
        logits=0.0,
        buffers=_embedding_bytes(shapes, widths, waits),
    )
    reduction = np.maximum(
        widths.reduce * shapes.largest_local - widths.resident * shapes.largest_gathered, 0.0
    )
    yield PhaseBytes(
        copies=np.where(waits, all_copies, 0.0),
        gradients=np.where(waits, gradients[6], 0.0),
        activations=0.0,
        logits=0.0,
        buffers=np.where(waits, reduction, 0.0),
    )
    yield PhaseBytes(copies=0.0, gradients=gradients[7], activations=0.0, logits=0.0, buffers=0.0)


def _embedding_bytes(shapes: RankShapes, widths: Widths, waits: BoolColumn) -> FloatColumn:
    """Buffers of the embedding's backward: the larger of two.

    While the gradient is computed: the gathered table, its gradient, and the first layer's
    gradients in the buffer of their reduction. Afterwards: the gradient, and the rank's own rows of
    it, under DTensor's TP as a scattered copy, else in the buffer of their reduction. A root unit
    of embedding and head holds both, whose gradients are reduced together.
    """
    root = shapes.root_gathered
    table = widths.gathered * np.maximum(shapes.embedding_local, root)
    gradient = widths.compute * (shapes.embedding_whole + shapes.root_head)
    scatters = shapes.embedding_whole > shapes.embedding_local
    own_rows = np.where(scatters, widths.compute * ~waits, widths.reduced) * shapes.embedding_local
    after = np.where(root > 0, (widths.compute + widths.reduced) * root, gradient + own_rows)
    return np.maximum(table + gradient + widths.reduced * shapes.largest_local, after)


def _distributed(
    shapes: RankShapes,
    batch: LayoutBatch,
    widths: Widths,
    training: TrainingSpec,
    rules: TrainerRules,
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """(parameters, optimizer with masters, gradients) under a distributed optimizer.

    A whole copy of the parameters is on every rank. Stage 1 shards the optimizer, stage 2 the
    gradients too, stage 3 also the parameters. Masters as narrow as the parameters are these.
    """
    stage = batch.zero_stage
    wide = rules.gradient_dtype == "float32"
    gradient = widths.reduce if wide else np.full_like(widths.reduce, 2.0)
    extra = shapes.local * widths.compute * (rules.gradients_apart & (gradient > widths.compute))
    masters = np.where(widths.master > widths.compute, widths.master, 0.0)
    held = np.where(stage == 3, shapes.shard, shapes.local)
    parameters = (held + shapes.padding) * widths.compute + shapes.copies_bytes * held / np.maximum(
        shapes.local, 1.0
    )
    updated = np.where(stage >= 1, shapes.shard, shapes.local)
    optimizer = _states(shapes, updated, widths, training, masters)
    if rules.placeholders_since and training_release(training).named.not_before_month(
        rules.placeholders_since
    ):
        extra = extra + shapes.distinct * widths.compute
    return (
        parameters,
        optimizer,
        np.where(stage >= 2, shapes.shard, shapes.local + shapes.padding) * gradient + extra,
    )


def _states(
    shapes: RankShapes,
    updated: FloatColumn,
    widths: Widths,
    training: TrainingSpec,
    masters: FloatColumn | float = 0.0,
) -> FloatColumn:
    """Bytes of states, and of masters, for the parameters that a rank updates."""
    scale = (
        widths.master / 4.0
        if training.optimizer in SCALES_WITH_MASTER
        else np.ones_like(widths.master)
    )
    each = OPTIMIZER_STATE_BYTES[training.optimizer] * scale + masters
    more = VOCABULARY_STATE_BYTES.get(training.optimizer)
    found = updated * each
    return found if more is None else found + shapes.vocabulary_shard * more * scale


def _gradients(
    shapes: RankShapes, batch: LayoutBatch, widths: Widths, on_device: FloatColumn
) -> tuple[tuple[FloatColumn, ...], tuple[FloatColumn, ...]]:
    """(gradients alive in each phase, those of them that the reductions' stream allocated).

    FSDP, or DDP at stage 0. Alive are the shards of finished units, and all shards while gradients
    accumulate. In a pipeline whole gradients wait for the last microbatch. DDP has its buckets
    besides (gradient_as_bucket_view is off). An optimizer in the backward pass leaves none.
    """
    width = widths.master * on_device
    head, late, early, sharded = (
        part * width
        for part in (shapes.head_shard, shapes.late_shard, shapes.early_shard, shapes.shard)
    )
    whole, applied = widths.piped & (batch.zero_stage > 0), batch.optimizer_in_backward
    table = shapes.embedding_whole - shapes.embedding_local
    waiting = np.where(
        widths.accumulates, np.where(whole, (shapes.local + table) * widths.reduce, sharded), 0.0
    )
    growing = tuple(np.maximum(waiting, shards) for shards in (head, late, early, sharded))
    sharded_now = (batch.zero_stage > 0) & ~applied
    ready = sharded_now & ~(whole & widths.accumulates)
    first, *later = (np.where(ready, column, 0.0) for column in (waiting, *growing))
    alive = (waiting, waiting, *growing, waiting, sharded)
    if applied.any():
        one = shapes.largest_local * widths.compute
        alive = tuple(
            np.where(applied, one if phase is Phase.OPTIMIZER_STEP else 0.0, column)
            for phase, column in zip(PHASES, alive, strict=True)
        )
    replicated = (batch.zero_stage == 0) & (batch.dp_replicate > 1)
    if replicated.any():
        buckets = np.where(replicated, shapes.local * widths.master, 0.0)
        alive = tuple(column + buckets for column in alive)
    return alive, (first, first, *later, first, np.where(sharded_now, sharded, 0.0))
