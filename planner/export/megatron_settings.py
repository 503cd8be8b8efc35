"""Megatron-LM's arguments, one a line: what they set, and Megatron-Bridge's override of that name.

Sources: Megatron-LM core 0.14 to 0.20 megatron/training/arguments.py; Megatron-Bridge 0.2 to 0.6
    src/megatron/bridge/training/config.py, mixed_precision.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# What several arguments set together -> fields of a layout.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "stages": ("pp_schedule", "virtual_stages", "layers_per_stage"),
    "sharding": ("zero_stage", "dp_replicate"),
    "precision": ("precision", "float8_all_gather", "param_dtype"),
    "offload": ("cpu_offload", "optimizer_offload_fraction"),
}
JOB, GRAPHS, NOTHING = "job", "graphs", "-"
# argument; a field of the layout, a key of TOGETHER, the CUDA graphs, or what only a job sets;
# section of Megatron-Bridge's configuration; what an override says where the argument is not given
# and a recipe may have set it. Degrees come first, since the others are read with them.
_ROWS = """
tensor_model_parallel_size                        tp                         model            -
pipeline_model_parallel_size                      pp                         model            -
context_parallel_size                             cp                         model            -
expert_model_parallel_size                        ep                         model            -
expert_tensor_parallel_size                       etp                        model            -
cp_comm_type                                      cp_method                  model            -
sequence_parallel                                 sequence_parallel          model            off
tp_comm_overlap                                   async_tp                   model            off
account_for_embedding_in_pipeline_split           stages                     model            off
account_for_loss_in_pipeline_split                stages                     model            off
pipeline_model_parallel_layout                    stages                     model            null
num_layers_per_virtual_pipeline_stage             stages                     -                -
enable_zero_bubble                                stages                     -                -
zero_bubble_max_pending_backward                  stages                     -                -
recompute_activations                             ac                         -                -
recompute_granularity                             ac                         model            null
recompute_method                                  ac                         model            null
recompute_num_layers                              ac                         model            null
recompute_modules                                 ac                         model            null
moe_token_dispatcher_type                         moe_dispatcher             model            -
moe_flex_dispatcher_backend                       moe_dispatcher             model            -
moe_enable_deepep                                 moe_dispatcher             model            -
moe_router_dtype                                  job                        model            -
moe_grouped_gemm                                  job                        model            -
overlap_moe_expert_parallel_comm                  job                        model            off
cross_entropy_loss_fusion                         job                        model            -
cross_entropy_fusion_impl                         job                        model            -
attention_backend                                 job                        model            -
cuda_graph_impl                                   graphs                     model            -
cuda_graph_scope                                  graphs                     model            -
cuda_graph_modules                                graphs                     model            -
enable_cuda_graph                                 graphs                     model            -
external_cuda_graph                               graphs                     model            -
moe_expert_rank_capacity_factor                   job                        model            -
moe_paged_stash                                   job                        model            -
use_transformer_engine_op_fuser                   job                        model            -
te_rng_tracker                                    job                        rng              -
cpu_offloading_num_layers                         activation_offload_layers  model            -
seq_length                                        job                        model            -
hybrid_layer_pattern                              stages                     model            -
mtp_num_layers                                    job                        model            null
micro_batch_size                                  micro_batch_size           train            -
global_batch_size                                 job                        train            -
overlap_grad_reduce                               job                        ddp              off
overlap_param_gather                              sharding                   ddp              off
use_distributed_optimizer                         sharding                   ddp              off
num_distributed_optimizer_instances               sharding                   ddp              -
use_megatron_fsdp                                 sharding                   ddp              off
data_parallel_sharding_strategy                   sharding                   ddp              -
use_custom_fsdp                                   sharding                   -                -
use_torch_fsdp2                                   sharding                   -                -
no_gradient_accumulation_fusion                   sharding                   -                -
optimizer                                         job                        optimizer        -
clip_grad                                         job                        optimizer        -
optimizer_cpu_offload                             offload                    optimizer        off
optimizer_offload_fraction                        offload                    optimizer        -
use_precision_aware_optimizer                     job                        optimizer        off
exp_avg_dtype                                     job                        optimizer        -
exp_avg_sq_dtype                                  job                        optimizer        -
muon_tp_mode                                      job                        optimizer        -
bf16                                              precision                  mixed_precision  -
fp16                                              precision                  mixed_precision  -
fp8                                               precision                  -                -
fp8_recipe                                        precision                  mixed_precision  -
fp8_param_gather                                  precision                  mixed_precision  -
fp4_recipe                                        precision                  mixed_precision  -
save_interval                                     job                        checkpoint       -
async_save                                        job                        checkpoint       -
ckpt_format                                       job                        checkpoint       -
num_virtual_stages_per_pipeline_rank              stages                     model            null
microbatch_group_size_per_virtual_pipeline_stage  stages                     model            -
decoder_first_pipeline_num_layers                 stages                     model            null
decoder_last_pipeline_num_layers                  stages                     model            null
qk_clip                                           job                        model            -
moe_expert_capacity_factor                        job                        model            -
moe_pad_expert_input_to_capacity                  job                        model            -
fp8_format                                        precision                  mixed_precision  -
fp4_format                                        precision                  mixed_precision  -
accumulate_allreduce_grads_in_fp32                reduce_dtype               mixed_precision  -
grad_reduce_in_bf16                               reduce_dtype               -                -
"""
_RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage", "fp8_format": "fp8",
    "fp4_format": "fp4", "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _MegatronSetting:
    """One argument, named with _ for -; `sets`, `section` and `absent` as in the table."""

    name: str
    sets: str
    section: str
    absent: str


CAPACITY, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
SETTINGS = tuple(_MegatronSetting(*line.split()) for line in _ROWS.strip().splitlines())
GROUPS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    TOGETHER.get(sets, (sets,)): tuple(one.name for one in SETTINGS if one.sets == sets)
    for sets in dict.fromkeys(one.sets for one in SETTINGS)
    if sets not in (JOB, GRAPHS)
}
"""Fields of a layout -> the arguments that set them together."""
DEGREES = {fields[0]: names[0] for fields, names in [*GROUPS.items()][:5]}
"""Degree of a layout -> its argument, a number whose default is 1."""
GRAPH_ARGUMENTS = frozenset(one.name for one in SETTINGS if one.sets == GRAPHS)
KEYS: Mapping[str, str] = {
    one.name: f"{one.section}.{_RENAMED.get(one.name, one.name)}"
    for one in SETTINGS
    if one.section != NOTHING
}
"""Argument -> the override of a recipe of Megatron-Bridge that says the same."""
TAKEN_BACK: Mapping[str, object] = {
    one.name: {"off": False, "null": None}[one.absent] for one in SETTINGS if one.absent != NOTHING
}
"""Argument -> the override against a recipe's own value, where the layout has none."""
