"""Reads the model that Megatron-LM's arguments describe, as Hugging Face keys.

Source: Megatron-LM core 0.14 megatron/training/arguments.py (defaults and derived arguments).
"""

import ast
import operator
import re
from collections.abc import Sequence
from itertools import pairwise

from planner.errors import fault
from planner.export.commands import spelled
from planner.export.megatron_mixers import mixer_keys
from planner.export.megatron_model import MLA
from planner.export.megatron_read import Words, whole, word
from planner.intake.trainer_files.shell import Operators, computed


def model_keys(words: Words) -> dict[str, object]:
    """Megatron's model arguments as Hugging Face keys, completed by Megatron's defaults.

    Raises SpecError where one is malformed.
    """
    hidden, heads, layers = (
        whole(words, name) for name in ("hidden_size", "num_attention_heads", "num_layers")
    )
    gated = "swiglu" in words or "quick_geglu" in words
    wide = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    biased = "disable_bias_linear" not in words
    kind = word(words, "position_embedding_type") or "learned_absolute"
    position = {"learned_absolute": "learned", "none": "none"}.get(kind, "rope")
    position = "rope" if "use_rotary_position_embeddings" in words else position
    norm = {"RMSNorm": "rmsnorm"}.get(word(words, "normalization") or "LayerNorm", "layernorm")
    keys: dict[str, object] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": whole(words, "ffn_hidden_size", wide),
        "mlp": "swiglu" if gated else "squared-relu" if "squared_relu" in words else "gelu",
        "norm": norm,
        "norm_bias": norm == "layernorm",
        "position_embedding": position,
        "tie_word_embeddings": "untie_embeddings_and_output_weights" not in words,
        "attention_bias": biased or "add_qkv_bias" in words,
        "attention_output_bias": biased,
        "mlp_bias": biased and "num_experts" not in words,
        "attention_sinks": word(words, "softmax_type") == "learnable",
        "qk_norm": "head"
        if "qk_layernorm" in words and "multi_latent_attention" not in words
        else "none",
    }
    if position == "learned":
        keys["max_position_embeddings"] = whole(
            words, "max_position_embeddings", whole(words, "seq_length")
        )
    if "vocab_size" in words:
        keys["vocab_size"] = whole(words, "vocab_size")
    if "multi_latent_attention" in words:
        keys |= {ours: whole(words, theirs, usual) for theirs, (ours, usual) in MLA.items()}
        keys |= {"q_lora_rank": whole(words, "q_lora_rank")} if "q_lora_rank" in words else {}
    else:
        groups = (
            whole(words, "num_query_groups", heads) if "group_query_attention" in words else heads
        )
        keys |= {
            "head_dim": whole(words, "kv_channels", hidden // heads),
            "num_key_value_heads": groups,
        }
    window = word(words, "window_size")
    if window is not None and window.partition(",")[0].strip("( ").isdigit():
        keys["sliding_window"] = int(window.partition(",")[0].strip("( "))
        kinds = {True: "sliding_attention", False: "full_attention"}
        keys["layer_types"] = [
            kinds[one] for one in _placed(words, "window_attn_skip_freq", layers, skips=True)
        ]
    keys |= _experts(words, layers) if "num_experts" in words else {}
    variant = "experimental_attention_variant" in words
    linear = _placed(words, "linear_attention_freq", layers, skips=True) if variant else []
    return {**keys, **mixer_keys(words, linear)}


def _experts(words: Words, layers: int) -> dict[str, object]:
    places = _placed(words, "moe_layer_freq", layers, skips=False)
    dense_width = whole(words, "ffn_hidden_size", 4 * whole(words, "hidden_size"))
    width = whole(words, "moe_ffn_hidden_size", dense_width)
    keys: dict[str, object] = {
        "num_experts": whole(words, "num_experts"),
        "num_experts_per_tok": whole(words, "moe_router_topk", 2),
        "moe_intermediate_size": width,
        "moe_latent_size": whole(words, "moe_latent_size", 0),
    }
    dense = [index for index, moe in enumerate(places) if not moe]
    if not dense:
        keys["intermediate_size"] = None
    elif dense == list(range(len(dense))):
        keys["first_k_dense_replace"] = len(dense)
    else:
        keys |= _regular(places, dense)
    shared = whole(words, "moe_shared_expert_intermediate_size", 0)
    if shared:
        keys |= {
            "shared_expert_intermediate_size": shared,
            "shared_expert_gate": "moe_shared_expert_gate" in words,
            "n_shared_experts": max(1, shared // width),
        }
    if "disable_bias_linear" not in words:  # transformer/moe/router.py, experts.py
        keys |= {"router_bias": True, "expert_bias": True}
    if "moe_router_enable_expert_bias" in words:
        keys["router_correction_bias"] = True
    return keys


def _regular(places: Sequence[bool], dense: list[int]) -> dict[str, object]:
    """MoE at every n-th layer, else the indices of the dense layers."""
    moe = [index for index, flag in enumerate(places) if flag]
    steps = {b - a for a, b in pairwise(moe)}
    if len(steps) == 1 and moe[0] < min(steps) and moe[-1] + min(steps) >= len(places):
        return {"moe_layer_freq": min(steps), "moe_layer_offset": moe[0]}
    return {"dense_layers": dense}


_PATTERN = re.compile(r"[\[\]\d\s,*+()]+")


def _placed(words: Words, name: str, layers: int, *, skips: bool) -> list[bool]:
    """The layers that an argument chooses: all, every n-th, or a list.

    A list such as ([0]*3+[1]*58) is evaluated as Megatron does.
    skips: whether all but every n-th are chosen.
    Raises SpecError for any other text.
    """
    text = word(words, name)
    if not text:
        return [True] * layers
    if text.isdigit() and int(text) > 0:
        first = 1 if skips else 0
        return [(place % int(text) == 0) != skips for place in range(first, layers + first)]

    def times(flags: list[int], count: int) -> list[int]:
        if len(flags) * count > layers:
            raise ValueError("longer than the layers")
        return flags * count

    joined: Operators = {ast.Add: operator.add, ast.Mult: times}
    try:
        flags = computed(text, joined) if _PATTERN.fullmatch(text) else None
    except (SyntaxError, ValueError, TypeError, RecursionError):
        flags = None
    if not isinstance(flags, list) or len(flags) != layers:
        remedy = "write for example ([0]*3+[1]*58)"
        raise fault(spelled(name), text, f"is no pattern of {layers} layers", remedy)
    return [bool(flag) for flag in flags]
