"""Blocks of published models that we have no operations for; a message refuses them by name."""

from collections.abc import Mapping, Sequence

from planner.errors import SpecError, fault

REMEDY = (
    "give the shapes of a transformer of softmax attention and MLP or expert layers inline, "
    "without model_type, where a rough bound will do"
)

_MAMBA, _MAMBA2 = "Mamba (state space) layers", "Mamba-2 (state space) layers"
_DELTA = "gated DeltaNet (linear attention)"
_INDEXER = "sparse attention with an indexer (DSA)"
_RWKV = "RWKV time mixing (a linear recurrence)"
_BOTH_WAYS = "attention both ways (an encoder)"
_TWO_STACKS = "an encoder and a decoder with cross-attention"
# model_type -> the block that we have no operations for
NO_OPERATIONS: Mapping[str, str] = {
    "zamba": _MAMBA,
    "zamba2": "Mamba-2 (state space) layers and transformer blocks that several layers share",
    "plamo2": _MAMBA2,
    **dict.fromkeys(("rwkv", "rwkv5", "rwkv6", "rwkv7"), _RWKV),
    "xlstm": "xLSTM (recurrent) layers",
    "recurrent_gemma": "RG-LRU (recurrent) layers",
    "bailing_moe_linear": "lightning (linear) attention",
    "arctic": "a dense MLP beside the mixture of experts (dense residual)",
    "snowflake_arctic": "a dense MLP beside the mixture of experts",
    "jetmoe": "a mixture of attention heads",
    "gemma3n": "per-layer embeddings, AltUp and LAuReL",
    "gemma3n_text": "per-layer embeddings, AltUp and LAuReL",
    "diffllama": "differential attention",
    "doge": "dynamic-mask attention",
    "bitnet": "ternary weights with norms inside attention and MLP",
    "blt": "byte patches (three transformers in one)",
    "nemotron-nas": "layers that differ in width (block_configs)",
    "deci": "layers that differ in width (block_configs)",
    "openelm": "layers that differ in width",
    "mllama": "cross-attention layers on images",
    "mllama_text_model": "cross-attention layers on images",
    "idefics": "cross-attention layers on images",
    "inkling_text": "short convolutions and learned relative positions",
    "inkling2_text": "short convolutions and learned relative positions",
    "inkling2_loop_text": "short convolutions, and layers that run several times",
    "hrm_text": "stacks of layers that run several times",
    "zaya": "convolutions inside attention (CCA) and routers of several layers",
    "dory": "layers that run several times, and residuals that interpolate",
    "phi4_multimodal": "adapters for images and speech in every layer",
    "modernbert-decoder": "a dense layer and a norm before the vocabulary head",
    "moshi": "a second transformer over the codebooks of each step",
    "openai-gpt": "norms behind the branches and no final norm",
    "ctrl": "positions by sines added to scaled embeddings of a 2019 network",
    "gpt_neox_japanese": "attention whose bias is on the last layer alone",
    "cpmant": "a learned bias of segment and position in attention",
    "xlnet": "two-stream attention (permutation language modelling)",
    "reformer": "hashed attention and reversible layers",
    "git": "attention over an image's tokens and text in one mask",
    **dict.fromkeys((
        "bert-generation", "big_bird", "camembert", "data2vec-text", "ernie",
        "megatron-bert", "rembert", "roberta-prelayernorm", "roc_bert", "roformer",
        "xlm-roberta-xl", "xmod", "xlm", "bert", "roberta", "xlm-roberta", "electra",
        "deberta", "deberta-v2", "modernbert", "albert", "distilbert",
    ), _BOTH_WAYS),
    **dict.fromkeys((
        "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mvp", "plbart",
        "prophetnet", "trocr", "musicgen", "musicgen_melody", "t5", "mt5", "umt5", "bart",
        "mbart", "pegasus", "whisper", "t5gemma", "switch_transformers", "m2m_100",
        "nllb-moe",
    ), _TWO_STACKS),
}  # fmt: skip
# A published model, by its name and by its id on the Hub in lower case -> the block that it has
NAMED: Mapping[str, str] = {
    name: block
    for names, block in (
        ("kimi-k3 moonshotai/kimi-k3", "attention to the outputs of earlier blocks (AttnRes)"),
    )
    for name in names.split()
}
_DELTA_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini")
_INDEXED_TYPES = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2", "hy_v4",
    "dots3_note", "dots3_note_text")  # fmt: skip
