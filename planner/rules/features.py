"""Rules on what a trainer, a GPU or a combination of switches supports.

They cover recomputation, overlap, compile and the rest.
"""

import math

import numpy as np

from planner.columns import IntColumn, LayoutBatch
from planner.rules.base import Context, Rule, by_split, choices, in_set, num_microbatches, under
from planner.rules.sharding import splits_backward
from planner.specs.layout import AC_KINDS, CP_METHODS, MOE_DISPATCHERS

MEMORY_BUDGET, SELECTIVE_OP = AC_KINDS.index("memory-budget"), AC_KINDS.index("selective-op")
UNIFORM = AC_KINDS.index("uniform")
_TITAN, _MEGATRON = under("torchtitan"), under("megatron")


def scale_up_gpus(c: Context) -> int:
    """GPUs that the innermost level of the fabric joins."""
    return c.cluster.fabric[0].gpus


def peer_gpus(c: Context) -> int:
    """GPUs that can read each other's memory; 1 where none can.

    Symmetric memory ends there, and so does async TP.
    """
    return scale_up_gpus(c) if c.cluster.fabric[0].peer_memory else 1


def largest_stage(x: LayoutBatch, c: Context) -> IntColumn:
    """Layers of the largest stage, (N,).

    A split that does not divide counts embedding and head as layers.
    """
    layers, stages = c.model.num_hidden_layers, x.pp * x.virtual_stages
    usual = np.where(layers % stages == 0, layers // stages, -(-(layers + 2) // stages))
    return by_split(x, usual, [max(split, default=0) for split in x.splits])


def common_layers(x: LayoutBatch, c: Context) -> IntColumn:
    """The greatest common divisor of all stages' layers, (N,)."""
    layers, stages = c.model.num_hidden_layers, x.pp * x.virtual_stages
    usual = np.where(layers % stages == 0, layers // stages, 1)
    return by_split(x, usual, [math.gcd(*split) for split in x.splits])


FEATURE_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the activation checkpointing",
        field="ac",
        broken=lambda ac_kind, c: ~in_set(ac_kind, AC_KINDS, c.released.ac_kinds),
        rule="{c.release_name} has no activation checkpointing {x.ac}",
        remedy=lambda x, c: (
            f"use {choices(kind for kind in AC_KINDS if kind in c.released.ac_kinds)}"
        ),
    ),
    Rule(
        key="uniform-N counts layers of a stage",
        field="ac",
        reads=frozenset({"ac_kind", "ac_value", "pp", "virtual_stages", "split"}),
        broken=lambda x, c: (x.ac_kind == UNIFORM) & (x.ac_value > largest_stage(x, c)),
        rule="{x.ac} is more layers than a stage has",
        remedy="set ac to full, or fewer layers",
    ),
    Rule(
        key="uniform-N divides the layers of every stage",
        field="ac",
        reads=frozenset({"ac_kind", "ac_value", "pp", "virtual_stages", "split"}),
        # transformer_block.py (_checkpointed_forward): before core 0.17 the last group may reach
        # beyond the stage's layers, an IndexError at the first step
        applies=under("megatron", before="0.17"),
        broken=lambda x, c: (
            (x.ac_kind == UNIFORM) & (common_layers(x, c) % np.maximum(x.ac_value, 1) != 0)
        ),
        rule="{c.release_name} stops where {x.ac} does not divide every stage's layers",
        remedy="set ac to full, or to groups that divide every stage's layers",
    ),
    Rule(
        key="trainer always compiles",
        field="compile",
        applies=lambda c: c.released.always_compiles,
        broken=lambda compile: ~np.asarray(compile),
        rule="{c.trainer.title}'s graph trainer compiles the whole step",
        remedy="set compile to true",
    ),
    Rule(
        key="memory-budget checkpointing needs compile",
        field="ac",
        broken=lambda ac_kind, compile: (ac_kind == MEMORY_BUDGET) & ~compile,
        rule="{x.ac} is a pass of torch.compile, which is off",
        remedy="set compile to true, or ac to selective-op",
    ),
    Rule(
        key="selective checkpointing excludes schedules that split the backward",
        field="ac",
        applies=lambda c: c.trainer.framework.splits_backward_by_group,
        # torch/utils/checkpoint.py recomputes a selectively checkpointed region only once, and W
        # asks for it again for each weight.
        broken=lambda ac_kind, pp, pp_schedule: (
            (ac_kind == SELECTIVE_OP) & (pp > 1) & splits_backward(pp_schedule)
        ),
        rule="{x.pp_schedule} goes back for weight gradients, which torch refuses under {x.ac}",
        remedy="set ac to none, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="TorchTitan 0.2 always shards sequences over TP",
        field="sequence_parallel",
        applies=under("torchtitan", since="0.2", before="0.3"),
        broken=lambda tp, sequence_parallel: (tp > 1) & ~sequence_parallel,
        rule="TorchTitan {c.release.number} has no tp={x.tp} without sequence parallelism",
        remedy="set sequence_parallel to true, or training.trainer_version to 0.3.0",
    ),
    Rule(
        key="trainer lacks the CP method",
        field="cp_method",
        broken=lambda cp, cp_method, c: (
            (cp > 1) & ~in_set(cp_method, CP_METHODS, c.released.cp_methods)
        ),
        rule="{c.release_name} has no cp_method {x.cp_method}",
        remedy=lambda x, c: (
            f"use {choices(name for name in CP_METHODS if name in c.released.cp_methods)}"
        ),
    ),
    Rule(
        key="trainer lacks the dispatcher",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe,
        broken=lambda moe_dispatcher, c: (
            ~in_set(moe_dispatcher, MOE_DISPATCHERS, c.released.moe_dispatchers)
        ),
        rule="{c.release_name} has no moe_dispatcher {x.moe_dispatcher}",
        remedy=lambda x, c: (
            f"use {choices(n for n in MOE_DISPATCHERS if n in c.released.moe_dispatchers)}"
        ),
    ),
    Rule(
        key="a dispatcher without experts",
        field="moe_dispatcher",
        applies=lambda c: not c.model.is_moe,
        broken=lambda moe_dispatcher: moe_dispatcher != MOE_DISPATCHERS.index("alltoall"),
        rule="{c.model.name} has no experts to dispatch tokens to",
        remedy="leave moe_dispatcher out",
    ),
    Rule(
        key="trainer does not compile",
        field="compile",
        applies=lambda c: not c.trainer.compiles,
        broken=lambda compile: np.asarray(compile),
        rule="{c.trainer.name} runs fused kernels and does not use torch.compile",
        remedy="set compile to false",
    ),
    Rule(
        key="compile excludes schedules that split the backward",
        field="compile",
        applies=lambda c: c.trainer.compiles,
        # pytorch issue 161904, check added by pull request 162511
        broken=lambda compile, pp, pp_schedule: compile & (pp > 1) & splits_backward(pp_schedule),
        rule="{x.pp_schedule} splits the backward, which torch refuses for compiled stages",
        remedy="set compile to false, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="async TP needs compile",
        field="async_tp",
        applies=lambda c: c.trainer.compiles,
        broken=lambda async_tp, compile: async_tp & ~compile,
        rule="async_tp is a pass of torch.compile, which is off",
        remedy="set compile to true, or async_tp to false",
    ),
    Rule(
        key="trainer lacks async TP",
        field="async_tp",
        applies=lambda c: not any(row.asked for row in c.trainer.tp_overlaps_at(c.release)),
        broken=lambda async_tp: np.asarray(async_tp),
        rule="{c.trainer.name} has nothing that async_tp would switch on",
        remedy="set async_tp to false",
    ),
    Rule(
        key="async TP is off for MLA",
        field="async_tp",
        applies=lambda c: _MEGATRON(c) and c.model.uses_mla,
        broken=lambda async_tp: np.asarray(async_tp),
        rule="{c.trainer.title} switches --tp-comm-overlap off for multi-latent attention "
        "({c.model.name})",
        remedy="set async_tp to false",
    ),
    Rule(
        key="async TP needs sequence-parallel TP",
        field="async_tp",
        broken=lambda async_tp, tp, sequence_parallel: async_tp & ((tp == 1) | ~sequence_parallel),
        rule="async_tp overlaps the all-gathers of sequence parallelism: tp={x.tp}, "
        "sequence_parallel={x.sequence_parallel}",
        remedy="set async_tp to false, or tp to 2 or more with sequence_parallel true",
    ),
    Rule(
        key="async TP needs NVLink between all TP ranks",
        field="async_tp",
        broken=lambda async_tp, tp, c: async_tp & (tp > _joined_gpus(c)),
        rule=lambda x, c: (
            f"async_tp copies through symmetric memory, which joins {_joined(c)}; tp is {x.tp}"
        ),
        remedy=lambda x, c: (
            "set async_tp to false"
            + (f", or tp to at most {_joined_gpus(c)}" if _joined_gpus(c) > 1 else "")
        ),
    ),
    Rule(
        key="trainer lacks optimizer-in-backward",
        field="optimizer_in_backward",
        applies=lambda c: not c.released.steps_in_backward,
        broken=lambda optimizer_in_backward: np.asarray(optimizer_in_backward),
        rule="{c.release_name} steps the optimizer after the backward only",
        remedy="set optimizer_in_backward to false",
    ),
    Rule(
        key="optimizer-in-backward excludes gradient clipping",
        field="optimizer_in_backward",
        applies=lambda c: c.training.max_grad_norm is not None,
        broken=lambda optimizer_in_backward: np.asarray(optimizer_in_backward),
        rule="optimizer_in_backward steps before the norm is known, and max_grad_norm is "
        "{c.training.max_grad_norm:g}",
        remedy="set optimizer_in_backward to false, or training.max_grad_norm to null",
    ),
    Rule(
        key="optimizer-in-backward excludes pipelines and experts",
        field="optimizer_in_backward",
        broken=lambda optimizer_in_backward, pp, ep: optimizer_in_backward & ((pp > 1) | (ep > 1)),
        rule="optimizer_in_backward works with neither pp={x.pp} nor ep={x.ep} above 1",
        remedy="set optimizer_in_backward to false, or pp and ep to 1",
    ),
    Rule(
        key="optimizer-in-backward would step once a microbatch",
        field="optimizer_in_backward",
        reads=frozenset({"optimizer_in_backward", "dp_replicate", "dp_shard", "micro_batch_size"}),
        # components/optimizer.py, OptimizersInBackwardContainer: a hook on every parameter, which
        # FSDP2 calls after each microbatch's reduction; train.py, train_step: one backward each
        applies=_TITAN,
        broken=lambda x, c: x.optimizer_in_backward & (num_microbatches(x, c) > 1),
        rule=lambda x, c: (
            f"{c.release_name} steps the optimizer in every backward, and "
            f"micro_batch_size={x.micro_batch_size} makes "
            f"{x.num_microbatches(c.training.global_batch_size)} of them a step"
        ),
        remedy=lambda x, c: (
            "set optimizer_in_backward to false, or micro_batch_size to "
            f"{c.training.global_batch_size // x.dp_degree}"
        ),
    ),
    Rule(
        key="optimizer-in-backward excludes DDP",
        field="optimizer_in_backward",
        # torch/nn/parallel/distributed.py: the reducer's own hook follows those of a parameter's
        # gradient, so that each replica steps by its own
        applies=lambda c: c.trainer.framework.runtime == "torch",
        broken=lambda optimizer_in_backward, dp_replicate, tp, pp, dp_shard, cp: (
            optimizer_in_backward & (dp_replicate > 1) & (dp_shard * cp == 1) & (tp * pp == 1)
        ),
        rule="dp_replicate={x.dp_replicate} without sharding is DDP, which reduces a gradient "
        "after optimizer_in_backward has used it: replicas would differ",
        remedy="set optimizer_in_backward to false, or dp_shard to {x.dp_replicate} and "
        "dp_replicate to 1",
    ),
)


def _joined_gpus(c: Context) -> int:
    """GPUs over which async TP works: torch's micro-pipelined matmuls are for NVIDIA's only."""
    return peer_gpus(c) if c.cluster.gpu.vendor == "nvidia" else 1


def _joined(c: Context) -> str:
    if c.cluster.gpu.vendor != "nvidia":
        return f"NVIDIA GPUs, not {c.cluster.gpu.name}"
    if peer_gpus(c) == 1:
        return (
            f"no two {c.cluster.gpu.name}: over {c.cluster.fabric[0].name} they cannot read each "
            "other's memory"
        )
    return f"{peer_gpus(c)} GPUs here"
