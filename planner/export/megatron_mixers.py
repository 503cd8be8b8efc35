"""A model's mixers as Megatron-LM's arguments, and the way back.

Gated DeltaNet is a variant of attention of pretrain_gpt.py, placed by a list of flags. Models with
Mamba-2, or with layers of one branch, are a pattern of letters of pretrain_hybrid.py, in which "|"
ends a pipeline stage; there a mixer and a feed-forward behind it are two layers.
Source: Megatron-LM core 0.18 megatron/training/arguments.py, models/hybrid/
    hybrid_layer_allocation.py, models/gpt/experimental_attention_variant_module_specs.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

from planner.export.base import Draft, Settings
from planner.export.megatron_read import NEXT_STAGE, Words, pattern_of, whole, word
from planner.specs.mixers import SHARING, Mixer
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.megatron_models import FIXED_MAMBA, MAMBA_CHUNK, is_hybrid
from planner.trainers.release import Release

STACK = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
LETTERS: Mapping[Mixer, str] = {"attention": "*", "gated-delta": "G", "mamba2": "M", "none": ""}
DENSE, EXPERTS = "-", "E"
RENAMED = "0.20"  # transformer_config.py: gated_delta_net is a deprecated name of gdn
# argument -> our field, of each mixer; with the default that Megatron-LM gives it
_DELTA: Mapping[str, tuple[str, int]] = {
    "linear_num_key_heads": ("linear_num_key_heads", 16),
    "linear_num_value_heads": ("linear_num_value_heads", 32),
    "linear_key_head_dim": ("linear_key_head_dim", 128),
    "linear_value_head_dim": ("linear_value_head_dim", 128),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim", 4),
}
_DSA: Mapping[str, tuple[str, int]] = {
    "dsa_indexer_n_heads": ("index_n_heads", 0),
    "dsa_indexer_head_dim": ("index_head_dim", 0),
    "dsa_indexer_topk": ("index_topk", 0),
}
# Fused kernels, and the loss by which an indexer learns, as Megatron-Bridge 0.6 has it for GLM-5
# (models/glm_moe_dsa/glm5_bridge.py, perf_recipes/glm_moe_dsa); RoPE's fusion excludes them.
_DSA_FIXED: Settings = {
    "experimental_attention_variant": "dsa", "dsa_kernel_backend": "cudnn", "no_rope_fusion": True,
    "dsa_indexer_loss_coeff": "0.001", "dsa_indexer_use_sparse_loss": True,
}  # fmt: skip
_MAMBA: Mapping[str, tuple[str, int]] = {
    "mamba_num_heads": ("mamba_num_heads", 0),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "mamba_state_dim": ("ssm_state_size", 128),
    "mamba_num_groups": ("mamba_n_groups", 8),
}
_OWN: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "dsa": _DSA, "gated-delta": _DELTA, "mamba2": _MAMBA,
}  # fmt: skip


def list_of(flags: list[int]) -> str:
    """One flag per layer as the list expression that Megatron evaluates.

    [0, 0, 1] becomes "([0]*2+[1]*1)".
    """
    runs = [(flag, len(list(group))) for flag, group in groupby(flags)]
    return f"({'+'.join(f'[{flag}]*{count}' for flag, count in runs)})"


def mixer_settings(draft: Draft, release: Release) -> Settings:
    """Settings of gated DeltaNet and of Mamba-2, and where their layers are."""
    model = draft.model
    settings: Settings = {
        "attention_output_gate": model.attention_output_gate,
        "mtp_num_layers": model.mtp_num_layers or False,
    }
    if is_hybrid(model):
        settings["spec"] = [*STACK]
    elif "gated-delta" in model.mixers:
        places = [int(mixer == "gated-delta") for mixer in model.mixers]
        name = "gated_delta_net" if release.before(RENAMED) else "gdn"
        settings |= {"experimental_attention_variant": name}
        settings |= {"linear_attention_freq": list_of(places)}
    if model.indexed:
        settings |= {**_DSA_FIXED, **_sharing(draft)}
        rule = "has kernels that need flash_mla and nvidia-cudnn-frontend[cutedsl]"
        remedy = "install both, or Megatron-LM does not start"
        draft.gap("model.mixers", rule, remedy, blocking=False, shown=model.name)
    for mixer, names in _OWN.items():
        if mixer in model.mixers:
            settings |= {name: getattr(model, field) for name, (field, _) in names.items()}
    if "mamba2" in model.mixers and model.mamba_chunk_size != MAMBA_CHUNK:
        rule = f"is {MAMBA_CHUNK} in Megatron-LM, which has no argument for it"
        draft.gap("model.mamba_chunk_size", rule, "no setting is needed", blocking=False)
    return settings


def _sharing(draft: Draft) -> Settings:
    """Which layers share chosen tokens: all but one in a number, from an offset on."""
    mixers = draft.model.mixers
    if not SHARING & {*mixers}:
        return {}
    first = mixers.index("dsa-shared")
    every = next((i for i in range(1, len(mixers) - first) if mixers[first + i] == "dsa"), 0) + 1
    if mixers != _shared(len(mixers), every, first):
        rule = "shares chosen tokens by no one number and offset"
        draft.gap("model.mixers", rule, "write the layer spec", shown=draft.model.name)
    return {"dsa_indexer_topk_freq": every, "dsa_indexer_skip_topk_offset": first}


def _shared(layers: int, every: int, offset: int) -> tuple[Mixer, ...]:
    """Mixers by Megatron-LM's two numbers (dsa.py, is_dsa_skip_topk_layer)."""
    behind = (max(layer - max(offset, 1), 0) % every for layer in range(1, layers + 1))
    return tuple("dsa-shared" if steps else "dsa" for steps in behind)


