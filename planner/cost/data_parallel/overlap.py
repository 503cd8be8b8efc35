"""Data-parallel communication against the compute it runs under.

Letters: K + 2 units, L loads of ranks (`cost.loads`). Results are (L,).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.data_parallel.sharding import UnitShards
from planner.cost.loads import Loads, at_rows, sums
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSeconds:
    """Seconds that a rank waits in a step, (L,).

    fsdp: for gathers and scatters.
    gathers: of them, for gathers.
    dp: for the replica all-reduce.
    copies: of kernels that copy out of and into buffers of gathers and scatters.
    hidden: communication under compute, which nobody waits for.
    """

    fsdp: FloatColumn
    gathers: FloatColumn
    dp: FloatColumn
    copies: FloatColumn
    hidden: FloatColumn


def exposed_data_parallel(
    load: Loads,
    passes: tuple[FloatColumn, FloatColumn],
    shards: UnitShards,
    training: TrainingSpec,
    rules: TrainerRules,
    dp_hidden: float,
) -> ExposedSeconds:
    """Waits for data-parallel communication in one step.

    passes (K + 2, L): forward and backward of one microbatch, exposed TP, CP and EP included.
    """
    share: FloatColumn | float = dp_hidden if training.overlap.dp else 0.0
    if rules.sharding.reduces_by_unit:
        return _fsdp(load, passes, shards, rules, 1.0 if training.overlap.dp else 0.0)
    gathers = 0.0 if rules.whole_owners else share
    if training.optimizer == "muon":
        muon = rules.muon
        hides = np.where(load.batch.zero_stage > 0, muon.hides_sharded, muon.hides_whole)
        share, gathers = share * hides, gathers * hides * muon.hides_gathers
    return _once_a_step(load, passes, shards, share, gathers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Gathers of a unit's parameters and reductions of its gradients in a step, (L,) each.

    gathers: in forwards. again, head_again: gathers in the backward for each of them, of the head
        and of all other units. reductions: of gradients.
    """

    gathers: FloatColumn
    again: FloatColumn
    head_again: FloatColumn
    reductions: FloatColumn


def rounds_of(batch: LayoutBatch, num_microbatches: FloatColumn, rules: TrainerRules) -> Rounds:
    """Under FSDP2 by `_fsdp`, otherwise once a step."""
    if not rules.sharding.reduces_by_unit:
        once, never = np.ones(len(batch)), np.zeros(len(batch))
        return Rounds(gathers=once, again=never, head_again=never, reductions=once)
    piped, zero3 = batch.pp > 1, batch.zero_stage == 3
    return Rounds(
        gathers=np.where(piped & ~zero3, 1.0, num_microbatches),
        again=zero3.astype(np.float64),
        head_again=(zero3 & piped).astype(np.float64),
        reductions=np.where(piped, 1.0, num_microbatches),
    )


