"""Rules on DDP, ZeRO stages, offload to the host, and Muon where ranks own whole matrices."""

import numpy as np

from planner.columns import BoolColumn, IntColumn, schedule_is
from planner.precision import PRECISIONS
from planner.rules.base import Context, Rule, choices, under
from planner.specs.layout import AC_KINDS
from planner.specs.training import mean_state_bytes
from planner.units import format_bytes

HOST_TOO_SMALL = "host memory too small for CPU offload"
_TITAN, _MEGATRON = under("torchtitan"), under("megatron")
# 0.3 applies FSDP2 to every layout, over replicas too (distributed/fsdp.py)
_TITAN_02 = under("torchtitan", before="0.3")


def splits_backward(codes: IntColumn) -> BoolColumn:
    """Whether a schedule computes weight gradients in an action of their own. (N,)."""
    return schedule_is(codes, lambda schedule: schedule.splits_backward)


def node_bytes(c: Context) -> float:
    """Bytes that whole CPU offload keeps in one node's host memory for one replica.

    These are fp32 parameters and gradients, and optimizer states.
    """
    return (
        c.model.total_parameters()
        * (8.0 + mean_state_bytes(c.training.optimizer, c.model))
        / c.cluster.num_nodes
    )


def _owns_matrices(c: Context) -> bool:
    """Whether Muon runs, and ranks own whole matrices of it."""
    return c.training.optimizer == "muon" and c.muon.whole_owners