_NEMOTRON = ("nemotron_h",)
_CROSS = "cross-attention layers"
# A key that any config may switch on -> the block that it stands for, and the types whose dialect
# decides what the key means
BLOCK_KEYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "linear_num_value_heads": (_DELTA, _DELTA_TYPES),
    "linear_key_head_dim": (_DELTA, _DELTA_TYPES),
    "linear_attn_config": ("linear attention", ("kimi_linear",)),
    "mamba_num_heads": (_MAMBA2, _NEMOTRON),
    "mamba_d_state": (_MAMBA, ("granitemoehybrid", "bamba", "falcon_h1", "jamba")),
    "mamba_d_ssm": (_MAMBA2, ("falcon_h1",)),
    "ssm_state_size": (_MAMBA, _NEMOTRON),
    "ssm_cfg": (_MAMBA, ()),
    "hybrid_override_pattern": (_MAMBA2, _NEMOTRON),
    "conv_L_cache": ("gated short convolutions", ("lfm2", "lfm2_moe", "lfm3")),
    "index_topk": (_INDEXER, _INDEXED_TYPES),
    "index_n_heads": (_INDEXER, (*_INDEXED_TYPES, "minimax_m3_vl_text")),
    "cross_attention_layers": (_CROSS, ()),
    "add_cross_attention": (_CROSS, ()),
    "is_encoder_decoder": (_TWO_STACKS, ()),
    "use_cla": ("cross-layer attention (keys and values shared between layers)", ()),
    "num_kv_shared_layers": (
        "keys and values shared between layers", ("gemma4_text", "gemma4_unified_text")),
    "altup_num_inputs": ("AltUp", ()),
    "attn_output_gate": ("a gate on the output of attention", ()),
    "block_configs": ("layers that differ in width", ()),
    "parallel_attn_mlp_res": ("a dense MLP beside the mixture of experts (dense residual)", ()),
}  # fmt: skip


def refusal(model_type: str, config: Mapping[str, object]) -> str:
    """Blocks of a type that we cannot price, in how many layers; empty if nothing is known."""
    block = NO_OPERATIONS.get(model_type, "")
    return f"{block}{_share(config)}" if block else ""


def _share(config: Mapping[str, object]) -> str:
    """In how many layers: from a list of kinds, a pattern of letters or an interval."""
    kinds = config.get("layer_types", config.get("layers_block_type"))
    pattern, interval, layers = (
        config.get(key)
        for key in ("hybrid_override_pattern", "full_attention_interval", "num_hidden_layers")
    )
    attention = config.get("attn_type_list")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
        other, total = sum(kind in _OTHER_KINDS for kind in kinds), len(kinds)
    elif isinstance(attention, Sequence) and attention:
        other, total = sum(kind == 0 for kind in attention), len(attention)
    elif isinstance(pattern, str) and pattern:
        other, total = pattern.count("M"), len(pattern)
    elif isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        other, total = layers - layers // interval, layers
    else:
        return ""
    return f" in {other} of {total} layers" if other else ""


_OTHER_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "m"})


def check_blocks(raw: Mapping[str, object], prefix: str) -> None:
    """Raises SpecError where the config switches on a key for a block that we lack.

    In an inline mapping of ours, `mixers` gives the sizes their meaning.
    """
    if "mixers" in raw:
        return
    model_type = raw.get("model_type")
    for key, (block, types) in BLOCK_KEYS.items():
        if raw.get(key) and model_type not in types:
            raise missing(prefix, key, raw[key], f"{block}{_share(raw)}")


def missing(prefix: str, key: str, value: object, block: str) -> SpecError:
    """The error for a config whose `key` asks for this block."""
    return fault(
        f"{prefix}.{key}", value, f"stands for {block}; our operations have no such block", REMEDY
    )
