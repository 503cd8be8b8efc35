"""Mixers of tokens besides softmax attention, and their shapes.

A layer is a mixer and a feed-forward behind it; some layers have only one of the two. Each mixer
has its operations in a file of `planner.work`, which `planner.work.mixers` lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import StrictBool

from planner.specs.network import Count
from planner.specs.streams import ResidualStreams

Mixer = Literal[
    "attention", "attention-shared", "dsa", "dsa-shared", "msa", "gated-delta", "kimi-delta",
    "lightning", "mamba", "mamba2", "attention-mamba2", "short-conv", "shared-kv", "csa", "hca",
    "none",
]  # fmt: skip
# softmax attention, of all tokens or of some that an indexer finds
ATTENDING: frozenset[Mixer] = frozenset(
    {"attention", "attention-shared", "attention-mamba2", "dsa", "dsa-shared", "msa"}
)
SHARING: frozenset[Mixer] = frozenset({"dsa-shared"})
# attention of DeepSeek-V4: one key head that is the values too, a window, compressed entries or not
COMPRESSED: frozenset[Mixer] = frozenset({"shared-kv", "csa", "hca"})
# mixer of the last layer -> that of a layer of multi-token prediction behind it, where they differ
PREDICTING: Mapping[Mixer, Mixer] = {
    "dsa-shared": "dsa", "attention-shared": "attention", "csa": "shared-kv", "hca": "shared-kv",
}  # fmt: skip
LEAST_HEADS = 64  # of a rank in FlashMLA's sparse kernel, which pads fewer (dsa_cudnn_kernels.py)
# size of attention -> that of layers with a window, where it differs
SLIDING: Mapping[str, str] = {
    "num_attention_heads": "num_sliding_attention_heads",
    "num_key_value_heads": "num_sliding_key_value_heads",
    **{
        name: f"sliding_{name}"
        for name in ("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim")
    },
}  # fmt: skip
OF_WINDOWED_MLA = tuple(SLIDING.values())[4:]
OF_MLA = ("fused_query_gate", "k_rope_norm", *OF_WINDOWED_MLA)


class Mixers(ResidualStreams):
    """Shapes of mixers; names follow the Hugging Face configs that had them first.

    mixers: the mixer of each layer, (): attention in all. "none": the layer is a feed-forward.
        "attention-mamba2": both on one input, and their sum (Falcon H1).
        "attention-shared": only queries, for the keys and values of the last layer before that has
        its own and the same window (Gemma 4 E2B and E4B).
    mixer_only_layers: layers without a feed-forward.
    attention_output_gate: attention's output is multiplied by a sigmoid of as many more outputs of
        the query projection (Qwen3-Next); with MLA, of a projection of the layer's input (HY 4).
    fused_query_gate: with MLA, queries and that gate are one projection of the queries' latent
        before and behind its norm (A.X K2).
    attention_gate_bias: that gate has a bias, one a head (Beam).
    attention_head_gate: one gate a head instead, from a projection of its own (Laguna, LFM3).
    attention_k_eq_v: keys are values as well in layers without a window (Gemma 4).
    value_norm: values have a norm without weights (Gemma 4).
    use_double_wide_mlp: the MLP of layers with shared keys and values is twice as wide.
    hidden_size_per_layer_input: width of per-layer embeddings (Gemma 4): a second table, of
        vocab_size_per_layer_input rows, has as much for each layer, to which a projection of the
        embedding is added; each layer multiplies it by a gate and projects it back.
    num_sliding_attention_heads, num_sliding_key_value_heads, sliding_head_dim: heads of layers with
        a window, where they differ from the others' (Step 3.5, Gemma 4); 0: the same.
    sliding_v_head_dim, sliding_q_lora_rank, sliding_kv_lora_rank: a value's width, and MLA's
        latents, in layers with a window (dots3); 0: the same.
    sliding_qk_nope_head_dim, sliding_qk_rope_head_dim: both parts of a head of MLA in layers with a
        window (dots3); 0: the same.
    sliding_sinks: only layers with a window have attention sinks (MiMo-V2-Flash).
    sliding_windows: window of each layer, 0 for full attention, where windows differ in length
        (K-EXAONE 2); sliding_window is then the longest.
    norm_weight: whether norms have weights (not in OLMo and nanochat).
    qk_norm_bias: query-key norms have biases (Persimmon).
    k_rope_norm: the rotated part of MLA's key has a norm (dots3).
    gated_norm_rank: norms before attention and before experts are multiplied by the sigmoid of a
        projection of this rank of their output (A.X K2); 0: they are not.
    moe_output_norm: a norm stands behind the experts' sum (A.X K1).
    moe_branch_norms: the routed experts have a norm before and one behind, the shared expert has
        one behind; the router has its own, without weights, a scale for each of its inputs and one
        for each expert (Gemma 4, whose dense MLP beside the experts is their shared expert).
    moe_latent_size: width of the routed experts' input and output, between two projections of all
        of a token's routed experts (Nemotron 3 Super); 0: the hidden size.
    zero_expert_num: experts besides that return their input, which routers choose from as well
        (LongCat-Flash); of a token's num_experts_per_tok, their share computes nothing.
    moe_shortcut: experts' outputs are added behind the next layer's MLP (LongCat-Flash, each of
        whose layers is two here: experts beside a dense MLP, their shared expert, and a dense MLP).
    mtp_num_layers: layers of multi-token prediction that are trained (Megatron-LM's name). Each is
        like the last layer, with an indexer of its own where that shares one and no entries
        where that compresses, behind a projection of its input and of the next token's embedding,
        and has a loss of its own. A config.json says how many: num_nextn_predict_layers.
    mtp_dense: whether they have a dense MLP (Step 3.5, K-EXAONE 2).
    mtp_window: tokens of their window, 0 for full attention; None: as in the last layer.

    DeepSeek sparse attention (DeepSeek-V3.2): latent attention to the tokens that an indexer finds.
    index_n_heads, index_head_dim: of the indexer, whose keys have one head.
    index_topk: tokens that each query attends to.
    A layer of "dsa-shared" has no indexer, but the tokens of the layer before (GLM-5.2).
    "msa" (MiniMax M3): grouped-query attention to blocks of index_block_size tokens, which an
        indexer chooses for each group of query heads; index_topk is the tokens of all its blocks.
    index_block_size: tokens of one block ("msa").

    Gated DeltaNet (Yang et al. 2024), as in Qwen3-Next:
    linear_num_key_heads, linear_num_value_heads: each key head serves a group of value heads.
    linear_key_head_dim, linear_value_head_dim: widths of one head.
    linear_conv_kernel_dim: taps of the short convolution over queries, keys and values, or of a
        gated short convolution (LFM2).
    Kimi Delta Attention has the same sizes, keys and values being alike.
    linear_full_gates: its decay and gate are products of full rank (Ling 3).

    Mamba-2 (Dao and Gu 2024), as in Nemotron-H:
    mamba_num_heads, mamba_head_dim: of the values.
    ssm_state_size: width of a head's state, as wide as its keys and queries (B and C).
    mamba_n_groups: groups of heads that share keys and queries.
    mamba_d_conv: taps of the short convolution.
    mamba_chunk_size: tokens that the scan multiplies at once.
    mamba_conv_bias, mamba_proj_bias: biases of the convolution and of both projections.
    mamba_norm: whether a norm follows the scan (not in Falcon H1).
    "mamba", the first (Gu and Dao 2023): as many heads as channels, each 1 wide. mamba_norm: step,
        keys and queries have norms (Jamba).
    mamba_dt_rank: of the product that gives each channel its step ("mamba").

    short_conv_bias: biases of a gated short convolution and of both its projections (LFM2).
    lightning_block_size: tokens that lightning attention (MiniMax-01) multiplies at once; its heads
        are those of a gated DeltaNet, keys and values being alike.
    """

    mixers: tuple[Mixer, ...] = ()
    mixer_only_layers: tuple[Count, ...] = ()
    attention_output_gate: StrictBool = False
    fused_query_gate: StrictBool = False
    attention_gate_bias: StrictBool = False
    attention_head_gate: StrictBool = False
    attention_k_eq_v: StrictBool = False
    value_norm: StrictBool = False
    use_double_wide_mlp: StrictBool = False
    hidden_size_per_layer_input: Count = 0
    vocab_size_per_layer_input: Count = 0
    num_sliding_attention_heads: Count = 0
    num_sliding_key_value_heads: Count = 0
    sliding_head_dim: Count = 0
    sliding_v_head_dim: Count = 0
    sliding_q_lora_rank: Count = 0
    sliding_kv_lora_rank: Count = 0
    sliding_qk_nope_head_dim: Count = 0
    sliding_qk_rope_head_dim: Count = 0
    sliding_sinks: StrictBool = False
    sliding_windows: tuple[Count, ...] = ()
    norm_weight: StrictBool = True
    qk_norm_bias: StrictBool = False
    k_rope_norm: StrictBool = False
    gated_norm_rank: Count = 0
    moe_output_norm: StrictBool = False
    moe_branch_norms: StrictBool = False
    moe_latent_size: Count = 0
    zero_expert_num: Count = 0
    moe_shortcut: StrictBool = False
    mtp_num_layers: Count = 0
    mtp_dense: StrictBool = False
    mtp_window: Count | None = None

    index_n_heads: Count = 0
    index_head_dim: Count = 0
    index_topk: Count = 0
    index_block_size: Count = 0

    linear_num_key_heads: Count = 0
    linear_num_value_heads: Count = 0
    linear_key_head_dim: Count = 0
    linear_value_head_dim: Count = 0
    linear_conv_kernel_dim: Count = 0
    linear_full_gates: StrictBool = False

    mamba_num_heads: Count = 0
    mamba_head_dim: Count = 0
    ssm_state_size: Count = 0
    mamba_n_groups: Count = 0
    mamba_d_conv: Count = 0
    mamba_chunk_size: Count = 0
    mamba_conv_bias: StrictBool = False
    mamba_proj_bias: StrictBool = False
    mamba_norm: StrictBool = True
    mamba_dt_rank: Count = 0

    short_conv_bias: StrictBool = False
    lightning_block_size: Count = 0

    @property
    def unusual(self) -> list[str]:
        """Blocks that an ordinary transformer lacks, in words."""
        more = ["multi-token prediction"] * (self.mtp_num_layers > 0)
        return self.unusual_mixers + self.unusual_weights + more

    @property
    def unusual_weights(self) -> list[str]:
        """Norms, gates and streams of few families that no trainer's arguments have, in words."""
        rows = (
            (self.attention_gate_bias, "a bias on the gate of attention"),
            (self.attention_head_gate, "a gate on each head of attention"),
            (not self.norm_weight, "norms without weights"),
            (self.qk_norm_bias, "biases of query-key norms"),
            (self.k_rope_norm, "norms of rotated keys"),
            (self.gated_norm_rank > 0, "gated norms"),
            (self.moe_output_norm, "a norm behind the experts"),
            (self.moe_branch_norms, "norms around experts and router"),
            (self.attention_k_eq_v, "one projection for keys and values"),
            (self.value_norm, "norms of values"),
            (self.hidden_size_per_layer_input > 0, "per-layer embeddings"),
            (self.zero_expert_num > 0, "experts that compute nothing"),
            (self.moe_shortcut, "experts on a shortcut over the next layer"),
            (self.varies_heads, "heads that differ by layer"),
            (len({*self.sliding_windows} - {0}) > 1, "windows of several lengths"),
            (self.num_hash_layers > 0, "experts that a table chooses"),
            (self.hc_mult > 0, "hyper-connections (several residual streams)"),
        )
        return [words for holds, words in rows if holds]

    @property
    def unusual_mixers(self) -> list[str]:
        """Mixers besides plain softmax attention, and layers without one, in words."""
        used = [kind.words for name, kind in MIXER_KINDS.items() if name in self.mixers]
        rows = (
            (self.attention_output_gate, "a gate on the output of attention"),
            (bool(self.mixer_only_layers), "layers without a feed-forward"),
            (self.moe_latent_size > 0, "experts on a latent"),
        )
        return used + [words for holds, words in rows if holds]

    @property
    def indexed(self) -> bool:
        """Whether attention is to the tokens that an indexer finds."""
        return "dsa" in self.mixers

    @property
    def varies_heads(self) -> bool:
        """Whether layers with a window have other heads than those without."""
        return any(getattr(self, name) for name in SLIDING.values())

    @property
    def gates_attention(self) -> bool:
        return self.attention_output_gate or self.attention_head_gate

    @property
    def recurrent_heads(self) -> tuple[int, ...]:
        """Numbers of heads and of their groups, all of which must divide over ranks."""
        used = (fields.heads for name, fields in MIXER_KINDS.items() if name in self.mixers)
        return tuple(getattr(self, name) for heads in used for name in heads)

    @property
    def compresses(self) -> bool:
        """Whether attention is DeepSeek-V4's, in some layers or all."""
        return not COMPRESSED.isdisjoint(self.mixers)

    def entries(self, mixer: Mixer) -> tuple[int, int]:
        """(tokens of a compressed entry, entries that each query chooses); 0: none, and all."""
        rates = {"csa": self.compress_rate_csa, "hca": self.compress_rate_hca}
        return rates.get(mixer, 0), self.index_topk * (mixer == "csa")

    @property
    def linear_key_width(self) -> int:
        """Width of all keys of a gated DeltaNet, and of all its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        """Width of all its values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def mamba_width(self) -> int:
        """Width of all values of a Mamba-2 mixer."""
        return self.mamba_num_heads * self.mamba_head_dim


# ---- one row a mixer -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MixerKind:
    """Facts of a mixer besides its operations (`planner.work.mixers`).

    words: its name in sentences.
    sizes: the fields that it needs.
    heads: the fields with numbers of heads, which must divide over ranks; the first, where there
        are two, is the groups that divide the second.
    parameters: its parameters in a layer of this hidden size, its own norms included; attention's
        are in `model.Parameters`.
    """

    words: str
    sizes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    parameters: Callable[[Mixers, int], int] = lambda model, hidden: 0


def _gated_delta(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, two scalars a head for the decay, and the gated norm."""
    keys, values = model.linear_key_width, model.linear_value_width
    heads = model.linear_num_value_heads
    into = hidden * (2 * keys + 2 * values + 2 * heads)
    mixed = model.linear_conv_kernel_dim * (2 * keys + values) + 2 * heads
    return into + mixed + model.linear_value_head_dim + values * hidden


def _kimi_delta(model: Mixers, hidden: int) -> int:
    """A gated DeltaNet whose decay, one a channel, and gate are products of low rank."""
    width, heads = model.linear_value_width, model.linear_num_value_heads
    rank = model.linear_value_head_dim
    gates = 2 * hidden * width if model.linear_full_gates else 2 * rank * (hidden + width)
    into = hidden * (3 * width + heads) + gates
    mixed = model.linear_conv_kernel_dim * 3 * width + width + heads
    return into + mixed + rank + width * hidden


def _lightning(model: Mixers, hidden: int) -> int:
    """Projections in and out, a gate, and a norm over all heads."""
    return model.linear_value_width * (5 * hidden + 1)


def _mamba2(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, three scalars a head, and the gated norm."""
    width, heads = model.mamba_width, model.mamba_num_heads
    mixed = width + 2 * model.mamba_n_groups * model.ssm_state_size
    taps = mixed * (model.mamba_d_conv + model.mamba_conv_bias)
    biases = model.mamba_proj_bias * (width + mixed + heads + hidden)
    own = taps + 3 * heads + width * model.mamba_norm
    return hidden * (width + mixed + heads) + own + width * hidden + biases


def _mamba(model: Mixers, hidden: int) -> int:
    """Projections in and out, convolution, the step's low rank, states and norms."""
    width, rank, state = model.mamba_width, model.mamba_dt_rank, model.ssm_state_size
    taps = width * (model.mamba_d_conv + model.mamba_conv_bias)
    low = width * (2 * rank + 2 * state + 1) + model.mamba_norm * (rank + 2 * state)
    biases = model.mamba_proj_bias * (2 * width + hidden)
    return 3 * hidden * width + biases + taps + low + width * (state + 1)


def _short_conv(model: Mixers, hidden: int) -> int:
    """Projections in and out, and the convolution."""
    return 4 * hidden**2 + hidden * (model.linear_conv_kernel_dim + 5 * model.short_conv_bias)


def _block_indexer(model: Mixers, hidden: int) -> int:
    """Queries and one key head of the indexer, and a norm of each."""
    heads, width = model.index_n_heads, model.index_head_dim
    return hidden * (heads + 1) * width + 2 * width


_DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_LINEAR = (*_DELTA_HEADS, "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")
_SHARED_KV = ("q_lora_rank", "o_groups", "o_lora_rank", "sliding_window")
_MAMBA_HEADS = ("mamba_n_groups", "mamba_num_heads")
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "mamba_d_conv")
_MAMBA2 = (*_MAMBA, "mamba_n_groups", "mamba_chunk_size")
MIXER_KINDS: Mapping[str, MixerKind] = {
    "attention-shared": MixerKind("layers that share keys and values"),
    "dsa": MixerKind("sparse attention with an indexer (DSA)", _INDEXER),
    "dsa-shared": MixerKind("layers that share the tokens of an indexer", _INDEXER),
    "msa": MixerKind("sparse attention to blocks of tokens (MSA)",
        (*_INDEXER, "index_block_size"), (), _block_indexer),
    "gated-delta": MixerKind(
        "gated DeltaNet (linear attention)", _LINEAR, _DELTA_HEADS, _gated_delta),
    "kimi-delta": MixerKind(
        "Kimi Delta Attention (linear attention)", _LINEAR, _DELTA_HEADS, _kimi_delta),
    "lightning": MixerKind("lightning (linear) attention",
        (*_LINEAR[:4], "lightning_block_size"), _DELTA_HEADS[1:], _lightning),
    "mamba": MixerKind("Mamba (state space) layers",
        (*_MAMBA, "mamba_dt_rank"), _MAMBA_HEADS[1:], _mamba),
    "mamba2": MixerKind("Mamba-2 (state space) layers", _MAMBA2, _MAMBA_HEADS, _mamba2),
    "attention-mamba2": MixerKind("Mamba-2 (state space) heads beside those of attention",
        _MAMBA2, _MAMBA_HEADS, _mamba2),
    "short-conv": MixerKind(
        "gated short convolutions", ("linear_conv_kernel_dim",), (), _short_conv),
    "shared-kv": MixerKind(
        "attention whose one key head is its values (DeepSeek-V4)", _SHARED_KV),
    "csa": MixerKind("compressed sparse attention (CSA)",
        (*_SHARED_KV, *_INDEXER, "compress_rate_csa")),
    "hca": MixerKind("heavily compressed attention (HCA)", (*_SHARED_KV, "compress_rate_hca")),
    "none": MixerKind("layers without attention"),
}  # fmt: skip
