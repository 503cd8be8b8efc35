"""Each rule breaks where it should, passes by its remedy, reads what it claims, and fits runs."""

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import yaml

from planner.catalog.clusters import gpu_aliases
from planner.columns import LayoutBatch
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.precision import PRECISIONS
from planner.rules import Context, all_rules, broken_rules, rules_for, violations
from planner.rules.base import choices, divisors
from planner.specs.layout import Layout
from planner.trainers.registry import TRAINERS
from tests.golden.rows import published
from tests.pricing import layout_of

MEGATRON: dict[str, Any] = {"trainer": "megatron"}
TITAN_03: dict[str, Any] = {"trainer_version": "0.3.0"}
H100, A100, B200 = "h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb"


def context(
    model: Any = "llama3-8b", gpu: str = H100, num_gpus: int = 16, **training: Any
) -> Context:
    return Context(
        model=read_model(model),
        cluster=read_cluster({"gpu": gpu, "num_gpus": num_gpus}),
        training=read_training({"seq_len": 8192, "global_batch_size": 64, **training}),
    )


def broken_keys(c: Context, layout: dict[str, Any]) -> set[str]:
    batch = LayoutBatch.from_layouts([layout_of(c, **layout)])
    return {rule.key for rule, _ in broken_rules(batch, c)}


@dataclass(frozen=True)
class Case:
    key: str
    broken: dict[str, Any]
    passing: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def values(text: str) -> dict[str, Any]:
    """Of "tp=4 compile=true"."""
    pairs = (word.split("=", 1) for word in text.split())
    return {key: yaml.safe_load(value) for key, value in pairs}


def job_of(text: str) -> dict[str, Any]:
    """Of "MODEL TRAINER RELEASE GPU key=value", each where it is not the usual one; a model may be
    one of MODELS, or of the catalogue with "+key=value" of its own.
    """
    job: dict[str, Any] = {}
    for word in text.split():
        base, *own = word.split("+")
        if "=" in base:
            part, _, key = base.rpartition(".")
            job |= {part: values(key)} if part else values(key)
        elif base in TRAINERS:
            job["trainer"] = base
        elif re.match(r"\d|core_|zero-bubble", base):
            job["trainer_version"] = base
        elif base in gpu_aliases():
            job["gpu"] = base
        else:
            changed = {"base": base, **values(" ".join(own))}
            job["model"] = changed if own else MODELS.get(base, base)
    return job


def case(key: str, broken: str, passing: str, job: str | dict = "", text: str = "") -> Case:
    whole = job if isinstance(job, dict) else job_of(job)
    return Case(key, values(broken), values(passing), whole, text)