SHARDING_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer lacks the ZeRO stage",
        field="zero_stage",
        broken=lambda zero_stage, c: ~np.isin(zero_stage, sorted(c.trainer.zero_stages)),
        rule="{c.trainer.name} has no ZeRO stage {x.zero_stage}",
        remedy=lambda x, c: f"use zero_stage {choices(sorted(c.trainer.zero_stages))}",
    ),
    Rule(
        key="DDP cannot hold shards",
        field="zero_stage",
        applies=lambda c: c.trainer.sharding.degrees_decide,
        broken=lambda zero_stage, dp_shard, cp: (zero_stage == 0) & (dp_shard * cp > 1),
        rule=lambda x, c: (
            f"zero_stage=0 shards nothing, but dp_shard x cp = {x.dp_shard * x.cp} ranks shard "
            f"under {c.trainer.name}"
        ),
        remedy=lambda x, c: (
            "set zero_stage to 2 or 3"
            + (f", or dp_replicate to {x.dp_degree} and dp_shard to 1" if x.cp == 1 else "")
        ),
    ),
    # core 0.14 optimizer/optimizer_config.py: "--use-precision-aware-optimizer only supported with
    # distributed optimizer", which --optimizer-cpu-offload asks for too
    Rule(
        key="states in 16 bits or on the host are those of a distributed optimizer",
        field="zero_stage",
        applies=_MEGATRON,
        broken=lambda zero_stage, cpu_offload, c: (
            (zero_stage == 0) & (cpu_offload | (c.training.optimizer == "adamw-bf16-states"))
        ),
        rule="{c.trainer.title} keeps states in 16 bits or on the host only in its distributed "
        "optimizer, which zero_stage=0 is not",
        remedy="set zero_stage to 1",
    ),
    Rule(
        key="DDP combines with no other parallelism",
        field="dp_replicate",
        applies=_TITAN,
        broken=lambda dp_replicate, tp, pp, dp_shard, cp: (
            (dp_replicate > 1) & (dp_shard * cp == 1) & (tp * pp > 1)
        ),
        rule="dp_replicate={x.dp_replicate} without sharding is DDP, which {c.trainer.name} "
        "combines with neither tp nor pp",
        remedy="set dp_shard to {x.dp_replicate} and dp_replicate to 1, or to any split of the "
        "two with dp_shard > 1",
    ),
    Rule(
        key="DDP reduces in the dtype of the parameters",
        field="reduce_dtype",
        # models/llama3/infra/parallelize.py, apply_ddp: mixed_precision_reduce goes to FSDP alone
        applies=_TITAN_02,
        broken=lambda dp_replicate, dp_shard, cp, reduce_dtype, master_dtype: (
            (dp_replicate > 1) & (dp_shard * cp == 1) & (reduce_dtype != master_dtype)
        ),
        rule="dp_replicate={x.dp_replicate} without sharding is DDP, which reduces gradients in "
        "{x.master_dtype}, the dtype of the parameters",
        remedy="set reduce_dtype to {x.master_dtype}, or dp_shard to 2 or more",
    ),
    Rule(
        key="TorchTitan 0.2 mixes precisions in FSDP alone",
        field="param_dtype",
        # distributed/utils.py, maybe_enable_amp: "Mixed precision training is disabled"
        applies=_TITAN_02,
        broken=lambda tp, pp, dp_shard, cp, param_dtype, master_dtype: (
            (tp * pp > 1) & (dp_shard * cp == 1) & (param_dtype != master_dtype)
        ),
        rule="tp={x.tp} x pp={x.pp} without sharding computes in {x.master_dtype}, the dtype of "
        "the parameters: {c.release_name} casts to {x.param_dtype} in FSDP alone",
        remedy="set dp_shard or cp to 2 or more, param_dtype to {x.master_dtype}, or "
        "training.trainer_version to 0.3.0",
    ),
    Rule(
        key="ZeRO-3 excludes schedules that split the backward",
        field="zero_stage",
        applies=lambda c: c.trainer.framework.splits_backward_by_group,
        # torch/distributed/pipelining/_backward.py, stage_backward_weight: it pairs gradients with
        # the parameters that it finds then, which FSDP2 has swapped since the forward
        broken=lambda zero_stage, pp, pp_schedule: (
            (zero_stage == 3) & (pp > 1) & splits_backward(pp_schedule)
        ),
        rule="{x.pp_schedule} goes back for weight gradients, and loses those of parameters that "
        "zero_stage=3 has freed in between",
        remedy="set zero_stage to 2, or pp_schedule to Interleaved1F1B or 1F1B",
    ),
    Rule(
        key="ZeRO-2 and 3 exclude pipelines",
        field="zero_stage",
        applies=lambda c: not c.trainer.zero_2_under_pp,
        broken=lambda pp, zero_stage: (pp > 1) & (zero_stage >= 2),
        rule="{c.trainer.name} refuses zero_stage={x.zero_stage} with pp={x.pp}",
        remedy="set zero_stage to 1, or pp to 1",
    ),
    Rule(
        key="CPU offload needs shards",
        field="cpu_offload",
        # FSDP2's CPUOffloadPolicy; Megatron's --optimizer-cpu-offload works on the distributed
        # optimizer
        broken=lambda cpu_offload, zero_stage, dp_shard, cp, c: (
            cpu_offload
            & ((dp_shard * cp == 1) if c.trainer.sharding.offloads_shards else (zero_stage == 0))
        ),
        rule=lambda x, c: (
            f"cpu_offload moves shards, and zero_stage={x.zero_stage} over dp_shard x cp = "
            f"{x.dp_shard * x.cp} leaves none"
        ),
        remedy="set cpu_offload to false, or raise dp_shard and zero_stage",
    ),
    Rule(
        key="offload needs a device beside the host",
        field="cpu_offload",
        applies=lambda c: c.cluster.gpu.vendor == "cpu",
        broken=lambda cpu_offload: np.asarray(cpu_offload),
        rule="cpu_offload moves states to the host, which here is the device",
        remedy="set cpu_offload to false",
    ),
    Rule(
        key=HOST_TOO_SMALL,
        field="cpu_offload",
        broken=lambda cpu_offload, dp_replicate, optimizer_offload_fraction, c: (
            cpu_offload
            & (
                node_bytes(c) * dp_replicate * optimizer_offload_fraction
                > c.cluster.host_memory_bytes
            )
        ),
        rule=lambda x, c: (
            f"needs {format_bytes(node_bytes(c) * x.dp_replicate * x.optimizer_offload_fraction)} "
            f"of host memory in each node, which has {format_bytes(c.cluster.host_memory_bytes)}"
        ),
        remedy=lambda x, c: (
            "set cpu_offload to false, use more nodes, or lower dp_replicate"
            + (" or optimizer_offload_fraction" if c.released.offloads_partly else "")
        ),
    ),
    Rule(
        key="trainer offloads all states or none",
        field="optimizer_offload_fraction",
        applies=lambda c: not c.released.offloads_partly,
        broken=lambda optimizer_offload_fraction: optimizer_offload_fraction < 1.0,
        rule="{c.release_name} moves all optimizer states to the host or none, not a share of "
        "{x.optimizer_offload_fraction:g}",
        remedy="set optimizer_offload_fraction to 1",
    ),
    Rule(
        key="trainer keeps activations on the device",
        field="activation_offload_layers",
        applies=lambda c: not c.released.offloads_activations,
        broken=lambda activation_offload_layers: activation_offload_layers > 0,
        rule="{c.release_name} cannot move the activations of layers to the host",
        remedy="set activation_offload_layers to 0",
    ),
    Rule(
        key="activation offload keeps one layer",
        field="activation_offload_layers",
        # core/transformer/transformer_config.py: "CPU offloading can be done only for layers less
        # than ..."
        applies=lambda c: c.released.offloads_activations,
        broken=lambda activation_offload_layers, c: (
            activation_offload_layers >= c.model.num_hidden_layers
        ),
        rule="{x.activation_offload_layers} is not below the {c.model.num_hidden_layers} layers "
        "of {c.model.name}",
        remedy=lambda x, c: (
            f"set activation_offload_layers to at most {c.model.num_hidden_layers - 1}"
        ),
    ),
    Rule(
        key="activation offload excludes pipelines and recomputation",
        field="activation_offload_layers",
        # the same: "Currently there is no support for Pipeline parallelism with CPU offloading",
        # "CPU offloading does not work when activation recomputation is enabled"
        applies=lambda c: c.released.offloads_activations,
        broken=lambda activation_offload_layers, pp, ac_kind: (
            (activation_offload_layers > 0) & ((pp > 1) | (ac_kind != AC_KINDS.index("none")))
        ),
        rule="{c.release_name} moves activations to the host only without pipeline and "
        "recomputation; pp is {x.pp} and ac {x.ac}",
        remedy="set activation_offload_layers to 0, or pp to 1 and ac to none",
    ),
    Rule(
        key="a share of CPU offload without it",
        field="optimizer_offload_fraction",
        broken=lambda cpu_offload, optimizer_offload_fraction: (
            ~cpu_offload & (optimizer_offload_fraction < 1.0)
        ),
        rule="{x.optimizer_offload_fraction:g} is a share of what cpu_offload moves, which is "
        "false",
        remedy="set cpu_offload to true, or optimizer_offload_fraction to 1",
    ),
    Rule(
        key="Muon's owners need one group",
        field="zero_stage",
        # Megatron-LM training/arguments.py: "does not support Megatron-FSDP for now";
        # core/optimizer/__init__.py: "num_distributed_optimizer_instances > 1"
        applies=_owns_matrices,
        broken=lambda zero_stage, dp_replicate: (
            (zero_stage >= 2) | ((zero_stage == 1) & (dp_replicate > 1))
        ),
        rule="{c.release_name} deals Muon's matrices out to one group of ranks at stage 1, and "
        "zero_stage is {x.zero_stage} with dp_replicate {x.dp_replicate}",
        remedy="set zero_stage to 1 with dp_replicate 1, or to 0",
    ),
    Rule(
        key="Muon's states stay on the device",
        field="cpu_offload",
        # core/optimizer/__init__.py: "skip_megatron_wrapping=True is incompatible with
        # optimizer_cpu_offload"; HybridDeviceOptimizer is of Adam and SGD
        applies=_owns_matrices,
        broken=lambda cpu_offload: np.asarray(cpu_offload),
        rule="{c.release_name} cannot move Muon's states to the host",
        remedy="set cpu_offload to false",
    ),
    Rule(
        key="Muon excludes fp16",
        field="precision",
        # core/optimizer/__init__.py: "emerging optimizer with fp16 is not supported"
        applies=_owns_matrices,
        broken=lambda precision: precision == PRECISIONS.names.index("fp16"),
        rule="{c.release_name} has no Muon in fp16",
        remedy="set precision to bf16",
    ),
)
