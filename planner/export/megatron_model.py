"""A ModelSpec as Megatron-LM's model arguments.

Source: Megatron-LM core 0.14 to 0.18 megatron/training/arguments.py,
    megatron/core/transformer/transformer_config.py.
"""

from itertools import groupby

from planner.export.base import Draft
from planner.export.megatron_mixers import mixer_arguments
from planner.export.megatron_network import (
    activation_arguments,
    name_what_is_left_out,
    norm_arguments,
    rope_arguments,
    router_arguments,
)
from planner.specs.model import ModelSpec
from planner.trainers.megatron import MEGATRON
from planner.trainers.megatron_models import adds_a_token, is_hybrid, lacking
from planner.trainers.release import Release

SOME_WINDOWS = "0.15"  # training/arguments.py --window-size, --window-attn-skip-freq
FLEXIBLE = ("deepep", "hybridep")  # backends of the dispatcher `flex`


def model_arguments(draft: Draft, release: Release) -> list[str]:
    """Arguments for shapes, norms, positions, attention and experts.

    What Megatron has no argument for becomes a gap.
    """
    model = draft.model
    layers = [] if is_hybrid(model) else ["--num-layers", str(model.num_hidden_layers)]
    arguments = [
        *layers,
        "--hidden-size",
        str(model.hidden_size),
        "--ffn-hidden-size",
        str(model.intermediate_size or model.moe_intermediate_size),
        "--num-attention-heads",
        str(model.num_attention_heads),
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(model.vocab_size - adds_a_token(release)),
        "--make-vocab-size-divisible-by",
        "1",
        "--normalization",
        "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--attention-dropout",
        "0.0",
        "--hidden-dropout",
        str(model.residual_dropout),
    ]
    arguments += [*_positions(model), *rope_arguments(draft, release), *norm_arguments(model)]
    arguments += ["--softmax-type", "learnable"] * model.attention_sinks
    arguments += activation_arguments(model)
    if not (model.mlp_bias or model.attention_output_bias):
        arguments.append("--disable-bias-linear")
        arguments += ["--add-qkv-bias"] if model.attention_bias else []
    if not model.tie_word_embeddings:
        arguments.append("--untie-embeddings-and-output-weights")
    if model.qk_norm == "head" or model.uses_mla:  # with MLA it norms the latent q and kv
        arguments.append("--qk-layernorm")
    arguments += _mla(model) if model.uses_mla else _attention(draft, release)
    arguments += mixer_arguments(draft, release, _pattern)
    if model.is_moe:
        arguments += [*_experts(model), *router_arguments(draft)]
    if model.is_moe and draft.layout.param_dtype == "bfloat16" and draft.layout.precision != "fp16":
        arguments.append("--moe-grouped-gemm")  # it refuses any other dtype
    _check(draft, release)
    return arguments


def _positions(model: ModelSpec) -> list[str]:
    if model.position_embedding == "learned":
        return ["--position-embedding-type", "learned_absolute"]
    if model.position_embedding == "none":
        return ["--position-embedding-type", "none"]
    scaling = None if model.uses_mla else model.rope_scaling
    kind = "yarn" if scaling is not None and scaling.rope_type == "yarn" else "rope"
    return ["--position-embedding-type", kind]


def _attention(draft: Draft, release: Release) -> list[str]:
    model = draft.model
    grouped = model.num_key_value_heads != model.num_attention_heads
    groups = (
        ["--group-query-attention", "--num-query-groups", str(model.num_key_value_heads)]
        if grouped
        else []
    )
    return ["--kv-channels", str(model.head_dim), *groups, *_window(draft, release)]