def pattern(model: ModelSpec, split: Sequence[int]) -> str:
    """The letters of all layers; split: layers of each stage."""
    letters = [_letters(kind) for kind in model.layer_kinds()]
    ends = list(accumulate(split))
    starts = [0, *ends[:-1]]
    return NEXT_STAGE.join(
        "".join(letters[start:end]) for start, end in zip(starts, ends, strict=True)
    )


def _letters(kind: LayerKind) -> str:
    return LETTERS[kind.mixer] + (EXPERTS if kind.moe else DENSE) * kind.feeds


def with_layers(words: Words) -> Words:
    """The arguments with the number of layers that a pattern has."""
    letters = pattern_of(words).replace(NEXT_STAGE, "")
    return {**words, "num_layers": [str(len(letters))]} if letters else words


def _mamba_heads(words: Words) -> int:
    """Heads of Mamba-2 unless they are given (mamba_mixer.py: expand=2)."""
    return 2 * whole(words, "hidden_size") // whole(words, "mamba_head_dim", 64)


def mixer_keys(words: Words, linear: Sequence[bool]) -> dict[str, object]:
    """Hugging Face keys of the mixers; linear: which layers the list of flags places."""
    letters = pattern_of(words).replace(NEXT_STAGE, "")
    known = {letter: mixer for mixer, letter in LETTERS.items() if letter}
    mixers: list[str] = [known.get(letter, "none") for letter in letters]
    if not letters and any(linear):
        mixers = ["gated-delta" if one else "attention" for one in linear]
    if word(words, "experimental_attention_variant") == "dsa":
        every = whole(words, "dsa_indexer_topk_freq", 1)
        offset = whole(words, "dsa_indexer_skip_topk_offset", 0)
        mixers = [*_shared(whole(words, "num_layers"), every, offset)]
    keys: dict[str, object] = {"mixers": mixers} if mixers else {}
    if "mtp_num_layers" in words:
        keys["mtp_num_layers"] = whole(words, "mtp_num_layers")
    if "attention_output_gate" in words:
        keys["attention_output_gate"] = True
    if "mamba2" in mixers:
        words = {"mamba_num_heads": [str(_mamba_heads(words))], **words}
    for mixer, names in _OWN.items():
        if mixer in mixers:
            keys |= {
                field: whole(words, name, default or None)
                for name, (field, default) in names.items()
            }
    if "mamba2" in mixers:
        keys |= {**FIXED_MAMBA, "mamba_chunk_size": MAMBA_CHUNK}
    if letters:
        own = [i for i, letter in enumerate(letters) if letter in known]
        dense = [i for i, letter in enumerate(letters) if letter == DENSE]
        keys |= {"mixer_only_layers": own} | ({"dense_layers": dense} if EXPERTS in letters else {})
        keys |= {"moe_layer_freq": None, "first_k_dense_replace": None}
        keys |= {} if dense else {"intermediate_size": None}
    return keys
