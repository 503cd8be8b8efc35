"""Seconds and bytes of one layer (and of embedding and head) for one microbatch on one rank, from its list of operations.

Letters: U distinct layouts by the fields in `key`; every array is (U,) or (K units, U). Units are the model's distinct
layers in `ModelSpec.distinct_layers()` order, then embedding, then head.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch
from planner.cost.collectives import collective_seconds
from planner.cost.compute import FP16, SINGLE, Device
from planner.cost.topology import Fabric
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.trainers import TrainerRules
from planner.specs.training import TrainingSpec
from planner.work import axes, blocks
from planner.work.checkpointing import NONE, kept
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op, Tensor
from planner.work.precision import RECIPES, column

_KEY = (
    "tp", "cp", "ep", "etp", "sequence_parallel", "async_tp", "cp_method", "micro_batch_size", "ac_kind", "ac_value",
    "precision", "param_dtype", "compile",
)  # fmt: skip
AXES = ("tp", "cp", "ep")
FUSED_NORM_SINCE = (2, 8)
COLLECTIVE_KERNELS = 3.0  # the collective, its stream event and the copy that packs it; judgement


def key(rank_order: tuple[str, ...]) -> tuple[str, ...]:
    """Fields that a unit's costs depend on: its own work, and the axes inside tp and cp, which place their groups."""
    outermost = max(rank_order.index("tp"), rank_order.index("cp"))
    return _KEY + tuple(name for name in rank_order[:outermost] if name not in _KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """One microbatch of each unit on one rank; (K + 2, U) unless said otherwise.

    forward / input_grad / weight_grad / recompute_seconds: kernels, launches included, communication excluded.
    exposed_forward / exposed_backward (3 axes tp, cp, ep; K + 2; U): communication that nothing hides.
    saved_bytes: kept from forward to backward.  transient_bytes: extra while this unit runs backward.
    forward_flops / recompute_flops: of matmuls and attention.
    logits_bytes (U,): at the peak of the loss.  boundary_bytes (U,): activation handed to the next stage.
    """

    forward_seconds: FloatColumn
    input_grad_seconds: FloatColumn
    weight_grad_seconds: FloatColumn
    recompute_seconds: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn
    saved_bytes: FloatColumn
    transient_bytes: FloatColumn
    forward_flops: FloatColumn
    recompute_flops: FloatColumn
    logits_bytes: FloatColumn
    boundary_bytes: FloatColumn

    @classmethod
    def concatenate(cls, parts: Sequence["UnitCosts"]) -> "UnitCosts":
        """The same units at the rows of all parts, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the costs of a layer's operations depend on besides the operation itself."""

    batch: LayoutBatch
    sizes: Mapping[str, FloatColumn]
    device: Device
    fabric: Fabric
    rules: TrainerRules
    training: TrainingSpec
    rank_order: tuple[str, ...]
    fused: BoolColumn

    def product(self, dims: Sequence[str]) -> FloatColumn:
        """Elements of a tensor with these dimensions, (U,)."""
        total = np.ones(len(self.batch))
        for name in dims:
            total = total * self.sizes[name]
        return total

    def width_bytes(self, width: str) -> FloatColumn:
        """Bytes of one element of this width, (U,)."""
        compute = np.where(self.batch.param_dtype == 0, 2.0, 4.0)
        if width == "linear":
            return np.where(compute == 2.0, column("saved_bytes", self.batch.precision), compute)
        return {"compute": compute, "fp32": np.full_like(compute, 4.0), "byte": np.ones_like(compute)}[width]

    def bytes_of(self, tensor: Tensor) -> FloatColumn:
        """Bytes of a tensor on one rank, (U,)."""
        return self.product(tensor.dims) * self.width_bytes(tensor.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One operation, one microbatch, (U,) each; exposed arrays are (3 axes, U)."""

    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn
    forward_kernels: FloatColumn
    backward_kernels: FloatColumn
    flops: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn


def unit_costs(site: Site, model: ModelSpec) -> UnitCosts:
    """Costs of every unit of the model at the U layouts of `site`."""
    flash = site.training.attention_kernel == "flash"
    composite = composite_norm(site.training, site.rules)
    parts = [_layer(site, blocks.layer_ops(model, kind, flash, composite), kind, model) for kind, _ in model.distinct_layers()]
    plain = LayerKind(moe=False, window=0)
    keep_all = _without_checkpointing(site)
    parts += [_layer(keep_all, ops, plain, model) for ops in (blocks.embedding_ops(), blocks.head_ops(model))]
    stacked = {name: np.stack([part[name] for part in parts], axis=-2) for name in parts[0]}
    return UnitCosts(
        **stacked, logits_bytes=_logits_bytes(site), boundary_bytes=site.product(blocks.HIDDEN_SP) * site.width_bytes("compute")
    )


def composite_norm(training: TrainingSpec, rules: TrainerRules) -> bool:
    """Whether eager RMSNorm runs as a chain of kernels that keeps fp32 copies: torch before 2.8 (aten::_fused_rms_norm is later)."""
    if rules.fused_kernels or training.torch_version is None:
        return False
    numbers = [int(part) for part in re.findall(r"\d+", training.torch_version)[:2]]
    return len(numbers) == 2 and tuple(numbers) < FUSED_NORM_SINCE


def _without_checkpointing(site: Site) -> Site:
    from dataclasses import replace

    batch = replace(site.batch, ac_kind=np.full(len(site.batch), NONE))
    return replace(site, batch=batch)


def _logits_bytes(site: Site) -> FloatColumn:
    """Bytes at the peak of the loss, by the trainer's kernels; the vocabulary is local under a vocabulary-parallel loss.

    DTensor's loss_parallel runs eagerly even under torch.compile (torch/distributed/tensor/parallel/loss.py).
    """
    elements = site.product(("tokens", "vocab_loss"))
    sharded = site.batch.tp > 1 if site.rules.fsdp_style else np.zeros(len(site.batch), dtype=np.bool_)
    return elements * np.where(site.fused & ~sharded, site.rules.fused_loss_bytes, site.rules.loss_bytes)


def _layer(site: Site, ops: Sequence[Op], kind: LayerKind, model: ModelSpec) -> dict[str, FloatColumn]:
    costs = [_op_cost(site, op, kind, model) for op in ops]
    forward = np.array([c.forward for c in costs])
    if any(not isinstance(op, Collective) and op.saves for op in ops):
        keeps = kept(ops, site.batch, site.bytes_of, forward, site.fused, site.rules.early_stop)
        saved, transient, redone = keeps.saved_bytes, keeps.transient_bytes, keeps.redone
    else:
        saved = transient = np.zeros(len(site.batch))
        redone = np.zeros_like(forward)
    launch = np.where(site.fused, site.device.profile.fused_launch_seconds, site.device.profile.launch_seconds)
    kernels_forward = np.array([c.forward_kernels for c in costs])
    flops = np.array([c.flops for c in costs])
    exposed_forward = np.array([c.exposed_forward for c in costs])
    totals = {
        "forward_seconds": np.maximum(forward.sum(axis=0), kernels_forward.sum(axis=0) * launch),
        "recompute_seconds": np.maximum((redone * forward).sum(axis=0), (redone * kernels_forward).sum(axis=0) * launch),
        "saved_bytes": saved, "transient_bytes": transient,
        "forward_flops": flops.sum(axis=0), "recompute_flops": (redone * flops).sum(axis=0),
        "exposed_forward": exposed_forward.sum(axis=0),
        "exposed_backward": np.sum([c.exposed_backward for c in costs], axis=0) + (redone[:, None] * exposed_forward).sum(axis=0),
    }  # fmt: skip
    input_grad, weight_grad = np.sum([c.input_grad for c in costs], axis=0), np.sum([c.weight_grad for c in costs], axis=0)
    floor = np.sum([c.backward_kernels for c in costs], axis=0) * launch
    stretch = np.maximum(1.0, floor / np.maximum(input_grad + weight_grad, 1e-12))
    return totals | {"input_grad_seconds": input_grad * stretch, "weight_grad_seconds": weight_grad * stretch}


def _op_cost(site: Site, op: Op, kind: LayerKind, model: ModelSpec) -> OpCost:
    if isinstance(op, Gemm):
        return _gemm_cost(site, op)
    if isinstance(op, Attention):
        return _attention_cost(site, op, model)
    if isinstance(op, Elementwise):
        return _elementwise_cost(site, op)
    return _collective_cost(site, op)


def _cost(site: Site, **given: FloatColumn) -> OpCost:
    zero, zeros3 = np.zeros(len(site.batch)), np.zeros((len(AXES), len(site.batch)))
    names = ("forward", "input_grad", "weight_grad", "forward_kernels", "backward_kernels", "flops")
    base: dict[str, FloatColumn] = dict.fromkeys(names, zero) | {"exposed_forward": zeros3, "exposed_backward": zeros3}
    return OpCost(**(base | given))


def _gemm_cost(site: Site, op: Gemm) -> OpCost:
    """Forward r x d x c; input gradient r x c x d; weight gradient d x r x c; plus the recipe's casts for linear layers."""
    r, c, d, b = (site.product(dims) for dims in (op.rows, op.cols, op.depth, op.batch))
    low = op.role in ("linear", "expert")
    half = site.batch.precision if low else np.where(site.batch.precision == FP16, FP16, site.device.half)
    precision = np.where(site.batch.param_dtype == 0, half, SINGLE)
    seconds = site.device.gemm_seconds
    casts = np.where(site.fused, column("fused_cast_moves", half), column("cast_moves", half)) * (site.batch.param_dtype == 0)
    cast_forward = site.device.moved_seconds(casts * b * (r * d + d * c) / 2.0)
    cast_backward = site.device.moved_seconds(casts * b * r * c / 2.0)
    kernels = 1.0 + np.where(casts > 0, np.where(site.fused, 2.0, 6.0), 0.0)
    return _cost(
        site,
        forward=seconds(r, c, d, b, precision) + cast_forward,
        input_grad=seconds(r, d, c, b, precision) + cast_backward,
        weight_grad=seconds(d, c, r, b, precision) + (cast_backward if low else 0.0),
        forward_kernels=kernels, backward_kernels=2.0 * kernels, flops=2.0 * b * r * c * d,
    )  # fmt: skip


def _attention_cost(site: Site, op: Attention, model: ModelSpec) -> OpCost:
    """Flops 2 T ctx heads (d_qk + d_v) with the mean context of a causal (windowed) mask; backward 2.5 times (flash).

    Unfused: two batched GEMMs over the full square and the backward of each. Source: FlashAttention-2 (Dao 2023).
    """
    s = site.sizes
    tokens, heads, widths = s["tokens"], s["heads"], float(model.qk_head_dim + model.v_dim)
    seq = float(site.training.seq_len)
    window = float(min(op.window, seq)) if op.window else seq
    context = np.full_like(tokens, window - window * window / (2.0 * seq))
    if site.training.attention_kernel == "flash":
        return _flash_cost(site, 2.0 * tokens * context * heads * widths, context, model)
    rows, batch = np.full_like(tokens, seq), tokens / seq * heads
    depth = np.full_like(tokens, float(model.qk_head_dim))
    slow = site.device.profile.unaligned_head_slowdown if model.qk_head_dim % 8 else 1.0
    half = np.where(site.batch.param_dtype == 0, site.device.half, SINGLE)
    scores = site.device.gemm_seconds(rows, rows, depth, batch, half)
    values = site.device.gemm_seconds(rows, depth, rows, batch, half)
    both = slow * (scores + values)
    two = np.full_like(tokens, 2.0)
    return _cost(
        site, forward=both, input_grad=2.0 * both, forward_kernels=two, backward_kernels=2 * two, flops=2.0 * tokens * seq * heads * widths
    )


def _flash_cost(site: Site, flops: FloatColumn, context: FloatColumn, model: ModelSpec) -> OpCost:
    """Fused attention. Under context parallelism but Ulysses it runs as `cp` shorter pieces, whose outputs are merged by their
    log-sum-exp: four fp32 passes over the output a piece. Source: torch/distributed/tensor/experimental/_attention.py (_SDPAMerger).
    """
    s = site.sizes
    pieces = np.where(site.batch.cp_method == axes.ULYSSES, 1.0, site.batch.cp)
    merged = 4.0 * 4.0 * s["tokens"] * s["heads"] * model.v_dim * np.where(pieces > 1, pieces, 0.0)
    merging = site.device.moved_seconds(merged)
    length = 2.0 * context / pieces
    slower = np.where(site.batch.param_dtype == 0, 1.0, site.device.linear_rate[site.device.half] / site.device.linear_rate[SINGLE])
    forward = slower * site.device.attention_seconds(flops, length, backward=False) + merging
    backward = slower * site.device.attention_seconds(2.5 * flops, length, backward=True) + merging
    return _cost(site, forward=forward, input_grad=backward, forward_kernels=3.0 * pieces, backward_kernels=6.0 * pieces, flops=flops)


def _elementwise_cost(site: Site, op: Elementwise) -> OpCost:
    one = site.product(op.dims) * site.width_bytes(op.width) * site.device.profile.elementwise
    fused = site.fused
    return _cost(
        site,
        forward=site.device.moved_seconds(one * np.where(fused, op.fused_forward_moves, op.forward_moves)),
        input_grad=site.device.moved_seconds(one * np.where(fused, op.fused_backward_moves, op.backward_moves)),
        forward_kernels=np.where(fused, 1.0, op.kernels), backward_kernels=np.where(fused, 1.0, 1.5 * op.kernels),
    )  # fmt: skip


def _collective_cost(site: Site, op: Collective) -> OpCost:
    size = len(site.batch)
    forward, backward = np.zeros((len(AXES), size)), np.zeros((len(AXES), size))
    payload = site.bytes_of(op.tensor)
    for rule in axes.SITES[op.site]:
        applies = rule.applies(site.batch)
        if not applies.any():
            continue
        degree, stride = axes.group(rule.axis, site.batch, site.rank_order)
        place = AXES.index("tp" if rule.axis == "etp" else rule.axis)
        exposed = np.where(applies, 1.0 - _hidden(site, rule.axis), 0.0)
        for target, operation in ((forward, rule.forward), (backward, rule.backward)):
            if operation is not None:
                target[place] += exposed * _seconds(site, operation, payload, degree, stride)
    used = (forward.sum(axis=0) > 0).astype(np.float64)
    return _cost(
        site,
        exposed_forward=forward,
        exposed_backward=backward,
        forward_kernels=COLLECTIVE_KERNELS * used,
        backward_kernels=COLLECTIVE_KERNELS * used,
    )


def _seconds(site: Site, operation: str, payload: FloatColumn, degree: FloatColumn, stride: FloatColumn) -> FloatColumn:
    profile = site.device.profile
    return collective_seconds(
        operation, payload, degree, stride, site.fabric, base_seconds=profile.collective_seconds, nvls_gain=profile.nvls_gain
    )


def _hidden(site: Site, axis: str) -> FloatColumn:
    """Share of an axis's communication that runs under compute, (U,)."""
    profile, overlap = site.device.profile, site.training.overlap
    size = len(site.batch)
    if axis == "tp":
        habit = profile.tp_hidden if overlap.tp else 0.0
        return np.where(site.batch.async_tp, profile.async_tp_hidden, habit)
    if axis == "cp":
        return np.where(site.batch.cp_method == axes.ALLTOALL, profile.cp_hidden, 0.0)
    return np.full(size, profile.ep_hidden if axis == "ep" else 0.0)


def fused_kernels(batch: LayoutBatch, rules: TrainerRules) -> BoolColumn:
    """Whether memory-bound operations run fused: torch.compile, or a trainer that ships fused kernels."""
    return np.asarray(batch.compile | rules.fused_kernels)


def lacking_precisions(device: Device) -> tuple[str, ...]:
    """Recipes that this GPU has no rate for."""
    return tuple(recipe.name for recipe, rate in zip(RECIPES, device.linear_rate, strict=False) if np.isnan(rate))
