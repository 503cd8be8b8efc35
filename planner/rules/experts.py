"""Rules on expert parallelism.

Experts regroup the ranks of one pipeline stage: ep x etp of them hold one set of experts.
"""

import numpy as np

from planner.columns import BoolColumn, IntColumn, LayoutBatch
from planner.rules.base import Context, Rule, choices, divides, divisors, in_set, under
from planner.rules.expert_recipes import recipes, runs_as
from planner.rules.recomputed_modules import recomputes
from planner.schedules import SCHEDULES
from planner.specs.layout import AC_KINDS, MOE_DISPATCHERS, Layout, parse_ac
from planner.trainers.titan_models import line_of, module_of
from planner.units import counted
from planner.work.axes import overlapping_exchange


def expert_ranks(x: LayoutBatch, c: Context) -> IntColumn:
    """Ranks over which experts may spread. (N,).

    dp_shard x cp x tp, and also x dp_replicate where the trainer allows it.
    """
    ranks = x.dp_shard * x.cp * x.tp
    return ranks * x.dp_replicate if c.trainer.ep_over_replicas else ranks


def _pool(x: Layout, c: Context) -> int:
    return int(expert_ranks(LayoutBatch.from_layouts([x]), c)[0])


def _etp_width(ep: IntColumn, etp: IntColumn, tp: IntColumn, c: Context) -> BoolColumn:
    """Where the width of an expert does not divide by its TP degree. (N,).

    TorchTitan cuts experts by tp while ep = 1, whatever etp is.
    Source: torchtitan expert_parallel.py, apply_moe_ep_tp.
    """
    cut = np.where(ep > 1, etp, tp) if c.trainer.etp_one_or_tp else etp
    return ~divides(c.model.moe_intermediate_size, cut)


def _needs(c: Context, name: str) -> str:
    """Needs of the dispatcher that this cluster lacks; "" where it runs.

    Sources: DeepEP README (Hopper, NVLink inside and RDMA between nodes, NVSHMEM); Megatron Bridge
    training/flex_dispatcher_backend.py (DeepEP on Hopper, B200 and B300; HybridEP also on GB200 and
    GB300); csrc/deep_ep.cpp (rows of whole 16 bytes).
    """
    gpu, domain = c.cluster.gpu, c.cluster.fabric[0].gpus
    if gpu.family not in ("hopper", "blackwell"):
        return f"needs NVSHMEM on a Hopper or Blackwell GPU, not {gpu.name}"
    if name == "deepep" and domain > DEEPEP_NODE:
        return f"serves NVLink domains of up to {DEEPEP_NODE} GPUs, not {domain}"
    if c.model.hidden_size % 8:
        return f"sends rows of whole 16 bytes, not {c.model.hidden_size} elements"
    return ""


def _in_the_way(x: Layout, c: Context) -> tuple[str, str]:
    """Reason why the exchange of experts cannot run under compute, and its remedy."""
    if not c.released.overlaps_exchange:
        return "at all", "use Megatron-LM from 0.14"
    if x.moe_dispatcher == "allgather":
        return "with the dispatcher allgather", "moe_dispatcher to alltoall"
    if x.pp == 1 and c.model.mtp_num_layers and _MTP_BEHIND(c):
        return "with multi-token prediction and pp=1", "pp to 2 or more"
    if parse_ac(x.ac)[0] in ("full", "block", "uniform"):
        return f"where whole layers are recomputed (ac {x.ac})", "ac to none"
    return f"with pp={x.pp} and one stage a rank", "virtual_stages to 2 or more"


def overlaps_exchange(x: LayoutBatch, c: Context) -> BoolColumn:
    """Layouts that overlap the exchange of experts with another microbatch's compute, (N,).

    Unless the job decides, they overlap where NVIDIA's recipe does with the same dispatcher.
    """
    asked = np.full(np.shape(x.ep), bool(c.training.overlap.ep))
    for precision in overlapping(c):
        asked |= runs_as(x, precision, recipes(c)[precision]) & ~recomputes(x, "moe")
    return asked & _may_overlap(x, c) if asked.any() else asked


