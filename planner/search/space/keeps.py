"""Values that the domains of a search leave out, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.rules import Context
from planner.rules.base import num_microbatches, sharding_degree
from planner.rules.features import scale_up_gpus
from planner.rules.pipeline import divides_layers
from planner.rules.sharding import splits_backward
from planner.schedules import SCHEDULES
from planner.specs.layout import AC_KINDS, CP_METHODS, MOE_DISPATCHERS, WITHOUT_EP
from planner.specs.training import mean_state_bytes

LARGE_NODE, ATTENTION_TILE, BYTES_16_BIT = 8, 128, 2
SATURATED_TOKENS = 1 << 18  # judgement: twice the largest microbatch of the public rows (16 x 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which rows of a domain are worth listing; the others duplicate a row or cannot beat one.

    reads: as of a rule.
    mask: True for rows to list, elementwise and broadcasting.
    counted: key under which what is left out counts as rejected; empty for duplicates, which
        are not reported.
    """

    reads: frozenset[str]
    mask: Callable[[LayoutBatch, Context], BoolColumn]
    counted: str = ""


def _pays(x: LayoutBatch, c: Context) -> BoolColumn:
    """Leaves out split-backward schedules that recompute twice, once for I and once for W.

    They do so under activation checkpointing.
    """
    recomputes = splits_backward(x.pp_schedule) & (x.ac_kind != AC_KINDS.index("none"))
    return np.asarray(
        (x.pp_schedule == SCHEDULES.names.index("1F1B"))
        | ((x.pp > 1) & ~(recomputes & c.trainer.framework.splits_backward_by_group))
    )


def _stages_pay(x: LayoutBatch, c: Context) -> BoolColumn:
    """Leaves out uneven stages of trainers that only split evenly, if even ones are possible."""
    even = (
        np.bool_(c.trainer.split != "even" or c.released.writes_splits)
        | ~divides_layers(x.pp, c)
        | divides_layers(x.pp * x.virtual_stages, c)
    )
    return np.asarray(np.where(x.pp > 1, even, x.virtual_stages == 1))


def _steps_once(x: LayoutBatch, c: Context) -> BoolColumn:
    return np.asarray(
        ~x.optimizer_in_backward | ((num_microbatches(x, c) == 1) & (sharding_degree(x, c) > 1))
    )


def _microbatch_pays(x: LayoutBatch, c: Context) -> BoolColumn:
    """Lists microbatches of 1, and larger ones that fit, fill the pipeline and are still useful.

    Fit: 2 x micro_batch_size x seq_len x hidden_size x layers / (cp x tp x pp) bytes are at most
    the device's memory. These are the layers' inputs in 16 bit on the rank with the most layers,
    which no recomputation saves. Useful: not longer than any kernel needs.
    """
    sequence_bytes = (
        BYTES_16_BIT * c.training.seq_len * c.model.hidden_size * c.model.num_hidden_layers
    )
    fits = x.micro_batch_size * sequence_bytes <= c.cluster.gpu.memory_bytes * (x.cp * x.tp * x.pp)
    fills = (x.pp == 1) | (num_microbatches(x, c) >= x.pp)
    useful = x.micro_batch_size * c.training.seq_len <= SATURATED_TOKENS * x.cp
    return np.asarray((x.micro_batch_size == 1) | (fits & fills & useful))