def _window(draft: Draft, release: Release) -> list[str]:
    """Sliding windows, of all layers or, from core 0.15 on, of some."""
    model, mask = draft.model, draft.model.sliding_mask
    if not any(mask):
        return []
    size = ["--window-size", f"{model.sliding_window},0"]
    if all(mask) and release.since(SOME_WINDOWS):
        return size
    if release.since(SOME_WINDOWS) and not model.attn_temperature_tuning:
        return [*size, "--window-attn-skip-freq", _pattern([int(one) for one in mask])]
    rule = (
        "is of chunks (Llama 4), which Megatron-LM has no argument for"
        if model.attn_temperature_tuning
        else f"has no argument in {release.number} ({SOME_WINDOWS}: --window-size)"
    )
    remedy = "expect the time of full attention"
    draft.gap("model.sliding_window", model.sliding_window, rule, remedy, blocking=False)
    return []


def _mla(model: ModelSpec) -> list[str]:
    query = ["--q-lora-rank", str(model.q_lora_rank)] if model.q_lora_rank else []
    return [
        "--multi-latent-attention",
        *query,
        "--kv-lora-rank",
        str(model.kv_lora_rank),
        "--qk-head-dim",
        str(model.qk_nope_head_dim),
        "--qk-pos-emb-head-dim",
        str(model.qk_rope_head_dim),
        "--v-head-dim",
        str(model.v_head_dim),
    ]


def dispatcher_arguments(draft: Draft, release: Release) -> list[str]:
    """The token dispatcher, by release, and the overlap of its exchange.

    Source: Megatron-Core transformer/transformer_config.py: 0.12 (moe_enable_deepep), 0.14
    (overlap_moe_expert_parallel_comm), 0.16 (moe_flex_dispatcher_backend).
    """
    if not draft.model.is_moe:
        if draft.layout.moe_dispatcher != "alltoall":
            draft.inert("moe_dispatcher", "means nothing without experts")
        return []
    name, able = draft.layout.moe_dispatcher, MEGATRON.at(release).moe_dispatchers
    arguments = ["--moe-token-dispatcher-type", name if name in able else "alltoall"]
    if name in able and name in FLEXIBLE:
        arguments = ["--moe-token-dispatcher-type", "flex"] + (
            ["--moe-enable-deepep"]
            if release.before("0.16")
            else ["--moe-flex-dispatcher-backend", name]
        )
        if name == "deepep":  # it takes probabilities in fp32 (transformer/moe/token_dispatcher.py)
            arguments += ["--moe-router-dtype", "fp32"]
    elif name not in able:
        draft.gap(
            "moe_dispatcher",
            name,
            f"is not in Megatron-LM core {release.number}",
            f"use {', '.join(sorted(able))}",
        )
    if draft.training.overlap.ep and draft.layout.ep > 1:
        arguments.append("--overlap-moe-expert-parallel-comm")
    return arguments


def _experts(model: ModelSpec) -> list[str]:
    arguments = [
        "--num-experts",
        str(model.num_experts),
        "--moe-router-topk",
        str(model.num_experts_per_tok),
        "--moe-ffn-hidden-size",
        str(model.moe_intermediate_size),
    ]
    if model.shared_expert_intermediate_size:
        arguments += [
            "--moe-shared-expert-intermediate-size",
            str(model.shared_expert_intermediate_size),
            *["--moe-shared-expert-gate"] * model.shared_expert_gate,
        ]
    if model.moe_latent_size:
        arguments += ["--moe-latent-size", str(model.moe_latent_size)]
    places = [int(kind.moe) for kind in model.layer_kinds()]
    if not all(places) and not is_hybrid(model):
        arguments += ["--moe-layer-freq", _pattern(places)]
    return arguments


def _pattern(flags: list[int]) -> str:
    """One flag per layer as the list expression that Megatron evaluates.

    [0, 0, 1] becomes "([0]*2+[1]*1)".
    """
    runs = [(flag, len(list(group))) for flag, group in groupby(flags)]
    return f"({'+'.join(f'[{flag}]*{count}' for flag, count in runs)})"


def _check(draft: Draft, release: Release) -> None:
    model = draft.model
    words = lacking(model, release)
    if words:
        draft.gap(
            "model",
            model.name,
            f"has what Megatron-LM {release.number} has no argument for: {', '.join(words)}",
            "write the layer spec",
        )
    name_what_is_left_out(draft)