def overlapping(c: Context) -> list[int]:
    """Precisions whose recipe overlaps the exchange; none where the job sets `overlap.ep`."""
    if c.training.overlap.ep is not None or not c.model.is_moe:
        return []
    return [index for index, one in recipes(c).items() if one.overlap]


def columns_read(c: Context) -> tuple[str, ...]:
    """Columns that `overlaps_exchange` reads; none where no layout overlaps."""
    reads = ("ac_kind", "ac_value", "ep", "pp", "virtual_stages")
    if overlapping(c):
        return (*reads, "moe_dispatcher", "precision")
    return reads if c.training.overlap.ep and c.model.is_moe else ()


def _may_overlap(x: LayoutBatch, c: Context) -> BoolColumn:
    return overlapping_exchange(x) & c.released.overlaps_exchange & _predicts(x, c)


def _predicts(x: LayoutBatch, c: Context) -> BoolColumn:
    """Whether overlap of the exchange leaves a layer of multi-token prediction, if there is one."""
    return np.asarray((x.pp > 1) | (not (c.model.mtp_num_layers and _MTP_BEHIND(c))))


def _one_copy(moe_dispatcher: IntColumn) -> BoolColumn:
    return in_set(moe_dispatcher, MOE_DISPATCHERS, ONE_COPY)


def _cannot_dispatch(moe_dispatcher: IntColumn, c: Context) -> BoolColumn:
    lacks = [bool(_needs(c, name)) if name in ONE_COPY else False for name in MOE_DISPATCHERS]
    return np.asarray(np.array(lacks)[moe_dispatcher])


