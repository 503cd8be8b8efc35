"""Memory of pipeline ranks at their worst moment. Letters: R ranks looked at, K + 2 units, N
layouts; arrays are (R, N) if not said.

Eight moments of a step compete, in order: the loss; the head's backward; the backward of the last
layer, of the one before it, when the last one's gradients are being reduced, and of the second,
when almost all shards of gradients wait; the embedding's backward; behind a pipeline, the reduction
of the first gradients; the optimizer's update.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.memory.allocator import cached_bytes
from planner.specs.training import OPTIMIZER_STATE_BYTES, TrainingSpec
from planner.trainers.registry import TrainerRules

SCALES_WITH_MASTER = ("adamw", "sgd", "muon")
MOMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShapes:
    """What memory depends on: sums over the units that a rank holds, unless said otherwise.

    local, shard: parameters after TP and EP; kept under full sharding.  largest_local, head_local,
    embedding_local: of that unit alone. gathered, largest_gathered, head_gathered: of `local` as
        elements of the compute dtype, as wide as they are gathered.
    head_shard, late_shard, early_shard: of `shard`; of head and one layer; of all but the embedding
        and two layers.
    copies_bytes: quantised copies of weights that stay from step to step, less the parameters they
        replace.
    distinct: of `local`, one weight of every shape.
    saved_bytes: activations of one microbatch, head_saved_bytes the head's share of them.
    head_bytes: most that the head's backward needs besides.  last_layer_bytes, next_layer_bytes,
        second_layer_bytes: `layer_moments`.
    embedding_whole: elements of the table's gradient: under DTensor's TP every rank sums its
        tokens' rows of the whole table.
    in_flight: microbatches held.  boundary_bytes: stage inputs kept for one microbatch.
        stream_bytes: one activation between layers.
    received_bytes: buffers that a pipeline receives all microbatches' activations and gradients in.
    held_bytes: on top of those of the microbatches held, where weight gradients run apart from the
        input's.
    logits_bytes: at the loss, 0 without the head.  leftover_bytes: of logits, freed by then and
        still cached.
    working_bytes: most that a layer's forward computes and frees.
    """

    local: FloatColumn
    shard: FloatColumn
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
    leftover_bytes: FloatColumn
    working_bytes: FloatColumn


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive besides optimizer state and the parameters that never leave."""

    copies: FloatColumn | float
    gradients: FloatColumn | float
    activations: FloatColumn | float
    logits: FloatColumn | float
    buffers: FloatColumn | float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes at the worst moment; PARTS sum to `allocated`. cached: held besides by the allocator's
    rules (`cost.reserved`).

    lasting: parameters that never leave.  moving: activations, logits, buffers and workspace, which
        come and go within a step.
    worst: index of the moment.  moments: works them out again, for the parts that only readers ask
        for; a search asks for none.
    """

    lasting: FloatColumn
    optimizer: FloatColumn
    workspace: FloatColumn
    moving: FloatColumn
    allocated: FloatColumn
    cached: FloatColumn
    worst: IntColumn
    moments: Callable[[], Iterator[Moment]]

    @property
    def parameters(self) -> FloatColumn:
        """Those that never leave, and gathered copies."""
        return self.lasting + self._picked([moment.copies for moment in self.moments()])

    @property
    def gradients(self) -> FloatColumn:
        """Those that wait for the update or for the last microbatch."""
        return self._picked([moment.gradients for moment in self.moments()])

    @property
    def activations(self) -> FloatColumn:
        """Saved for backward, and what the running backward needs."""
        return self._picked([moment.activations for moment in self.moments()])

    @property
    def logits(self) -> FloatColumn:
        """At the loss."""
        return self._picked([moment.logits for moment in self.moments()])

    @property
    def buffers(self) -> FloatColumn:
        """Of gathers, reductions and a pipeline's receives."""
        return self._picked([moment.buffers for moment in self.moments()])

    def _picked(self, columns: Sequence[FloatColumn | float]) -> FloatColumn:
        return np.asarray(
            np.choose(self.worst, [np.broadcast_to(column, self.worst.shape) for column in columns])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one parameter in each form, (N,).

    compute, reduce, master: of the dtypes.  gathered: of a parameter that is gathered for one unit
        at a time, else 0.
    stays: of a gathered copy that stays from forward to backward, else 0.  reduced: of a
        reduction's buffer in every microbatch, else 0.
    """

    compute: FloatColumn
    reduce: FloatColumn
    master: FloatColumn
    gathered: FloatColumn
    stays: FloatColumn
    reduced: FloatColumn
    piped: BoolColumn
    accumulates: BoolColumn

    @classmethod
    def of(cls, batch: LayoutBatch, num_microbatches: FloatColumn, rules: TrainerRules) -> "Widths":
        """Under FSDP stage 3 gathers unit by unit, stage 2 keeps what it gathered, as a pipeline
        does below stage 3.

        A pipeline reduces after its last microbatch. Stage 0 without TP and PP copies weights under
        autocast, for backward as well.
        Source: torch/distributed/fsdp/_fully_shard, torchtitan distributed/utils.py
            (maybe_enable_amp).
        """
        compute, reduce, master = (
            np.where(c == 0, 2.0, 4.0)
            for c in (batch.param_dtype, batch.reduce_dtype, batch.master_dtype)
        )
        piped, accumulates, stage = batch.pp > 1, num_microbatches > 1, batch.zero_stage
        zero = np.zeros_like(compute)
        if not rules.fsdp_style:
            gathered = np.where(stage == 3, compute, 0.0)
            return cls(
                compute=compute,
                reduce=reduce,
                master=master,
                gathered=gathered,
                stays=zero,
                reduced=np.where(stage == 3, reduce, 0.0),
                piped=piped,
                accumulates=accumulates,
            )
        stays = (stage == 2) | (piped & (stage < 3)) | (stage == 0)
        copied = (stage > 0) | ((compute < master) & (batch.tp == 1) & ~piped)
        return cls(
            compute=compute,
            reduce=reduce,
            master=master,
            gathered=np.where(stays, 0.0, compute),
            stays=np.where(stays & copied, compute, 0.0),
            reduced=np.where((piped & accumulates) | (stage == 0), 0.0, reduce),
            piped=piped,
            accumulates=accumulates,
        )


def layer_moments(
    own: tuple[FloatColumn, ...],
    parameters: tuple[FloatColumn, FloatColumn, FloatColumn],
    widths: Widths,
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Bytes that the backward of a layer of each kind needs, (K, N) each: as the last layer, as the
    one before it, as the second.

    own (K, N) each: what it needs itself (transient_bytes, done_bytes, next_bytes, second_bytes of
        `checkpointing.Kept`).
    parameters (K, N) each: reduced at once, shard, gathered. To its own come its gathered
    parameters and the next one's; behind another layer, that one's gradients in the buffer of their
    reduction, and no longer the copies of its weights that stayed. While the buffer is filled, the
    gradients themselves are there, and not yet their shard. The second counts from nothing: copies
    of two are there.
    Source: FSDPParamGroup.pre_backward (one prefetch), post_backward (the reduction's input lives
        until the next one's).
    """
    last, done, following, second = own
    together, shard, gathered = parameters
    one, reduction = widths.gathered * gathered, widths.reduced * together
    copies = np.where(widths.piped, 0.0, widths.stays) * gathered
    following = np.maximum(following + 2.0 * one, done + one - widths.master * shard)
    return (
        last + 2.0 * one,
        following + reduction - copies,
        second + 2.0 * one + reduction + 2.0 * copies,
    )


def rank_memory(
    shapes: RankShapes,
    batch: LayoutBatch,
    num_microbatches: FloatColumn,
    training: TrainingSpec,
    rules: TrainerRules,
    workspace_bytes: float,
) -> RankMemory:
    """Parts of the worst moment of every rank.

    Sources: Rajbhandari 2020 (ZeRO), FSDP2 (torch/distributed/fsdp/_fully_shard: unsharded
    accumulated gradients keep reduce_dtype; parameters of the next unit are prefetched),
    Megatron-LM distributed optimizer.
    """
    widths = Widths.of(batch, num_microbatches, rules)
    on_device = np.where(batch.cpu_offload, 0.0, 1.0)
    if rules.fsdp_style:
        parameters = shapes.shard * widths.master * on_device
        optimizer = shapes.shard * _state_bytes(widths, training)
        gradients, apart = _gradients(shapes, batch, widths, on_device)
    else:
        parameters, optimizer, buffer = _distributed(shapes, batch, widths, training, rules)
        gradients = (buffer,) * MOMENTS
        apart = ()
    optimizer = optimizer * on_device
    waits = rules.fsdp_style & widths.piped & widths.accumulates & (batch.zero_stage > 0)
    moments = partial(_moments, shapes, widths, gradients, waits)
    totals, moving, most, worst = _worst(moments(), optimizer.shape)
    return RankMemory(
        lasting=parameters,
        optimizer=optimizer,
        workspace=np.full_like(optimizer, workspace_bytes),
        moving=moving + workspace_bytes,
        allocated=parameters + optimizer + most + workspace_bytes,
        cached=_cached(shapes, batch, widths, totals, apart, rules),
        worst=worst,
        moments=moments,
    )


def _worst(
    moments: Iterable[Moment], shape: tuple[int, ...]
) -> tuple[list[FloatColumn], FloatColumn, FloatColumn, IntColumn]:
    """(bytes of every moment, at the worst one what moves, all, and its index); the first of
    equals.
    """
    totals, moving, most, worst = (
        [],
        np.zeros(shape),
        np.full(shape, -np.inf),
        np.zeros(shape, dtype=np.int64),
    )
    for index, moment in enumerate(moments):
        here = moment.activations + moment.logits + moment.buffers
        total = here + moment.gradients + moment.copies
        worse = total > most
        np.copyto(most, total, where=worse)
        np.copyto(moving, here, where=worse)
        np.copyto(worst, index, where=worse)
        totals.append(np.asarray(total))
    return totals, moving, most, worst


def _cached(
    shapes: RankShapes,
    batch: LayoutBatch,
    widths: Widths,
    totals: Sequence[FloatColumn],
    apart: Sequence[FloatColumn],
    rules: TrainerRules,
) -> FloatColumn:
    """At the loss, what the last layer's forward freed is in pieces smaller than logits. Two
    all-gathers are alive: one is prefetched.

    A step of other trainers fills buffers that stay, so that nothing of this applies.
    """
    if not rules.fsdp_style:
        return np.zeros_like(shapes.local)
    loss = shapes.leftover_bytes + np.where(shapes.leftover_bytes > 0, shapes.working_bytes, 0.0)
    second = np.maximum(
        np.maximum(shapes.head_gathered, shapes.embedding_local), shapes.largest_gathered
    )
    gathers = np.where(
        batch.zero_stage > 0, widths.compute * (shapes.largest_gathered + second), 0.0
    )
    return cached_bytes(totals, apart, (loss, *(0.0,) * (MOMENTS - 1)), gathers)


def _moments(
    shapes: RankShapes, widths: Widths, gradients: tuple[FloatColumn, ...], waits: BoolColumn
) -> Iterator[Moment]:
    """The eight moments. Copies that stay go as backward passes their units, but for a pipeline,
    whose next microbatch needs them.

    waits: whole gradients wait for the last microbatch; then a unit's copy goes and its gradients
        are put into the reduction's buffer.
    Source: torch/distributed/pipelining/stage.py (perform_reduce_grad),
        FSDPParamGroup.post_backward.
    """
    kept, one = shapes.received_bytes, shapes.saved_bytes + shapes.boundary_bytes
    activations = shapes.in_flight * one + shapes.held_bytes
    all_copies, head = widths.stays * shapes.gathered, kept + widths.gathered * shapes.head_gathered
    # The last gathers of forward have their result and its copy at once; where copies stay they add
    # to all others.
    gathering = np.where(
        widths.piped,
        0.0,
        widths.stays * shapes.largest_gathered - shapes.head_saved_bytes - shapes.logits_bytes,
    )
    yield Moment(
        all_copies,
        gradients[0],
        activations,
        shapes.logits_bytes,
        head + np.maximum(gathering, 0.0),
    )
    yield Moment(
        all_copies,
        gradients[1],
        activations + shapes.head_bytes,
        0.0,
        head + widths.gathered * shapes.largest_gathered,
    )
    below = activations - shapes.head_saved_bytes
    layers = np.where(
        widths.piped, all_copies, widths.stays * (shapes.gathered - shapes.head_gathered)
    )
    yield Moment(
        layers,
        gradients[2],
        below + shapes.last_layer_bytes,
        0.0,
        kept + widths.reduced * shapes.head_local,
    )
    yield Moment(layers, gradients[3], below + shapes.next_layer_bytes, 0.0, kept)
    others, early = (
        activations - one,
        np.where(widths.piped, all_copies, widths.stays * shapes.embedding_local),
    )
    yield Moment(early, gradients[4], others + shapes.second_layer_bytes, 0.0, kept)
    own, gradient = (
        widths.gathered * shapes.embedding_local,
        widths.compute * shapes.embedding_whole,
    )
    scattered = (
        np.where(
            shapes.embedding_whole > shapes.embedding_local, widths.compute * ~waits, widths.reduced
        )
        * shapes.embedding_local
    )
    embedding = np.maximum(
        own + gradient + widths.reduced * shapes.largest_local, gradient + scattered
    )
    yield Moment(early, gradients[5], others + shapes.stream_bytes, 0.0, kept + embedding)
    reduction = np.maximum(
        widths.reduce * shapes.largest_local - widths.stays * shapes.largest_gathered, 0.0
    )
    yield Moment(
        *(
            np.where(waits, column, 0.0)
            for column in (all_copies, gradients[6], 0.0, 0.0, kept + reduction)
        )
    )
    yield Moment(0.0, gradients[7], 0.0, 0.0, kept)


def _distributed(
    shapes: RankShapes,
    batch: LayoutBatch,
    widths: Widths,
    training: TrainingSpec,
    rules: TrainerRules,
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """(parameters, optimizer with masters, gradients) of Megatron's style: a whole copy on every
    rank, sharded by stage.
    """
    stage = batch.zero_stage
    gradient = (
        widths.reduce if rules.gradient_dtype == "float32" else np.full_like(widths.reduce, 2.0)
    )
    apart = shapes.local * widths.compute * (rules.gradients_apart & (gradient > widths.compute))
    held = np.where(stage == 3, shapes.shard, shapes.local)
    parameters = held * widths.compute + shapes.copies_bytes * held / np.maximum(shapes.local, 1.0)
    optimizer = np.where(stage >= 1, shapes.shard, shapes.local) * (
        _state_bytes(widths, training) + widths.master
    )
    if rules.placeholders_since and training.release.named.not_before_month(
        rules.placeholders_since
    ):
        apart = apart + shapes.distinct * widths.compute
    return (
        parameters,
        optimizer,
        np.where(stage >= 2, shapes.shard, shapes.local) * gradient + apart,
    )


def _state_bytes(widths: Widths, training: TrainingSpec) -> FloatColumn:
    scale = (
        widths.master / 4.0
        if training.optimizer in SCALES_WITH_MASTER
        else np.ones_like(widths.master)
    )
    return OPTIMIZER_STATE_BYTES[training.optimizer] * scale


def _gradients(
    shapes: RankShapes, batch: LayoutBatch, widths: Widths, on_device: FloatColumn
) -> tuple[tuple[FloatColumn, ...], tuple[FloatColumn, ...]]:
    """Gradients that wait at each of the eight moments under FSDP, or DDP at stage 0; of them,
    shards, made on a stream of their own.

    Shards of finished units; all of them while accumulating. In a pipeline whole gradients wait for
    the last microbatch. DDP has its buckets besides (gradient_as_bucket_view is off). An optimizer
    in the backward pass leaves none.
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
            np.where(applied, one if place == MOMENTS - 1 else 0.0, column)
            for place, column in enumerate(alive)
        )
    replicated = (batch.zero_stage == 0) & (batch.dp_replicate > 1)
    if replicated.any():
        buckets = np.where(replicated, shapes.local * widths.master, 0.0)
        alive = tuple(column + buckets for column in alive)
    return alive, (first, first, *later, first, np.where(sharded_now, sharded, 0.0))


PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "workspace",
    "allocated",
)


def rows(memory: RankMemory) -> dict[str, FloatColumn]:
    """The parts by name, for those who gather or print them."""
    return {name: getattr(memory, name) for name in PARTS}
