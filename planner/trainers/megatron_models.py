"""Parts of a model that Megatron-LM's `pretrain_gpt.py` has no argument for, in words.

Both the rules and the export use it.
Source: Megatron-LM core 0.14 to 0.20 megatron/training/arguments.py,
    megatron/core/transformer/transformer_config.py; ssm/ and models/hybrid/ for mixers.
"""

from collections.abc import Iterator, Mapping

from planner.specs.mixers import COMPRESSED
from planner.specs.model import ModelSpec
from planner.trainers.release import NEMO, Release
from planner.trainers.uncommon import other_rope_base, uncommon

DELTA_SINCE = "0.16"  # --experimental-attention-variant, --attention-output-gate
DSA_SINCE = "0.19"  # dsa_cudnn_kernels.py; before, scores of the whole square in fp32
HYBRID_SINCE = "0.18"  # --hybrid-layer-pattern; pretrain_hybrid.py
SINKS_SINCE = "0.16"  # --softmax-type, --activation-func-clamp-value; moe/router.py (bias)
YARN_SINCE = "0.19"  # --position-embedding-type yarn, --yarn-beta-fast, for attention without MLA
# ssm/mamba_mixer.py: defaults and assertions of MambaMixer, for which there are no arguments. The
# size of a chunk changes time and not the model.
FIXED_MAMBA: Mapping[str, object] = {
    "mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
MAMBA_CHUNK = 128
# Megatron-Bridge has a model of its own for Falcon H1, of which nothing here was tried.
UNKNOWN_MIXERS = COMPRESSED | {
    "kimi-delta", "lightning", "attention-mamba2", "attention-shared", "mamba", "short-conv", "msa",
}  # fmt: skip


def is_hybrid(model: ModelSpec) -> bool:
    """Whether Megatron-LM builds it from a pattern of letters, in pretrain_hybrid.py.

    There a layer is a mixer or a feed-forward; gated DeltaNet is one of pretrain_gpt.py's as well.
    """
    return "mamba2" in model.mixers or "none" in model.mixers or bool(model.mixer_only_layers)


def lacking(model: ModelSpec, release: Release) -> list[str]:
    """Parts of the model that no argument expresses; empty where the arguments describe it."""
    if has_provider(model, release):
        return []
    since = DSA_SINCE if model.indexed else HYBRID_SINCE if is_hybrid(model) else DELTA_SINCE
    early = not UNKNOWN_MIXERS.isdisjoint(model.mixers) or release.before(since)
    early_sinks = release.before(SINKS_SINCE) and not builds_itself(release)
    biased = model.router_bias and model.expert_bias and model.attention_output_bias
    rows = (
        (model.parallel_residual, "parallel residual"),
        (model.indexed and model.kv_lora_rank != 512, "sparse attention of a latent not 512 wide"),
        (model.norms_per_layer != 2, "other norms than two a layer"),
        (model.embedding_norm, "a norm after the embedding"),
        (model.qk_norm == "full", "query-key norm over the whole projection"),
        (model.qk_norm_after_rope, "query-key norm after RoPE"),
        (model.hidden_act == "xielu", "xIELU activation"),
        (model.attention_sinks and early_sinks, "attention sinks"),
        (model.swiglu_limit is not None and early_sinks, "clamped SwiGLU"),
        (bool(model.swiglu_limits), "clamped SwiGLU in some layers"),
        (model.shared_expert_gate and release.before(DELTA_SINCE), "gate on the shared expert"),
        (model.lm_head_bias, "bias on the head"),
        (
            (model.router_bias or model.expert_bias) and (early_sinks or not biased),
            "biased router or experts",
        ),
        (model.uses_mla and model.attention_bias, "biases with MLA"),
        (model.uses_mla and model.attention_output_gate, "a gate on the output of MLA"),
        (model.indexed and model.attention_sinks, "sinks of sparse attention"),
        (model.norm == "layernorm" and not model.norm_bias, "LayerNorm without biases"),
        (_some_biases(model), "biases on some of attention's output and the MLP only"),
    )
    more = is_hybrid(model) and model.mtp_num_layers > 0
    other = any(getattr(model, name) != value for name, value in FIXED_MAMBA.items())
    found = ["other taps or biases of Mamba-2"] * (other and "mamba2" in model.mixers)
    found += ["multi-token prediction by a pattern of letters"] * more
    found += [words for broken, words in rows if broken]
    found += _network(model, builds_itself(release) or release.since(YARN_SINCE))
    return found + model.unusual_weights + model.unusual_mixers * early


def builds_itself(release: Release) -> bool:
    """Whether Megatron-Bridge builds the model (NeMo's recipes are its own), without arguments.

    Source: Megatron-Bridge 0.2 models/gpt_oss/gpt_oss_provider.py.
    """
    return release.trainer == "megatron-bridge" or release.named.distribution == NEMO


def has_provider(model: ModelSpec, release: Release) -> bool:
    """Whether Megatron-Bridge has a class for the one family that has this block.

    Source: Megatron-Bridge 0.5 models/stepfun, models/mimo_v2_flash, models/gemma
    (Gemma4ModelProvider), models/deepseek/deepseek_v4_bridge.py, which needs Megatron-LM's dev
    branch; of its main branch of 2026-08-22 models/minimax_m3, models/exaone.
    """
    gemma_mimo_step = model.moe_branch_norms, model.sliding_sinks, model.attention_head_gate
    rows = (
        (model.varies_heads and not model.uses_mla and any(gemma_mimo_step), "0.18"),
        (model.compresses, "0.18"),
        ("msa" in model.mixers, "0.20"),
        (bool(model.sliding_windows), "0.20"),
    )
    return release.trainer == "megatron-bridge" and any(
        has and release.since(core) for has, core in rows
    )


def _some_biases(model: ModelSpec) -> bool:
    """Whether some linear layers have biases that --disable-bias-linear would take with others'."""
    linear = {model.attention_output_bias, model.mlp_bias or model.expert_bias}
    return len(linear) > 1 or (True in linear and not model.attention_bias)


_ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu2")


def _network(model: ModelSpec, yarn: bool) -> Iterator[str]:
    """Operations of the network that Megatron-LM does not have.

    The export names the numbers that it has no argument for.
    yarn: whether the release has it without MLA.
    """
    scaling, router = model.rope_scaling, model.scoring_func
    types = {"yarn"} if model.uses_mla else {"llama3", "linear", *(["yarn"] * yarn)}
    if scaling is not None and scaling.rope_type not in types:
        yield f"{scaling.rope_type} scaling of RoPE"
    factor = scaling.factor if scaling is not None and scaling.rope_type == "linear" else 1
    if not float(factor or 1).is_integer():
        yield "linear scaling of RoPE by a broken factor"
    if other_rope_base(model):
        yield "another RoPE base in windowed layers"
    if model.uses_mla and (model.partial_rotary_factor != 1 or model.rope_mask):
        yield "MLA with a part of RoPE"
    yield from _words(model, "alibi", "post_norm")
    if model.mlp == "swiglu" and model.hidden_act not in (None, "silu"):
        yield f"a gate with {model.hidden_act}"
    if model.hidden_act not in _ACTIVATIONS:
        yield f"{model.hidden_act} activation"
    yield from _words(
        model, "attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping",
        "clip_qkv", "embedding_multiplier",
    )  # fmt: skip
    if model.residual_multiplier != 1 or model.logits_multiplier != 1:
        yield "scaled residual or logits"
    if router not in (None, "softmax", "sigmoid"):
        yield f"{router} router"
    if router == "softmax" and model.router_correction_bias:
        yield "a bias on softmax scores"
    if router == "sigmoid" and model.norm_topk_prob is False and model.num_experts_per_tok > 1:
        yield "sigmoid scores that are not divided by their sum"


def _words(model: ModelSpec, *fields: str) -> list[str]:
    return [words for _, words in uncommon(model, *fields)]


def adds_a_token(release: Release) -> bool:
    """Whether NullTokenizer has a token more than --vocab-size says, for the end of a document.

    core/tokenizers/text/libraries/null_tokenizer.py: vocab_size + 1 up to 0.17.
    """
    return release.before("0.18")