MIMO = {"model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384,
    "num_hidden_layers": 4, "vocab_size": 152576, "num_attention_heads": 64,
    "num_key_value_heads": 4, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
    "head_dim": 192, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "moe_layer_freq": [0, 1, 1, 1], "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0]}  # fmt: skip
MODELS = {"MIMO": MIMO}
CASES = [
    case("degrees do not multiply to num_gpus", "tp=4 dp_shard=8", "tp=4 dp_shard=4",
        text="= 32 ranks on 16 GPUs"),
    case("tp does not divide the attention heads", "tp=16", "tp=2", "phi3-medium",
        "tp=16 does not divide 40 attention heads"),
    case("tp does not divide the KV heads", "tp=16", "tp=8",
        text="tp=16 does not divide 8 KV heads of llama3-8b"),
    case("tp does not divide the MLP width", "tp=4", "tp=2", "llama3-8b+intermediate_size=14338",
        "14338"),
    case("tp x cp does not divide the heads of a recurrent mixer", "tp=2 cp=16", "tp=2 cp=8",
        "qwen3-next-80b-a3b megatron num_gpus=64", "16 groups of heads"),
    case("gated DeltaNet under context parallelism came with a release", "cp=2", "cp=1",
        "qwen3-next-80b-a3b megatron 0.17", "has no gated DeltaNet with cp=2"),
    case("the dispatcher pads no experts", "ep=8 moe_dispatcher=deepep", "ep=8",
        "qwen3-30b-a3b megatron moe_capacity_factor=1", "does not fill each expert"),
    case("sparse attention over TP needs sequence parallelism", "tp=2 sequence_parallel=false",
        "tp=2", "glm5 megatron", "only beside it"),
    case("tp leaves heads that the sparse kernel does not pad", "tp=2", "tp=1",
        "glm5+num_attention_heads=192+num_key_value_heads=192 megatron", "leaves 96 heads a rank"),
    case("sparse attention gathers keys over CP", "cp=2 cp_method=alltoall",
        "cp=2 cp_method=allgather", "glm5 megatron", "no sparse attention with cp_method alltoall"),
    case("a stage begins with a layer that has no indexer", "pp=2", "pp=2 layers_per_stage=[38,40]",
        "glm5.2 megatron num_gpus=16", "begins with a layer that has no indexer"),
    case("a stage begins under a shortcut", "pp=8", "pp=4", "longcat-flash fsdp num_gpus=64",
        "to which the outputs of experts of the layer before are added"),
    case("layers read what no stage hands on", "pp=2", "pp=1", "gemma4-e4b fsdp",
        "read per-layer embeddings and keys and values of earlier layers"),
    case("the trainer does not cut recurrent mixers", "cp=2", "cp=1", "qwen3-next-80b-a3b fsdp",
        "runs recurrent layers whole"),
    case("experts with biases are not cut", "tp=4 etp=4", "tp=4 etp=1",
        "gpt-oss-20b megatron-bridge", "over etp=4"),
    case("Megatron-Bridge cuts no hybrid model into chunks",
        "pp=2 pp_schedule=Interleaved1F1B virtual_stages=2", "pp=2",
        "nemotron-h-56b megatron-bridge", "such as nemotron-h-56b one"),
    case("MiMo-V2-Flash under Megatron-Bridge", "cp=2", "cp=1", "MIMO megatron-bridge",
        "without CP"),
    case("MiMo-V2-Flash under Megatron-Bridge", "tp=8", "tp=4", "MIMO megatron-bridge",
        "groups of heads, 4"),
    case("compressed attention is not cut", "tp=2", "tp=1", "deepseek-v4-flash megatron-bridge",
        "attention whole"),
    case("hash-routed layers stand behind the embedding", "pp=16", "pp=8",
        "deepseek-v4-flash megatron-bridge", "from the embedding"),
    case("cp does not cut the sequence evenly", "cp=8", "cp=2", "seq_len=4100 num_gpus=8",
        "2 x cp = 16"),
    case("tp does not cut the sequence evenly", "tp=8", "tp=2", "seq_len=4100", "2 x cp x tp = 16"),
    case("tp does not cut the sequence evenly", "tp=8", "tp=8 sequence_parallel=false",
        "megatron seq_len=4100", "tp=8"),
    case("ulysses needs cp to divide the heads of a TP rank", "tp=4 cp=4 cp_method=ulysses",
        "tp=4 cp=2 cp_method=ulysses", "megatron", "cp=4 does not divide 2 KV heads"),
    case("context parallelism needs flash attention", "cp=2", "cp=1", "attention_kernel=unfused",
        "cp=2"),
    case("data-parallel ranks do not divide the global batch", "dp_shard=16", "dp_shard=8 tp=2",
        "global_batch_size=24", "16 data-parallel ranks do not divide global_batch_size 24"),
    case("microbatch does not divide the local batch", "micro_batch_size=3", "micro_batch_size=2",
        text="the 4 sequences"),
    case("GPU lacks fp32 matmuls", "param_dtype=float32", "", "tpu-v5p", "lists no fp32"),
    case("TorchTitan cannot pipeline the model", "pp=2", "pp=1", "qwen3-8b",
        "has no pipelining_fn"),
    case("TorchTitan's model lacks context parallelism", "cp=2", "cp=1", "gpt-oss-20b",
        "refuses context parallelism"),
    case("more pipeline ranks than layers", "pp=64", "pp=16", "num_gpus=64 global_batch_size=256",
        "pp=64 exceeds the 32 layers"),
    case("pipeline too long to be simulated", "pp=512", "pp=256",
        "llama3-8b+num_hidden_layers=1022 num_gpus=512 global_batch_size=1024", "512 x 512 stages"),
    case("more pipeline stages than layers", "pp=16 pp_schedule=Interleaved1F1B virtual_stages=3",
        "pp=16 pp_schedule=Interleaved1F1B virtual_stages=2", "num_gpus=32",
        "48 stages exceed the 32 layers"),
    case("stages do not divide the layers", "pp=4", "pp=2",
        "llama3-8b+num_hidden_layers=29 megatron core_v0.12.1", "4 stages do not divide 29 layers"),
    case("stages do not divide the layers", "pp=4 pp_schedule=ZB-1p", "pp=2 pp_schedule=ZB-1p",
        "llama3-8b+num_hidden_layers=29 megatron zero-bubble", "4 stages do not divide 29 layers"),
    case("zero bubble is a fork's", "pp=2 pp_schedule=ZB-2p", "pp=2", "megatron",
        "is in the fork sail-sg"),
    case("zero bubble takes the trainer's own split",
        "pp=2 pp_schedule=ZB-1p layers_per_stage=[15,17]", "pp=2 layers_per_stage=[15,17]",
        "megatron zero-bubble"),
    case("layers_per_stage has the wrong length", "pp=2 layers_per_stage=[8,8,16]",
        "pp=2 layers_per_stage=[17,15]", text="lists 3 stages, pp x virtual_stages makes 2"),
    case("layers_per_stage does not sum to the layers", "pp=2 layers_per_stage=[16,17]",
        "pp=2 layers_per_stage=[15,17]", "megatron", "sums to 33"),
    case("trainer lacks the schedule", "pp=2 pp_schedule=ZB-1p", "pp=2 pp_schedule=1F1B",
        text="torchtitan has no schedule"),
    case("interleaving needs pp microbatches",
        "pp=4 pp_schedule=Interleaved1F1B micro_batch_size=8",
        "pp=4 pp_schedule=Interleaved1F1B micro_batch_size=4", "megatron",
        "at least pp=4 microbatches, not 2"),
    *(
        case(f"{name} refuses the number of stages a rank",
            f"pp=4 pp_schedule={name} virtual_stages={bad} ac=full",
            f"pp=4 pp_schedule={name} virtual_stages={good} ac=full", job, f"{words} per rank")
        for name, bad, good, job, words in (
            ("GPipe", 2, 1, "", "one stage"), ("1F1B", 2, 1, "", "one stage"),
            ("Interleaved1F1B", 1, 2, "", "at least 2 stages"),
            ("LoopedBFS", 1, 2, "", "at least 2 stages"),
            ("ZBVZeroBubble", 1, 2, "", "exactly 2 stages"),
            ("InterleavedZeroBubble", 1, 2, "", "at least 2 stages"),
            ("DualPipeV", 3, 2, "", "exactly 2 stages"),
            ("ZB-1p", 2, 1, "megatron zero-bubble", "one stage"),
            ("ZB-2p", 2, 1, "megatron zero-bubble", "one stage"),
        )
    ),
    *(
        case(f"{name} refuses the number of microbatches",
            f"pp=4 pp_schedule={name} micro_batch_size={bad} ac=full",
            f"pp=4 pp_schedule={name} micro_batch_size={good} ac=full", job, words)
        for name, bad, good, job, words in (
            ("1F1B", 8, 4, "", "2 < pp=4"), ("DualPipeV", 4, 2, "", "4 < 2 x pp=4"),
            ("Interleaved1F1B", 2, 3, "global_batch_size=72", "9 is no multiple of 9"),
            ("InterleavedZeroBubble", 2, 3, "global_batch_size=72", "9 is no multiple of 9"),
        )
    ),
    case("expert parallelism without experts", "ep=2", "ep=1", text="llama3-8b has no experts"),
    case("ep does not divide the experts", "ep=16", "ep=8", "mixtral-8x7b",
        "ep=16 does not divide 8 experts"),
    case("etp is neither 1 nor tp", "tp=4 ep=2 etp=2", "tp=4 ep=2 etp=4", "mixtral-8x7b",
        "neither 1 nor tp=4"),
    case("experts are cut over more ranks than tp", "ep=2 etp=4", "tp=2 ep=2 etp=2",
        "mixtral-8x7b megatron"),
    case("TorchTitan 0.3 never splits experts over TP", "tp=2 ep=2 etp=2", "tp=2 ep=2",
        "mixtral-8x7b 0.3.0", "etp=2"),
    case("etp does not divide the expert width", "ep=2 etp=3", "ep=2 etp=1",
        "mixtral-8x7b megatron num_gpus=24 global_batch_size=48", "moe_intermediate_size 14336"),
    case("ep x etp does not divide its ranks", "pp=8 ep=8", "pp=2 ep=8", "mixtral-8x7b 0.3.0",
        "2 ranks"),
    case("ep x etp does not divide its ranks", "dp_replicate=8 dp_shard=2 ep=4",
        "dp_replicate=4 dp_shard=4 ep=4", "mixtral-8x7b"),
    case("a dispatcher without experts", "moe_dispatcher=deepep", "", text="has no experts"),
    case("trainer lacks the dispatcher", "ep=2 moe_dispatcher=hybridep", "ep=2",
        "mixtral-8x7b megatron 0.15", "0.15 has no moe_dispatcher hybridep"),
    case("the dispatcher does not run on this cluster", "ep=2 moe_dispatcher=deepep", "ep=2",
        "mixtral-8x7b megatron a100-sxm-80gb", "Hopper or Blackwell"),
    case("the dispatcher does not run on this cluster", "ep=2 moe_dispatcher=deepep",
        "ep=2 moe_dispatcher=hybridep", "mixtral-8x7b megatron 0.16 gb200-nvl72-186gb",
        "up to 8 GPUs"),
    case("DeepEP has no configuration for the group", "dp_shard=256 ep=256 moe_dispatcher=deepep",
        "dp_shard=256 ep=128 moe_dispatcher=deepep",
        "deepseek-v3 num_gpus=256 global_batch_size=256", "groups of ep=256 ranks"),
    case("the dispatcher needs expert parallelism", "moe_dispatcher=deepep",
        "ep=2 moe_dispatcher=deepep", "mixtral-8x7b megatron", "ep is 1"),
    case("the dispatcher does not serve cut experts", "tp=2 ep=2 etp=2 moe_dispatcher=deepep",
        "tp=2 ep=2 moe_dispatcher=deepep", "deepseek-v2-lite", "etp=2"),
    case("TorchTitan 0.2 has DeepEP for DeepSeek alone", "ep=2 moe_dispatcher=deepep", "ep=2",
        "qwen3-30b-a3b", "DeepSeek models alone"),
    case("the exchange cannot overlap", "ep=8",
        "ep=8 pp=2 virtual_stages=2 pp_schedule=Interleaved1F1B",
        "qwen3-30b-a3b+mtp_num_layers=1 megatron 0.17 num_gpus=64 overlap.ep=true",
        "with multi-token prediction and pp=1"),
    case("the exchange cannot overlap", "ep=2 pp=2",
        "ep=2 pp=2 pp_schedule=Interleaved1F1B virtual_stages=2",
        "mixtral-8x7b megatron overlap.ep=true", "under compute"),
    case("expert parallelism needs FSDP beside it", "tp=16 ep=8", "tp=8 ep=8", "deepseek-v2-lite",
        "dp_shard x cp is 1"),
    case("DualPipeV's exchange excludes recomputation",
        "ep=2 pp=2 pp_schedule=DualPipeV virtual_stages=2 ac=full",
        "ep=2 pp=2 pp_schedule=DualPipeV virtual_stages=2 ac=none", "deepseek-v2-lite",
        "refuses ac full"),
    case("tp with ep needs sequence parallelism", "tp=2 ep=2 sequence_parallel=false", "tp=2 ep=2",
        "mixtral-8x7b megatron"),
    case("trainer lacks the ZeRO stage", "zero_stage=1", "zero_stage=2",
        text="torchtitan has no ZeRO stage 1"),
    case("states in 16 bits or on the host are those of a distributed optimizer",
        "zero_stage=0 dp_replicate=16 dp_shard=1", "zero_stage=1 dp_shard=16",
        "megatron optimizer=adamw-bf16-states", "which zero_stage=0 is not"),
    case("states in 16 bits or on the host are those of a distributed optimizer",
        "zero_stage=0 dp_replicate=16 dp_shard=1 cpu_offload=true",
        "zero_stage=0 dp_replicate=16 dp_shard=1", "megatron", "on the host"),
    case("DDP cannot hold shards", "zero_stage=0", "zero_stage=0 dp_replicate=16 dp_shard=1",
        text="dp_shard x cp = 16"),
    case("DDP combines with no other parallelism", "dp_replicate=8 tp=2 dp_shard=1",
        "dp_replicate=4 tp=2 dp_shard=2"),
    case("DDP reduces in the dtype of the parameters",
        "dp_replicate=16 dp_shard=1 zero_stage=0 reduce_dtype=bfloat16",
        "dp_replicate=16 dp_shard=1 zero_stage=0", text="gradients in float32"),
    case("TorchTitan 0.2 mixes precisions in FSDP alone", "tp=8 pp=2", "tp=8 dp_shard=2",
        text="computes in float32"),
    case("TorchTitan 0.2 mixes precisions in FSDP alone", "tp=8 pp=2",
        "tp=8 pp=2 master_dtype=bfloat16"),
    case("ZeRO-3 excludes schedules that split the backward",
        "pp=2 pp_schedule=ZBVZeroBubble zero_stage=3 ac=none",
        "pp=2 pp_schedule=ZBVZeroBubble zero_stage=2 ac=none"),
    case("ZeRO-2 and 3 exclude pipelines", "pp=2 zero_stage=2", "pp=2 zero_stage=1",
        "megatron-deepspeed"),
    case("CPU offload needs shards", "dp_replicate=16 cpu_offload=true",
        "dp_replicate=8 cpu_offload=true"),
    case("CPU offload needs shards", "zero_stage=0 cpu_offload=true",
        "zero_stage=1 cpu_offload=true", "megatron"),
    case("offload needs a device beside the host", "cpu_offload=true", "cpu_offload=false", "cpu",
        "the host, which here is the device"),
    case("host memory too small for CPU offload", "cpu_offload=true", "cpu_offload=false",
        "llama3.1-405b l4", "of host memory in each node"),
    case("host memory too small for CPU offload", "cpu_offload=true optimizer_offload_fraction=0.5",
        "cpu_offload=true optimizer_offload_fraction=0.05", "llama3.1-405b megatron l4",
        "of host memory in each node"),
    case("trainer lacks the precision", "precision=fp16", "precision=float8-rowwise",
        text="torchtitan 0.2.2 does not train llama3-8b in fp16"),
    case("GPU lacks the precision", "precision=float8-rowwise", "precision=bf16", "a100-sxm-80gb",
        "has no fp8 units"),
    case("GPU lacks the precision", "precision=mxfp8", "precision=float8-tensorwise",
        text="has no microscaling units"),
    case("GPU lacks the precision", "precision=mxfp8", "precision=float8-rowwise", "rtx-5090",
        "has no kernels for mxfp8 in any library"),
    case("trainer lacks the precision", "precision=nvfp4", "precision=mxfp8",
        "mixtral-8x7b 0.3.0 b200-sxm-180gb", "mixtral-8x7b in nvfp4"),
    case("fp32 parameters exclude low precision", "param_dtype=float32 precision=float8-tensorwise",
        "param_dtype=float32", "megatron", "float32 parameters of megatron do not"),
    case("trainer keeps fp32 masters", "master_dtype=bfloat16", "", "megatron",
        "main parameters in fp32 or fp16"),
    case("low precision needs aligned weights", "tp=8 precision=float8-blockwise",
        "tp=4 precision=float8-blockwise", "llama3-8b+intermediate_size=14848 fsdp", "mlp_w1 of"),
    case("low precision needs aligned tokens", "cp=8 precision=mxfp8", "cp=2 precision=mxfp8",
        "fsdp b200-sxm-180gb seq_len=128", "multiples of 32"),
    case("float8 tensorwise with TP lacks MLA", "tp=8 precision=float8-tensorwise",
        "tp=8 precision=float8-rowwise", "deepseek-v3 num_gpus=64"),
    case("mxfp8 with TP excludes compile", "tp=2 precision=mxfp8 compile=true",
        "tp=2 precision=mxfp8", "b200-sxm-180gb"),
    case("float8 all-gather is tensorwise only", "precision=float8-rowwise float8_all_gather=true",
        "precision=float8-tensorwise float8_all_gather=true"),
    case("float8 all-gather needs dp_shard",
        "dp_replicate=16 precision=float8-tensorwise float8_all_gather=true",
        "dp_replicate=2 precision=float8-tensorwise float8_all_gather=true"),
    case("float8 all-gather needs the distributed optimizer",
        "precision=float8-tensorwise float8_all_gather=true zero_stage=0",
        "precision=float8-tensorwise float8_all_gather=true zero_stage=1", "megatron"),
    case("float8 all-gather beside offload is of delayed scaling",
        "precision=float8-tensorwise float8_all_gather=true cpu_offload=true",
        "precision=float8-delayed float8_all_gather=true cpu_offload=true", "megatron"),
    case("trainer lacks the activation checkpointing", "ac=selective-attention", "ac=full",
        text="torchtitan 0.2.2 has no"),
    case("trainer lacks the activation checkpointing", "ac=selective-layer-2", "ac=selective-op",
        "0.3.0", "torchtitan 0.3.0 has no"),
    case("uniform-N counts layers of a stage", "ac=uniform-33", "ac=uniform-32", "megatron",
        "uniform-33 is more layers than a stage has"),
    case("uniform-N divides the layers of every stage", "ac=uniform-5", "ac=uniform-4",
        "megatron 0.16", "stops where uniform-5 does not divide"),
    case("uniform-N divides the layers of every stage",
        "pp=2 layers_per_stage=[17,15] ac=uniform-2", "pp=2 layers_per_stage=[18,14] ac=uniform-2",
        "megatron 0.16"),
    case("trainer lacks the activation checkpointing", "ac=modules-mlp", "ac=full", "megatron 0.11",
        "megatron 0.11 has no"),
    case("shared experts are recomputed from core 0.14 on", "ac=modules-mlp+shared_experts",
        "ac=modules-mlp", "megatron 0.13", "core 0.13 has no shared"),
    case("mla_up_proj is a module of multi-head latent attention", "ac=modules-mla_up_proj",
        "ac=modules-layernorm", "megatron", "which llama3-8b has not"),
    case("moe_act is a module of grouped experts", "ac=modules-moe_act", "ac=modules-mlp",
        "megatron", "which llama3-8b has not"),
    case("moe_act is a module of grouped experts", "ac=modules-moe_act precision=fp16",
        "ac=modules-moe precision=fp16", "mixtral-8x7b megatron", "which are of bf16"),
    case("delayed scaling excludes discarded outputs",
        "ac=modules-layernorm precision=float8-delayed",
        "ac=modules-layernorm precision=float8-tensorwise", "megatron",
        "no moe_act or layernorm in float8-delayed"),
    case("an overlapped exchange excludes recomputed experts", "ac=modules-moe ep=8",
        "ac=modules-moe_act ep=8", "mixtral-8x7b megatron overlap.ep=true",
        "exchange runs under compute"),
    case("TorchTitan 0.2 always shards sequences over TP", "tp=2 sequence_parallel=false", "tp=2",
        text="no tp=2 without"),
    case("memory-budget checkpointing needs compile", "ac=memory-budget-0.5",
        "ac=memory-budget-0.5 compile=true"),
    case("selective checkpointing excludes schedules that split the backward",
        "pp=2 pp_schedule=ZBVZeroBubble", "pp=2 pp_schedule=ZBVZeroBubble ac=full"),
    case("trainer lacks the CP method", "cp=2 cp_method=ulysses", "cp=2 cp_method=alltoall"),
    case("trainer lacks the CP method", "cp=2 cp_method=alltoall", "cp=2", "0.3.0",
        "torchtitan 0.3.0 has no"),
    case("trainer does not compile", "compile=true", "compile=false", "megatron"),
    case("compile excludes schedules that split the backward",
        "pp=2 pp_schedule=ZBVZeroBubble compile=true",
        "pp=2 pp_schedule=Interleaved1F1B compile=true"),
    case("async TP needs compile", "tp=2 async_tp=true", "tp=2 async_tp=true compile=true"),
    case("trainer lacks async TP", "tp=2 async_tp=true", "tp=2", "megatron 0.4"),
    case("async TP needs sequence-parallel TP", "async_tp=true compile=true",
        "tp=2 async_tp=true compile=true"),
    case("async TP needs sequence-parallel TP",
        "tp=2 sequence_parallel=false async_tp=true compile=true",
        "tp=2 async_tp=true compile=true"),
    case("async TP needs NVLink between all TP ranks", "tp=16 async_tp=true compile=true",
        "tp=8 async_tp=true compile=true", "deepseek-v3 num_gpus=64", "joins 8 GPUs here"),
    *(
        case("async TP needs NVLink between all TP ranks", "tp=2 async_tp=true compile=true",
            "tp=2 compile=true", gpu, text)
        for gpu, text in (
            ("rtx-4090", "no two rtx-4090"), ("l4", "cannot read each other's memory"),
            ("mi300x-192gb", "NVIDIA GPUs, not mi300x"),
        )
    ),
    case("trainer lacks optimizer-in-backward", "optimizer_in_backward=true", "",
        "0.3.0 max_grad_norm=null", "0.3.0 steps"),
    case("trainer lacks optimizer-in-backward", "optimizer_in_backward=true", "",
        "megatron max_grad_norm=null"),
    case("optimizer-in-backward excludes gradient clipping", "optimizer_in_backward=true", "",
        text="max_grad_norm is 1"),
    case("optimizer-in-backward excludes pipelines and experts", "pp=2 optimizer_in_backward=true",
        "optimizer_in_backward=true micro_batch_size=4", "max_grad_norm=null"),
    case("optimizer-in-backward excludes pipelines and experts", "ep=2 optimizer_in_backward=true",
        "optimizer_in_backward=true micro_batch_size=4", "mixtral-8x7b max_grad_norm=null"),
    case("optimizer-in-backward would step once a microbatch",
        "optimizer_in_backward=true micro_batch_size=2",
        "optimizer_in_backward=true micro_batch_size=4", "max_grad_norm=null",
        "makes 2 of them a step"),
    case("optimizer-in-backward excludes DDP",
        "optimizer_in_backward=true micro_batch_size=4 dp_replicate=16 dp_shard=1 zero_stage=0",
        "optimizer_in_backward=true micro_batch_size=4 dp_replicate=2 dp_shard=8",
        "fsdp max_grad_norm=null", "replicas would differ"),
    case("trainer always compiles", "compile=false", "compile=true",
        {"trainer_version": "torchtitan 2026-05, graph_trainer"}, "compiles the whole step"),
    case("CUDA graphs exclude recomputation", "ac=full", "", "megatron 0.15 cuda_graphs=full",
        "0.15 has no CUDA graphs"),
    case("CUDA graphs of layers exclude their recomputation", "ac=full", "ac=selective-attention",
        "megatron 0.16 cuda_graphs=partial", "whole layers"),
    case("CUDA graphs exclude pipelines", "pp=2", "", "0.3.0 cuda_graphs=full", "pp is 2"),
    case("trainer offloads all states or none", "cpu_offload=true optimizer_offload_fraction=0.5",
        "cpu_offload=true",
        text="moves all optimizer states to the host or none, not a share of 0.5"),
    case("trainer offloads all states or none", "cpu_offload=true optimizer_offload_fraction=0.5",
        "cpu_offload=true", "megatron 0.11", "0.11 moves all"),
    case("trainer keeps activations on the device", "activation_offload_layers=8", "",
        "megatron 0.14", "megatron 0.14 cannot"),
    case("interleaving over two ranks needs overlapped sends",
        "pp=2 pp_schedule=Interleaved1F1B virtual_stages=2",
        "pp=4 pp_schedule=Interleaved1F1B virtual_stages=2", "megatron overlap.pp=false",
        "only with overlapped sends"),
    case("async TP is off for MLA", "tp=2 async_tp=true", "tp=2", "deepseek-v3 megatron",
        "switches --tp-comm-overlap off"),
    case("Muon's owners need one group", "zero_stage=3", "zero_stage=1", "megatron optimizer=muon",
        "and zero_stage is 3 with dp_replicate 1"),
    case("Muon's owners need one group", "dp_replicate=2 zero_stage=1",
        "dp_replicate=2 zero_stage=0", "megatron optimizer=muon",
        "zero_stage is 1 with dp_replicate 2"),
    case("Muon's states stay on the device", "cpu_offload=true", "", "megatron optimizer=muon",
        "cannot move Muon's states"),
    case("Muon excludes fp16", "precision=fp16", "", "megatron optimizer=muon", "no Muon in fp16"),
    case("activation offload keeps one layer", "activation_offload_layers=32",
        "activation_offload_layers=31", "megatron 0.15", "32 is not below the 32 layers"),
    case("activation offload excludes pipelines and recomputation",
        "activation_offload_layers=8 pp=2", "activation_offload_layers=8", "megatron 0.15",
        "pp is 2"),
    case("activation offload excludes pipelines and recomputation",
        "activation_offload_layers=8 ac=full", "activation_offload_layers=8", "megatron 0.15",
        "ac full"),
    case("CUDA graphs exclude activation offload", "activation_offload_layers=8", "",
        "megatron 0.15 cuda_graphs=partial", "0.15 has no CUDA graphs with activations"),
    case("a share of CPU offload without it", "optimizer_offload_fraction=0.5",
        "cpu_offload=true optimizer_offload_fraction=0.5", "megatron",
        "cpu_offload moves, which is false"),
    case("CUDA graphs exclude CPU offload", "cpu_offload=true", "", "0.3.0 cuda_graphs=full",
        "offloaded gradients"),
    case("CUDA graphs need a dispatcher that the host does not wait for",
        "ep=2 moe_dispatcher=alltoall", "ep=1", "qwen3-30b-a3b 0.3.0 cuda_graphs=full",
        "alltoall makes it wait"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_rule_breaks_and_its_neighbour_passes(case: Case) -> None:
    c = context(**case.job)
    assert case.key in broken_keys(c, case.broken)
    assert violations(layout_of(c, **case.passing), c.model, c.cluster, c.training) == []
    found = violations(layout_of(c, **case.broken), c.model, c.cluster, c.training)
    rules = [rule for rule in rules_for(c) if rule.key == case.key]
    assert {rule.field for rule in rules} <= set(Layout.model_fields)
    message = " | ".join(v.rule for v in found if v.field in {rule.field for rule in rules})
    assert case.text in message
    layout = layout_of(c, **case.broken)
    assert all(v.rule and v.value == getattr(layout, v.field) for v in found)
    assert all(v.remedy and not re.search(r"\b(\w+) or \1\b", v.remedy) for v in found)


def test_every_rule_has_a_case() -> None:
    assert {rule.key for rule in all_rules()} == {case.key for case in CASES}


def test_a_message_has_numbers_rule_and_remedy() -> None:
    c = context(num_gpus=32)
    (violation,) = violations(layout_of(c, tp=16), c.model, c.cluster, c.training)
    assert (violation.field, violation.value) == ("tp", 16)
    text = f"{violation.rule}; {violation.remedy}"
    assert text == "tp=16 does not divide 8 KV heads of llama3-8b; try tp 1, 2, 4 or 8"
    c = context(seq_len=4099)
    (odd,) = violations(layout_of(c), c.model, c.cluster, c.training)
    assert odd.remedy == "try seq_len 4100"


STAGES = "Interleaved1F1B refuses the number of stages a rank"


@pytest.mark.parametrize(("job", "layout", "broken"), [
    # from two ranks on; without a pipeline the schedule is ignored
    *(("", f"pp={pp} pp_schedule=Interleaved1F1B virtual_stages=1", STAGES) for pp in (2, 4)),
    *(("", f"pp_schedule={name}", "") for name in ("ZBVZeroBubble", "Interleaved1F1B", "ZB-1p")),
    # Megatron replicates heads of keys and values, and MLA has no such limit
    ("megatron", "tp=16", ""),
    ("llama3-8b+num_key_value_heads=4", "tp=8", "tp does not divide the KV heads"),
    ("deepseek-v3+num_key_value_heads=1 num_gpus=128", "tp=64", ""),
    ("megatron seq_len=4099", "", ""),
])  # fmt: skip
def test_where_a_rule_asks_nothing(job: str, layout: str, broken: str) -> None:
    found = broken_keys(context(**job_of(job)), values(layout))
    assert broken in found if broken else found == set()


class Spy:
    """A batch that notes which columns are read."""

    def __init__(self, batch: LayoutBatch) -> None:
        self._batch, self.read = batch, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._batch, name)


def test_rules_read_what_they_say() -> None:
    """No more than they say in any job, and all of it in some job."""
    read: dict[str, set[str]] = {}
    models: tuple[Any, ...] = (
        "llama3-8b", "deepseek-v3", "qwen3-8b", "gpt-oss-20b", "qwen3-next-80b-a3b", "glm5",
        "gemma4-e4b", "longcat-flash", "glm5.2", "deepseek-v4-flash", "nemotron-h-56b", MIMO,
    )  # fmt: skip
    older = {("torchtitan", "unfused"): "0.3.0", ("megatron", "unfused"): "0.12"}
    jobs = [
        {"trainer": trainer, "attention_kernel": kernel, "trainer_version": older.get(both)}
        for both in itertools.product(sorted(TRAINERS), ("flash", "unfused"))
        for trainer, kernel in [both]
    ]
    jobs += [
        case.job
        for case in CASES
        if {"cuda_graphs", "overlap", "optimizer", "moe_capacity_factor"} & case.job.keys()
        or "graph_trainer" in str(case.job)
        or case.job.get("gpu") == "cpu"
    ]
    places = {id(rule): f"{at} {rule.key}" for at, rule in enumerate(all_rules())}
    for model, job in itertools.product(models, jobs):
        c = context(**{**job, "model": model})
        batch = LayoutBatch.from_layouts([layout_of(c)])
        for rule in rules_for(c):
            spy = Spy(batch)
            rule.broken(spy, c)
            read.setdefault(places[id(rule)], set()).update(spy.read - {"splits"})
    said = {places[id(rule)]: rule.reads for rule in all_rules()}
    assert read == {place: said[place] for place in read}
    unread = {place.partition(" ")[2] for place in said.keys() - read.keys()}
    assert unread <= {"optimizer-in-backward excludes gradient clipping"}


def test_rules_take_no_layouts_at_all() -> None:
    """A step of a search may leave none; a column of none is still one of truth values."""
    for model, trainer in (("glm5.2", "megatron"), ("mixtral-8x7b", "torchtitan")):
        c = context(model, trainer=trainer)
        none = LayoutBatch.from_layouts([layout_of(c)]).take(np.array([], dtype=np.int64))
        for rule in rules_for(c):
            found = np.broadcast_to(rule.broken(none, c), 0)
            assert found.dtype == np.bool_, rule.key


def test_rules_broadcast() -> None:
    c = context("mixtral-8x7b")
    degrees = itertools.product((1, 2, 8), (1, 2))
    batch = LayoutBatch.from_layouts([layout_of(c, tp=tp, pp=pp) for tp, pp in degrees])
    column = LayoutBatch(**{name: values[:, None] for name, values in batch.columns()})
    for rule in rules_for(c):
        flat = np.broadcast_to(rule.broken(batch, c), len(batch))
        spread = np.broadcast_to(rule.broken(column, c), (len(batch), 1))
        assert np.array_equal(spread[:, 0], flat), rule.key


def test_every_precision_has_its_hardware() -> None:
    amounts = {A100: 2, H100: 7, B200: 9, "mi300x-192gb": 7, "mi355x-288gb": 9}
    for gpu, expected in amounts.items():
        c = context(gpu=gpu, **MEGATRON)
        broken = [broken_keys(c, {"precision": name}) for name in PRECISIONS]
        assert sum("GPU lacks the precision" not in keys for keys in broken) == expected


def test_choices_and_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16) == [1, 2, 4, 8, 16]
    assert choices([1]) == "1"
    assert choices(range(12)) == "..., 4, 5, 6, 7, 8, 9, 10 or 11"


@pytest.mark.parametrize(("trainer", "release", "legal"), [
    ("megatron", "NeMo 25.11", True),  # the dev branch behind 0.15
    ("megatron-bridge", "0.2", True),
    ("megatron", "NeMo 25.09", False),
    ("megatron", "core_v0.15.0", False),
    ("megatron", "core_v0.16.0", True),
])  # fmt: skip
def test_graphs_with_recomputed_modules_by_release(trainer: str, release: str, legal: bool) -> None:
    row = published()["mbx-247"]
    training = {**row["training"], "trainer": trainer, "trainer_version": release}
    job = read_job({**row, "training": training})
    found = violations(job.layout, job.model, job.cluster, job.training)
    assert [one.field for one in found] == ([] if legal else ["ac"])
