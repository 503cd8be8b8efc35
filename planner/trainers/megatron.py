"""Megatron-LM."""

from dataclasses import replace
from functools import lru_cache

from planner.precision import Recipe, transformer_engine
from planner.specs.layout import COMMON
from planner.trainers.attention import TRANSFORMER_ENGINE
from planner.trainers.base import NEVER, Change, TrainerRules
from planner.trainers.megatron_models import lacking
from planner.trainers.muon import LAYER_WISE, PING_PONG
from planner.trainers.release import Known, Release, Releases
from planner.trainers.strategies import DISTRIBUTED_OPTIMIZER
from planner.trainers.strategies import MEGATRON as MEGATRON_FRAMEWORK
from planner.trainers.tp_overlap import DEFERRED, TpOverlap

# NeMo's fp8 recipes set fp8_param_gather (Megatron Bridge training/mixed_precision.py);
# Megatron-LM's default is off
NATIVE = "NeMo"
# The dev branch had partial graphs beside recomputation and HybridEP before main (0.16); NeMo
# 25.11 and Megatron-Bridge 0.2 ship it ("dev:0.15.0", docs/releases/software-versions.md).
DEV_0_15 = "2025-11-01"
CP_TYPES = {"allgather": "all_gather", "alltoall": "p2p", "ulysses": "a2a"}  # --cp-comm-type
_DISPATCHERS = frozenset({"alltoall", "allgather"})
AC_KINDS = frozenset({"none", "full", "selective-attention", "block", "uniform"})
# of sets of modules those whose outputs are discarded: repeating them costs a percent or two
SEARCHED_AC = (
    "none", "selective-attention", "modules-moe_act", "modules-layernorm+moe_act",
    "modules-mla_up_proj", "modules-layernorm+moe_act+mla_up_proj", "full",
)  # fmt: skip
PRECISIONS = frozenset(
    {"bf16", "fp16", "float8-tensorwise", "float8-delayed", "float8-blockwise", "mxfp8", "nvfp4",
        "mxfp4"}
)  # fmt: skip
OPTIMIZERS = ("adamw", "adamw-bf16-states", "sgd")
# Months of its tags (github.com/NVIDIA/Megatron-LM/releases: v2.x to v3.0, then core_v0.2 on); from
# 0.12 on, months of its wheels. The months of 2020 to 2022 are judgements, where only their order
# matters, and so is 0.20's, whose arguments and rules are those of the main branch of 2026-08-22.
DEFAULT = "0.19"  # the newest whose release we have read
_HISTORY = (
    ("2.0", "2020-12"), ("2.1", "2021-01"), ("2.2", "2021-03"), ("2.3", "2021-04"),
    ("2.4", "2021-05"), ("2.5", "2021-07"), ("2.6", "2021-11"), ("3.0", "2022-09"),
    ("0.2", "2023-08"), ("0.3", "2023-10"), ("0.4", "2023-12"), ("0.5", "2024-01"),
    ("0.6", "2024-04"), ("0.7", "2024-06"), ("0.8", "2024-08"), ("0.9", "2024-10"),
    ("0.10", "2025-02"), ("0.11", "2025-03"), ("0.12", "2025-05"), ("0.13", "2025-07"),
    ("0.14", "2025-10"), ("0.15", "2025-12"), ("0.16", "2026-02"), ("0.17", "2026-04"),
    ("0.18", "2026-06"), ("0.19", "2026-08"), ("0.20", "2026-10"),
)  # fmt: skip


def _recipes(release: Release) -> tuple[Recipe, ...]:
    """Transformer Engine's recipes; under NeMo's fp8 recipes parameters are always in fp8."""
    return native(transformer_engine(), release.named.distribution == NATIVE)


@lru_cache(maxsize=16)
def native(recipes: tuple[Recipe, ...], in_fp8: bool) -> tuple[Recipe, ...]:
    """Recipes with parameters in fp8, as in Bridge's presets (mixed_precision.py), or not."""
    able = {one.name for one in recipes if one.peak == "fp8"} - {"float8-blockwise"}
    return tuple(replace(one, native=in_fp8 and one.name in able) for one in recipes)