def _states_fit(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether the mean rank's model states fit, whatever the rest of the layout is.

    This bound needs only the degrees. Bytes per parameter are as in `cost.memory`.
    FSDP: (master + optimizer) / sharding ranks, and under a pipeline the unsharded gradients that
        accumulate in reduce_dtype.
    Others: parameters and gradients of the rank, sharded optimizer.
    """
    experts = c.model.num_moe_layers * c.model.num_experts * c.model.parameters.expert()
    dense = c.model.total_parameters() - experts
    local = (dense / x.tp + experts / (x.ep * x.etp)) / x.pp
    shard = (dense + experts) / (x.tp * x.pp * x.dp_shard * x.cp)
    master, reduce = (
        np.where(dtype == 0, BYTES_16_BIT, 2 * BYTES_16_BIT)
        for dtype in (x.master_dtype, x.reduce_dtype)
    )
    states = mean_state_bytes(c.training.optimizer, c.model) * np.minimum(1.0, master / 4.0)
    if c.trainer.sharding.keeps_copies:
        held = local * 2 * BYTES_16_BIT + shard * (master + states)
    else:
        held = shard * (master + states) + np.where(x.pp > 1, local * reduce, 0.0)
    return np.asarray(held <= c.cluster.usable_memory_bytes)


STATES = Keep(
    reads=frozenset({"tp", "cp", "pp", "dp_shard", "ep", "etp", "master_dtype", "reduce_dtype"}),
    mask=_states_fit,
    counted="model states exceed the device",
)  # fmt: skip


# Why the rest is left out stands above each. Judgement of tp: 8 where a node holds fewer.
KEEPS: Mapping[str, Keep] = {
    # beyond NVLink every layer's collectives cross the network on the critical path
    "tp": Keep(
        reads=frozenset({"tp"}), mask=lambda x, c: x.tp <= max(LARGE_NODE, scale_up_gpus(c))
    ),
    # a flash-attention tile takes 128 queries; with fewer a rank the tensor cores idle
    "cp": Keep(
        reads=frozenset({"cp"}),
        mask=lambda x, c: (x.cp == 1) | (c.training.seq_len >= ATTENTION_TILE * x.cp),
    ),
    # the layers' inputs alone would exceed the device; or fewer microbatches than pipeline ranks
    # idle half of them, and a smaller microbatch does not; or GEMMs of so many rows have long
    # saturated and hide any gather. 1 always stays
    "micro_batch_size": Keep(
        reads=frozenset({"cp", "tp", "pp", "micro_batch_size", "dp_replicate", "dp_shard"}),
        mask=_microbatch_pays,
    ),
    # ignored at pp 1; a split backward under activation checkpointing recomputes twice and was
    # measured 10 times slower in torch (torchtitan issue 773: 13 against 128 tokens/s, pytorch
    # issue 136766)
    "pp_schedule": Keep(reads=frozenset({"pp", "pp_schedule", "ac_kind"}), mask=_pays),
    # ignored at pp 1; of trainers that only split evenly, stages that do not divide the layers
    # where others of the same pp do
    "virtual_stages": Keep(reads=frozenset({"pp", "virtual_stages"}), mask=_stages_pay),
    # with one sharding rank every stage is stage 0, but that offload may need another; with more,
    # sharding the optimizer costs no traffic and saves memory
    "zero_stage": Keep(
        reads=frozenset({"zero_stage", "dp_shard", "cp", "cpu_offload"}),
        mask=lambda x, c: (
            (x.cpu_offload & (x.zero_stage > 0))
            | ((sharding_degree(x, c) > 1) == (x.zero_stage > 0))
        ),
    ),
    # ignored at cp 1
    "cp_method": Keep(
        reads=frozenset({"cp", "cp_method"}),
        mask=lambda x, c: (x.cp > 1) | (x.cp_method == CP_METHODS.index("allgather")),
    ),
    # at ep 1 the others do what alltoall does
    "moe_dispatcher": Keep(
        reads=frozenset({"ep", "moe_dispatcher"}),
        mask=lambda x, c: (
            (x.ep > 1)
            | np.isin(x.moe_dispatcher, [MOE_DISPATCHERS.index(name) for name in WITHOUT_EP])
        ),
    ),
    # ignored at tp 1
    "sequence_parallel": Keep(
        reads=frozenset({"tp", "sequence_parallel"}),
        mask=lambda x, c: (x.tp > 1) | ~x.sequence_parallel,
    ),
    # it would step once a microbatch, and before DDP has reduced the gradients: another run
    "optimizer_in_backward": Keep(
        reads=frozenset(
            {"optimizer_in_backward", "dp_replicate", "dp_shard", "micro_batch_size", "cp"}
        ),
        mask=_steps_once,
    ),
}


def one_form(stages: Sequence[object]) -> Keep:
    """Lists a layout whose one sharding rank shards nothing under one of these stages alone."""
    return Keep(
        reads=frozenset({"zero_stage", "dp_shard", "cp"}),
        mask=lambda x, c: (sharding_degree(x, c) > 1) | (x.zero_stage == stages[0]),
    )