# deep_ep/buffer.py, get_dispatch_config: it asserts that the group is of one of these sizes, and
# neither trainer brings a configuration of its own. Releases before 1.2 lack 48 and 96.
DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
DEEPEP_NODE = 8  # csrc/kernels/configs.cuh, NUM_MAX_NVL_PEERS
ONE_COPY, PADDING = frozenset({"deepep", "hybridep"}), frozenset({"alltoall", "hybridep"})
_TITAN_02, _TITAN_03 = under("torchtitan", before="0.3"), under("torchtitan", since="0.3")
# core 0.16 transformer_config.py: "Pipeline model parallel size must be larger than 1"
_MTP_BEHIND = under("megatron", since="0.16", before="0.18")
_TITAN_021 = under("torchtitan", since="0.2.1", before="0.3")
EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        key="expert parallelism without experts",
        field="ep",
        applies=lambda c: not c.model.is_moe,
        broken=lambda ep, etp: (ep > 1) | (etp > 1),
        rule="ep={x.ep} x etp={x.etp}: {c.model.name} has no experts",
        remedy="set ep and etp to 1",
    ),
    Rule(
        key="ep does not divide the experts",
        field="ep",
        applies=lambda c: c.model.is_moe,
        broken=lambda ep, c: ~divides(c.model.num_experts, ep),
        rule=lambda x, c: (
            f"ep={x.ep} does not divide {counted(c.model.num_experts, 'expert')} of {c.model.name}"
        ),
        remedy=lambda x, c: f"try ep {choices(divisors(c.model.num_experts))}",
    ),
    Rule(
        key="etp is neither 1 nor tp",
        field="etp",
        applies=lambda c: c.model.is_moe and c.trainer.etp_one_or_tp,
        broken=lambda etp, tp: (etp != 1) & (etp != tp),
        rule="etp={x.etp} is neither 1 nor tp={x.tp}, as {c.trainer.name} needs",
        remedy=lambda x, c: f"set etp to {choices(sorted({1, x.tp}))}",
    ),
    Rule(
        key="experts are cut over more ranks than tp",
        field="etp",
        applies=lambda c: c.model.is_moe and not c.trainer.etp_one_or_tp,
        # core/transformer/moe/token_dispatcher.py gathers over expert-tensor ranks; those that are
        # no TP ranks of each other hold different tokens
        broken=lambda tp, etp: tp % etp != 0,
        rule="etp={x.etp} cuts experts over ranks that hold different tokens (tp={x.tp}); "
        "gathering those is not priced",
        remedy=lambda x, c: f"set etp to {choices(sorted({1, x.tp}))}",
    ),
    # core 0.15 transformer/transformer_config.py: "Bias in Moe is only supported when ETP==1"
    Rule(
        key="experts with biases are not cut",
        field="etp",
        applies=lambda c: c.model.expert_bias and under("megatron")(c),
        broken=lambda etp: etp > 1,
        rule="{c.trainer.title} does not cut experts with biases over etp={x.etp}",
        remedy="set etp to 1",
    ),
    Rule(
        key="TorchTitan 0.3 never splits experts over TP",
        field="etp",
        applies=lambda c: c.model.is_moe and _TITAN_03(c),
        broken=lambda ep, etp: (ep > 1) & (etp != 1),
        rule="TorchTitan {c.release.number} has no setting for etp={x.etp}: with ep={x.ep} "
        "experts are whole",
        remedy="set etp to 1, or training.trainer_version to 0.2.2",
    ),
    Rule(
        key="etp does not divide the expert width",
        field="etp",
        applies=lambda c: c.model.is_moe,
        broken=_etp_width,
        rule="etp={x.etp} (tp={x.tp}) does not divide {c.model.name}'s moe_intermediate_size "
        "{c.model.moe_intermediate_size}",
        remedy=lambda x, c: (
            "try etp "
            + choices(n for n in divisors(c.model.moe_intermediate_size) if n <= max(x.etp, x.tp))
        ),
    ),
    Rule(
        key="ep x etp does not divide its ranks",
        field="ep",
        reads=frozenset({"dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"}),
        applies=lambda c: c.model.is_moe,
        broken=lambda x, c: (x.ep * x.etp > 1) & (expert_ranks(x, c) % (x.ep * x.etp) != 0),
        rule=lambda x, c: (
            f"ep={x.ep} x etp={x.etp} does not divide {counted(_pool(x, c), 'rank')} "
            f"({'dp_replicate x ' * c.trainer.ep_over_replicas}dp_shard x cp x tp)"
        ),
        remedy=lambda x, c: f"make ep x etp one of {choices(divisors(_pool(x, c)))}",
    ),
    Rule(
        key="the dispatcher does not run on this cluster",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe,
        broken=_cannot_dispatch,
        rule=lambda x, c: f"{x.moe_dispatcher} {_needs(c, x.moe_dispatcher)}",
        remedy="set moe_dispatcher to alltoall",
    ),
    Rule(
        key="the dispatcher needs expert parallelism",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe,
        broken=lambda moe_dispatcher, ep: _one_copy(moe_dispatcher) & (ep == 1),
        rule="{x.moe_dispatcher} exchanges tokens between ranks, and ep is 1",
        remedy="set moe_dispatcher to alltoall, or ep above 1",
    ),
    # drop_and_pad in Megatron-LM transformer/moe/token_dispatcher.py: core 0.14
    # MoEAlltoAllTokenDispatcher, 0.16 _HybridEPManager; the others pad none, or refuse to
    Rule(
        key="the dispatcher pads no experts",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe and c.training.moe_capacity_factor is not None,
        broken=lambda moe_dispatcher: ~in_set(moe_dispatcher, MOE_DISPATCHERS, PADDING),
        rule="{x.moe_dispatcher} does not fill each expert to its capacity "
        "(training.moe_capacity_factor)",
        remedy="set moe_dispatcher to alltoall, or leave moe_capacity_factor out",
    ),
    Rule(
        key="DeepEP has no configuration for the group",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe,
        broken=lambda moe_dispatcher, ep: (
            (moe_dispatcher == MOE_DISPATCHERS.index("deepep"))
            & (ep > 1)
            & ~np.isin(ep, DEEPEP_SIZES)
        ),
        rule="deepep has no configuration for groups of ep={x.ep} ranks",
        remedy=lambda x, c: f"make ep one of {choices(DEEPEP_SIZES)}, or use alltoall",
    ),
    # torchtitan 0.2.2 models/deepseek_v3/infra/parallelize.py: "DeepEP with Expert Tensor
    # Parallelism (ETP) is not supported yet"
    Rule(
        key="the dispatcher does not serve cut experts",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe and c.trainer.etp_one_or_tp,
        broken=lambda moe_dispatcher, ep, etp: _one_copy(moe_dispatcher) & (ep > 1) & (etp > 1),
        rule="{c.trainer.name} has no {x.moe_dispatcher} for experts cut by TP (etp={x.etp})",
        remedy="set etp to 1, or moe_dispatcher to alltoall",
    ),
    # only this model's MoE reads the setting (models/deepseek_v3/model/args.py, moe_impl)
    Rule(
        key="TorchTitan 0.2 has DeepEP for DeepSeek alone",
        field="moe_dispatcher",
        applies=lambda c: c.model.is_moe and _TITAN_02(c) and not c.model.uses_mla,
        broken=_one_copy,
        rule="TorchTitan {c.release.number} has {x.moe_dispatcher} for DeepSeek models alone, not "
        "{c.model.name}",
        remedy="set moe_dispatcher to alltoall, or training.trainer_version to 0.3.0",
    ),
    # Megatron-Core 0.14 transformer_config.py (overlap_moe_expert_parallel_comm)
    Rule(
        key="the exchange cannot overlap",
        field="ep",
        reads=frozenset({"ep", "pp", "virtual_stages", "ac_kind", "moe_dispatcher"}),
        applies=lambda c: c.model.is_moe and c.training.overlap.ep is True,
        broken=lambda x, c: (x.ep > 1) & ~_may_overlap(x, c),
        rule=lambda x, c: (
            f"{c.trainer.name} {c.release.number} cannot run the exchange of experts under compute "
            f"(training.overlap.ep) {_in_the_way(x, c)[0]}"
        ),
        remedy=lambda x, c: f"set training.overlap.ep to false, or {_in_the_way(x, c)[1]}",
    ),
    # torchtitan 0.2.2 models/llama4/infra/parallelize.py and those that follow it: they ask for the
    # mesh "fsdp", which parallel_dims.get_mesh refuses at size 1; qwen3's asks where there is one
    Rule(
        key="expert parallelism needs FSDP beside it",
        field="ep",
        applies=lambda c: (
            c.model.is_moe and _TITAN_021(c) and module_of(c.model, line_of(c.release)) != "qwen3"
        ),
        broken=lambda ep, dp_shard, cp: (ep > 1) & (dp_shard * cp == 1),
        rule="TorchTitan {c.release.number} asks for the mesh of FSDP where ep={x.ep}, and "
        "dp_shard x cp is 1",
        remedy="set dp_shard or cp to 2 or more, or ep to 1",
    ),
    # torchtitan distributed/dual_pipe_v.py, get_dual_pipe_v_flag:
    # pipeline_parallel_expert_parallel_overlap is on by default; 0.3 has no such overlap
    Rule(
        key="DualPipeV's exchange excludes recomputation",
        field="ac",
        applies=lambda c: c.model.is_moe and _TITAN_021(c),
        broken=lambda ep, pp, pp_schedule, ac_kind: (
            (ep > 1)
            & (pp > 1)
            & (pp_schedule == SCHEDULES.names.index("DualPipeV"))
            & (ac_kind != AC_KINDS.index("none"))
        ),
        rule="TorchTitan {c.release.number} refuses ac {x.ac} where DualPipeV overlaps the "
        "exchange of ep={x.ep}",
        remedy="set ac to none, or pp_schedule to ZBVZeroBubble",
    ),
    Rule(
        key="tp with ep needs sequence parallelism",
        field="sequence_parallel",
        applies=lambda c: c.model.is_moe and c.trainer.sp_with_experts,
        broken=lambda ep, tp, sequence_parallel: (ep > 1) & (tp > 1) & ~sequence_parallel,
        rule="{c.trainer.name} refuses ep={x.ep} with tp={x.tp} without sequence parallelism",
        remedy="set sequence_parallel to true",
    ),
)