NATIVE_OVERLAP = TpOverlap(
    mechanism="user-buffers",
    releases=Releases(distribution=NATIVE),
    source="Megatron-Bridge and NeMo performance recipes: CommOverlapConfig"
    "(tp_comm_overlap=True), before them ub_tp_comm_overlap: True; it is switched off without "
    "sequence_parallel (training/comm_overlap.py)",
)
TP_OVERLAPS = (
    NATIVE_OVERLAP,
    TpOverlap(
        mechanism="user-buffers",
        asked=True,
        releases=Releases(since="0.5"),
        source="Megatron-LM training/arguments.py --tp-comm-overlap, off by default",
    ),
    # the flag --no-async-tensor-model-parallel-allreduce and sequence parallelism are of 3.0
    replace(DEFERRED, releases=Releases(since="3.0")),
)
MEGATRON = TrainerRules(
    name="megatron",
    title="Megatron-LM",
    vendors={"nvidia": "", "amd": "ROCm/Megatron-LM"},
    history=tuple(Known(number=number, day=day) for number, day in _HISTORY),
    default_release=DEFAULT,
    changes=(
        # core/fp4_utils.py came with 0.15; the repository had it before 12 September 2025
        # (TransformerEngine issue 2171), which is what NeMo 25.09 ships
        Change(
            Releases(before="0.15", before_day="2025-09-01"),
            {"precisions": PRECISIONS - {"nvfp4", "mxfp4"}},
        ),
        # transformer_config.py: enable_cuda_graph (layers) came with core 0.7, cuda_graph_scope
        # full_iteration with 0.14, moe_router with 0.16
        Change(Releases(before="0.7"), {"cuda_graphs": frozenset({"none"})}),
        Change(
            Releases(since="0.7", before="0.14"), {"cuda_graphs": frozenset({"none", "partial"})}
        ),
        # transformer_config.py: num_query_groups divides or is divided by TP since 0.16
        Change(Releases(before="0.16"), {"captures_routing": False, "replicates_kv_heads": False}),
        # docs/user-guide/features/paged_stash.md: moe_expert_rank_capacity_factor came with 0.18;
        # before it the host reads how many rows each expert gets, unless tokens are dropped
        Change(Releases(before="0.18"), {"captures_dropless": False}),
        # core 0.12 optimizer_config.py (optimizer_offload_fraction), arguments.py
        # (--recompute-modules, --cross-entropy-fusion-impl te)
        Change(
            Releases(before="0.12"),
            {"offloads_partly": False, "ac_kinds": AC_KINDS, "fuses_cross_entropy": False},
        ),
        # training/arguments.py (--cpu-offloading-num-layers); before core 0.15 weights moved too
        # (model_parallel_config.py, cpu_offloading_weights)
        Change(Releases(before="0.15"), {"offloads_activations": False}),
        # core 0.12 transformer_config.py (moe_enable_deepep), 0.16 (moe_flex_dispatcher_backend)
        Change(Releases(since="0.12"), {"moe_dispatchers": _DISPATCHERS | {"deepep"}}),
        Change(
            Releases(since="0.16", since_day=DEV_0_15),
            {"moe_dispatchers": _DISPATCHERS | {"deepep", "hybridep"}},
        ),
        # core 0.14 transformer_config.py (overlap_moe_expert_parallel_comm)
        Change(Releases(since="0.14"), {"overlaps_exchange": True}),
        # core 0.16 optimizer/qk_clip.py
        Change(Releases(since="0.16"), {"clips_qk": True}),
        # core 0.7 transformer_config.py (moe_pad_expert_input_to_capacity)
        Change(Releases(since="0.7"), {"drops_tokens": True}),
        # core 0.18 transformer_config.py (use_transformer_engine_op_fuser, which full graphs of
        # dropless experts need); cuDNN's kernel is for MXFP8 (NVTE_CUTEDSL_FUSED_GROUPED_MLP)
        Change(Releases(since="0.18"), {"fuses_experts": True}),
        # core 0.13 transformer/moe/experts.py (weighted_bias_swiglu_impl with permuted_probs);
        # before it token_dispatcher.py multiplied the experts' outputs (unpermute with probs)
        Change(Releases(since="0.13"), {"scores_inside": True}),
        # --pipeline-model-parallel-layout came with core 0.13
        Change(Releases(before="0.13"), {"writes_splits": False}),
        # --optimizer muon came with core 0.16; training/arguments.py of 0.16 and 0.17 asserts that
        # nothing hides its communication, or not without dist_muon. Buffers with a layout for the
        # owners came with 0.18 (layer_wise_optimizer.py). 0.20 changed the mode's default.
        Change(Releases(before="0.16"), {"optimizers": OPTIMIZERS}),
        Change(Releases(before="0.18"), {"muon": PING_PONG}),
        Change(Releases(before="0.17"), {"muon": replace(PING_PONG, hides_sharded=False)}),
        Change(Releases(since="0.20"), {"muon": replace(LAYER_WISE, tp_mode="duplicated")}),
    ),
    # NeMo performance recipes: grad_reduce_in_fp32=False, grad_sync_dtype bf16
    distributions={"NeMo": {"reduce_dtype": "bfloat16"}},
    offered=(DEFAULT,),
    export_format="megatron",
    lacks=lacking,
    optimizers=(*OPTIMIZERS, "muon"),
    muon=LAYER_WISE,
    zero_stage=1,
    zero_stage_under_pp=1,
    ac="none",
    layout_defaults=COMMON,
    expandable_segments=False,
    zero_stages=frozenset({0, 1, 2, 3}),
    precisions=PRECISIONS,
    # --recompute-method block | uniform, --recompute-num-layers, --recompute-modules
    ac_kinds=AC_KINDS | {"modules"},
    cp_methods=frozenset(CP_TYPES),
    cp_words=CP_TYPES,
    moe_dispatchers=_DISPATCHERS,
    # core 0.16 transformer_config.py (cuda_graph_impl, cuda_graph_scope; the default is none, and
    # Megatron Bridge keeps it, docs/training/cuda-graphs.md)
    cuda_graphs=frozenset({"none", "partial", "full"}),
    fuses_cross_entropy=True,
    offloads_partly=True,
    offloads_activations=True,
    # core 0.16 transformer_config.py (num_query_groups; account_for_embedding_in_pipeline_split,
    # account_for_loss_in_pipeline_split), moe_layer.py (sequence parallelism with experts)
    replicates_kv_heads=True,
    sp_with_experts=True,
    split="even",
    ep_over_replicas=True,
    searched_ac=SEARCHED_AC,
    searched_precisions=("float8-tensorwise", "float8-delayed", "float8-blockwise", "mxfp8"),
    sharding=DISTRIBUTED_OPTIMIZER,
    framework=MEGATRON_FRAMEWORK,
    tp_overlaps=TP_OVERLAPS,
    recipes_in=_recipes,
    fused_kernels=True,
    # Transformer Engine common/gemm/cublaslt_gemm.cu: "default to tf32"
    tf32=True,
    drops_residual=True,  # training/arguments.py --hidden-dropout
    # --attention-backend flash | fused | unfused; Transformer Engine takes flash-attn 3 on Hopper
    # where it is installed (dot_product_attention/utils.py get_attention_backend)
    attention=TRANSFORMER_ENGINE,
    attention_kernels=frozenset({"flash2", "flash3", "cudnn", "unfused"}),
    early_stop=False,
    repeats_kv_until=NEVER,
    composite_norm_until=NEVER,
    composite_norm_since="",
    expert_alignment=0,
    fused_sums=True,  # --no-gradient-accumulation-fusion is off by default
    # 16-bit logits or their gradient, and the softmax, which overwrites their fp32 copy
    # (tensor_parallel/cross_entropy.py)
    loss_bytes=6.0,
    fused_loss_bytes=6.0,
    sharded_loss_bytes=6.0,
    fused_sharded_loss_bytes=6.0,
    eager_loss_until="",
    loss_leftover_bytes=0.0,
    placeholders_since="2023-12",
    source="Megatron-LM core 0.14 to 0.20 megatron/training/arguments.py; AMD maintains the fork "
    "github.com/ROCm/Megatron-LM",
)