def _fsdp(
    load: Loads,
    passes: tuple[FloatColumn, FloatColumn],
    shards: UnitShards,
    rules: TrainerRules,
    overlaps: float,
) -> ExposedSeconds:
    """Seconds that FSDP2's ranks wait, unit by unit.

    Under a unit's compute run the next unit's gather and the reduction of the unit before it.

    Without PP every microbatch gathers in forward (and in backward under ZeRO-3) and reduces.
        forward wait = first gather + sum max(0, gather - forward)
        The backward waits likewise, for gather and reduction, and in the end for the last scatter.
    The last unit, norm and head, stays gathered until its backward. ZeRO-3 under PP is TorchTitan's
    `always`, which gathers it again.

    Under PP (reshard never) there is one gather and one reduction a step. The reduction comes after
    the last backward, with nothing to hide it. ZeRO-3 gathers in every forward and backward.

    Copies out of a gather's buffer and into that of a reduction run on the stream that computes, so
    each gather and each reduction adds its own.

    With CPU offload a gather waits for its upload and a download for its reduction, each pair on a
    stream of its own. PCIe carries both directions at once, so a unit's backward hides max(network,
    upload + gather, reduction + download). The host waits while it copies gradients that are added
    to earlier ones or consumed in the backward, so nothing hides these copies and additions.

    Source: torch/distributed/fsdp/_fully_shard (implicit prefetch; foreach_reduce: non_blocking),
    torch/distributed/pipelining/stage.py (perform_reduce_grad), torchtitan 0.2.2
    models/llama3/infra/parallelize.py (apply_fsdp).
    """
    units, batch, m, at = load.units, load.batch, load.m, load.at_shard
    (forward, backward), of_step = passes, rounds_of(batch, m, rules)
    piped = batch.pp > 1
    gathered, scatter, replicate, gather_copy, scatter_copy = (
        at_rows(part, at)
        for part in (
            shards.gather_seconds,
            shards.scatter_seconds,
            shards.replicate_seconds,
            shards.gather_copy_seconds,
            shards.scatter_copy_seconds,
        )
    )
    hosted = bool(shards.upload_seconds.any())
    upload, download, accumulate = (
        at_rows(part, at) if hosted else np.zeros(())
        for part in (shards.upload_seconds, shards.download_seconds, shards.accumulate_seconds)
    )
    reduction, again = scatter + replicate, of_step.again
    gather, last = gathered + upload, scatter + download
    regather, copied = gathered * again, gather_copy * (1.0 + again)
    regather[-1] = gathered[-1] * of_step.head_again
    copied[-1] = gather_copy[-1] * (1.0 + of_step.head_again)
    reduced = reduction * ~piped
    busy = regather + reduced
    if hosted:
        up, down = (regather + upload * again, reduced + download * ~piped)
        busy = np.maximum(busy, np.maximum(up, down))
    wait_forward = np.maximum(0.0, gather - overlaps * forward)
    wait_backward = np.maximum(0.0, busy - overlaps * backward)
    first_gather, last_scatter = np.maximum(gather[0], gather[-1]), np.maximum(last[0], last[-2])
    once = piped & (batch.zero_stage != 3)
    rounds = of_step.gathers
    tail = np.where(piped, sums(units, last), m * last_scatter)
    waits = (
        rounds
        * (
            sums(units, wait_forward)
            + np.where(once, 0.0, sums(units, wait_backward))
            + first_gather
        )
        + tail
    )
    regathers = wait_backward * regather / np.maximum(regather + reduced, 1e-30)
    gathers = rounds * (
        sums(units, wait_forward) + np.where(once, 0.0, sums(units, regathers)) + first_gather
    )
    reductions = of_step.reductions
    copies = rounds * sums(units, copied) + reductions * sums(units, scatter_copy)
    if hosted:  # the host waits: nothing hides these reductions, downloads and additions
        hidden = np.minimum(reduction + download, overlaps * backward) * (download > 0)
        added = np.where(piped, 0.0, m - 1.0)
        consumed = np.where(batch.optimizer_in_backward & ~piped, 1.0, 0.0)
        waits = waits + added * sums(units, hidden + accumulate)
        waits = waits + consumed * sums(units, hidden)
    wire = rounds * sums(units, gathered + regather * ~once) + reductions * sums(units, reduction)
    piped_replicas = np.where(piped, sums(units, replicate), 0.0)
    replicas = np.minimum(waits, m * sums(units, np.maximum(0.0, replicate - overlaps * backward)))
    replicas = np.where(piped, 0.0, replicas)
    hidden = np.maximum(0.0, wire - waits - piped_replicas)
    return ExposedSeconds(
        fsdp=waits - replicas,
        gathers=gathers,
        dp=replicas + piped_replicas,
        copies=copies,
        hidden=hidden,
    )


def _once_a_step(
    load: Loads,
    passes: tuple[FloatColumn, FloatColumn],
    shards: UnitShards,
    share: FloatColumn | float,
    forward_share: FloatColumn | float,
) -> ExposedSeconds:
    """Distributed optimizer or DDP: one reduction and one gather of parameters a step.

    The reduction runs under the last backward, the gather under the first forward.
    wait = max(0, communication - share x compute of that pass)
    forward_share: of the first forward; 0 where parameters are gathered before the step begins.
    Source: Megatron-LM --overlap-grad-reduce, --overlap-param-gather.
    """
    scatter, replicate, gather = (
        sums(load.units, at_rows(part, load.at_shard))
        for part in (shards.scatter_seconds, shards.replicate_seconds, shards.gather_seconds)
    )
    forward, backward = (sums(load.units, seconds) for seconds in passes)
    forward, backward = forward_share * forward, share * backward
    reduction = scatter + replicate
    late = np.maximum(0.0, reduction - backward)
    dp = late * replicate / np.maximum(reduction, 1e-30)
    early = np.maximum(0.0, gather - forward)
    hidden = reduction - late + gather - early
    return ExposedSeconds(
        fsdp=late - dp + early, gathers=early, dp=dp, copies=np.zeros_like(dp), hidden=hidden
    )
