"""Muon's Newton-Schulz iterations, and the communication that they need.

Letters: U layouts that differ in `sharding.KEY`. (K, U): the model's distinct layers; (K + 2, U):
then the embedding and the head, which AdamW updates.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.prepared_job import PreparedJob
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.training import MuonTpMode
from planner.work import axes, blocks
from planner.work.axes import weight_sizes
from planner.work.ops import Gemm

# 5 iterations of A = X X', B = A A and B X on an m x n matrix, m <= n. Each takes 4 m^2 n + 2 m^3
# FLOP. Source: Jordan 2024 (Muon); Emerging-Optimizers 0.4 muon_utils.py (newton_schulz).
NEWTON_SCHULZ_STEPS = 5.0
EXCHANGED_BYTES = 2.0
# of a momentum that TP ranks gather, and of a Gram matrix that they add (muon_utils.py: the input
# is fp32, the iterations run in 16 bits)
GATHERED_BYTES, GRAM_BYTES = 4.0, 2.0

# Calls of torch for one matrix: decay, momentum, norm, clamp, division, two casts, two scales, the
# addition, and three products in each iteration. A loop over many small matrices of experts runs no
# faster than the host makes them (Megatron-LM#6683: "kernel-launch bound"). Source:
# Emerging-Optimizers 0.2 to 0.4 orthogonalized_optimizer.py (step), muon_utils.py. Seconds of one:
# judgement, between the 5 and 10 us of an eager call.
CALLS, CALL_SECONDS = 25.0, 8e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """One shape of a layer's weights, `together` of them side by side along its outputs.

    TP cuts outputs or inputs, experts by their own group.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    together: float
    expert: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Costs of one layer's matrices on a TP rank, outside routed experts or inside, (K, U).

    matrices: how many.
    elements, flops: of all.
    largest_elements, largest_flops: of the largest matrix.
    seconds: of communication over TP.
    """

    matrices: FloatColumn
    elements: FloatColumn
    flops: FloatColumn
    largest_elements: FloatColumn
    largest_flops: FloatColumn
    seconds: FloatColumn


def newton_schulz_flops(model: ModelSpec) -> float:
    """FLOP per parameter of Muon's orthogonalisation, the mean over the matrices of all layers."""
    flops = size = 0.0
    whole = weight_sizes(model, np.ones(1), np.ones(1))
    whole["experts"] = np.full(1, float(model.num_choices))
    for kind, count in model.distinct_layers():
        for matrix in _matrices(model, kind, False):
            rows, cols = (_size(whole, dims)[0] for dims in (matrix.inputs, matrix.outputs))
            copies = count * (model.num_experts if matrix.expert else 1.0)
            flops += copies * float(_flops(np.minimum(rows, cols), np.maximum(rows, cols)))
            size += copies * float(rows * cols)
    return flops / size


@lru_cache(maxsize=256)
def _matrices(model: ModelSpec, kind: LayerKind, fused_gate: bool) -> tuple[_Matrix, ...]:
    """The matrices of one layer; gate and up projection are one where `fused_gate`."""
    found = []
    gates = [op.name for op in blocks.layer_ops(model, kind, True) if op.name.endswith("_w3")]
    for op in blocks.layer_ops(model, kind, True):
        if not isinstance(op, Gemm) or op.role == "head" or (fused_gate and op.name in gates):
            continue
        together = 2.0 if fused_gate and op.name[:-1] + "3" in gates and op.name[-1] == "1" else 1.0
        found.append(
            _Matrix(inputs=op.depth, outputs=op.cols, together=together, expert=op.role == "expert")
        )
    return tuple(found)


def update_seconds(job: PreparedJob, batch: LayoutBatch, shard: FloatColumn) -> FloatColumn:
    """Seconds of Newton-Schulz iterations and of their communication, (K + 2, U).

    Where a trainer's ranks own no whole matrices, each matrix has one owner, which gets the shards
    of its momentum and sends updates back, both in 16 bits. Otherwise each owner has its TP rank's
    whole shards, which it iterates on by `muon_tp_mode`.
    shard: parameters that a rank updates.
    """
    found = np.zeros_like(shard)
    if job.training.optimizer != "muon":
        return found
    rate = job.device.linear_rate[job.device.half]
    if not job.rules.muon.whole_owners:
        degree, stride = job.group("fsdp", batch)
        payload = shard * EXCHANGED_BYTES
        payload[-2:] = 0.0
        degree = np.where(batch.zero_stage > 0, degree, 1.0)
        found[:-2] = shard[:-2] * newton_schulz_flops(job.model) / rate
        return found + 2.0 * job.collective_seconds("all-to-all", payload, (degree, stride))
    for work, owners in _owned(job, batch):
        launched = CALLS * CALL_SECONDS * work.matrices
        seconds = np.maximum(work.flops / rate, launched) + work.seconds
        busiest = _busiest(job, batch, work.flops, work.largest_flops, owners)
        found[:-2] += seconds / owners * busiest
    return found


def owner_shares(job: PreparedJob, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
    """Parameters of the busiest owner over an even share (outside routed experts, inside).

    (K + 2, U) each; 1 where every tensor is split. Matrices are dealt out largest first, each to
    the owner with the fewest parameters, so that the busiest has the mean, or the largest matrix
    where that is more.
    Source: Megatron-LM core 0.18 layer_wise_optimizer.py (_compute_per_buffer_param_layout).
    """
    ones = np.ones((len(job.model.distinct_layers()) + 2, len(batch)))
    if job.training.optimizer != "muon" or not job.rules.muon.whole_owners:
        return ones, ones
    found = [ones.copy(), ones.copy()]
    for shares, (work, owners) in zip(found, _owned(job, batch), strict=True):
        shares[:-2] = _busiest(job, batch, work.elements, work.largest_elements, owners)
    return found[0], found[1]


def _owned(job: PreparedJob, batch: LayoutBatch) -> list[tuple[_Work, FloatColumn]]:
    """(work, ranks that share it) outside routed experts, and in them."""
    found = []
    for expert, names in enumerate((("tp", "fsdp"), ("etp", "efsdp"))):
        cut, owners = (job.group(name, batch) for name in names)
        work = _work(job, batch, bool(expert), cut)
        found.append((work, np.where(batch.zero_stage > 0, owners[0], 1.0)))
    return found


def _busiest(
    job: PreparedJob,
    batch: LayoutBatch,
    amount: FloatColumn,
    largest: FloatColumn,
    owners: FloatColumn,
) -> FloatColumn:
    """The busiest owner's part of a stage's matrices over an even part, (U,); at least 1."""
    counts = np.array([count for _, count in job.model.distinct_layers()], dtype=np.float64)
    stage = np.maximum(counts @ amount / batch.pp, 1.0)
    return np.asarray(np.maximum(1.0, largest.max(axis=0) * owners / stage))


def _work(job: PreparedJob, batch: LayoutBatch, expert: bool, cut: axes.Group) -> _Work:
    model, muon = job.model, job.rules.muon
    mode = job.training.muon_tp_mode or muon.tp_mode
    assert mode is not None, f"{job.rules.name} has owners of matrices and no mode"
    ones = np.ones(len(batch))
    sizes = [
        {**weight_sizes(model, tp, etp), "experts": model.num_choices * ones}
        for tp, etp in ((ones, ones), (batch.tp.astype(float), batch.etp.astype(float)))
    ]
    copies = model.num_experts / batch.ep if expert else ones
    shape = (len(model.distinct_layers()), len(batch))
    counts, elements, flops, most_elements, most_flops, seconds = np.zeros((6, *shape))
    for k, (kind, _) in enumerate(model.distinct_layers()):
        for matrix in _matrices(model, kind, muon.fused_gate):
            if matrix.expert != expert:
                continue
            (rows, cols), (own_rows, own_cols) = (
                (_size(one, matrix.inputs), _size(one, matrix.outputs) * matrix.together)
                for one in sizes
            )
            each, sent = _iterations((rows, cols), (own_rows, own_cols), mode)
            counts[k] += copies
            elements[k] += copies * own_rows * own_cols
            flops[k] += copies * each
            most_elements[k] = np.maximum(most_elements[k], own_rows * own_cols)
            most_flops[k] = np.maximum(most_flops[k], each)
            if sent is not None:
                operation, payload, times = sent
                seconds[k] += copies * times * job.collective_seconds(operation, payload, cut)
    return _Work(
        matrices=counts,
        elements=elements,
        flops=flops,
        largest_elements=most_elements,
        largest_flops=most_flops,
        seconds=seconds,
    )


def _iterations(
    whole: tuple[FloatColumn, FloatColumn], own: tuple[FloatColumn, FloatColumn], mode: MuonTpMode
) -> tuple[FloatColumn, tuple[str, FloatColumn, float] | None]:
    """(FLOP on each TP rank, (operation, bytes, times) over TP) of one matrix.

    blockwise: each rank iterates on its shard.
    duplicated: fp32 momenta are gathered, and each rank iterates on the whole matrix.
    distributed: the Gram matrix of the side that TP leaves whole, which may be the longer one, is
        added over the ranks in every iteration and squared on each.
    whole, own: (inputs, outputs) of the matrix and of the rank's shard.
    Source: Emerging-Optimizers 0.4 muon_utils.py (newton_schulz_tp), Megatron-LM core/optimizer/
        muon.py (TensorParallelMuon).
    """
    rows, cols = whole
    own_rows, own_cols = own
    cut = own_rows * own_cols < rows * cols
    if mode == "blockwise":
        return _flops(np.minimum(own_rows, own_cols), np.maximum(own_rows, own_cols)), None
    single = _flops(np.minimum(rows, cols), np.maximum(rows, cols))
    if mode == "duplicated":
        return single, ("all-gather", np.where(cut, rows * cols * GATHERED_BYTES, 0.0), 1.0)
    side = np.where(own_cols < cols, rows, cols)
    together = _flops(side, np.where(own_cols < cols, own_cols, own_rows))
    payload = np.where(cut, side * side * GRAM_BYTES, 0.0)
    return np.where(cut, together, single), ("all-reduce", payload, NEWTON_SCHULZ_STEPS)


def _flops(gram: FloatColumn, other: FloatColumn) -> FloatColumn:
    """FLOP of all iterations on a matrix whose Gram matrix is `gram` wide."""
    return NEWTON_SCHULZ_STEPS * (4.0 * gram * gram * other + 2.0 * gram**3)


def _size(sizes: dict[str, FloatColumn], dims: tuple[str, ...]) -> FloatColumn:
    return np.asarray(np.prod([sizes[name] for name in dims], axis=0))
