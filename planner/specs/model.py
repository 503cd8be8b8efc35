"""Shapes of a decoder-only language model, and how many parameters each part has.

`ModelSpec` holds the normalised shapes. `planner.intake.models.read_model` reads what a person
writes (catalogue name, Hugging Face config.json, inline mapping); `planner.intake.models` describes
the mapping and its defaults.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from planner.errors import Fault
from planner.specs.mixers import (
    ATTENDING,
    COMPRESSED,
    MIXER_KINDS,
    OF_MLA,
    PREDICTING,
    SLIDING,
    Mixer,
    Mixers,
)
from planner.specs.network import NETWORK_FIELDS, Count
from planner.specs.validation import Name
from planner.units import counted

MlpKind = Literal["swiglu", "gelu", "squared-relu"]
NormKind = Literal["rmsnorm", "layernorm"]
QkNorm = Literal["none", "head", "full"]
PositionEmbedding = Literal["rope", "learned", "none"]

Size = Annotated[StrictInt, Field(ge=1)]
Clash = tuple[str, str, str]  # what `ModelSpec.clashes` finds: (key, rule, remedy)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer: its mixer and its feed-forward.

    moe: whether the feed-forward is routed experts; otherwise a dense MLP.
    window: tokens that a query looks back on; 0 is full causal attention.
    feeds: whether it has a feed-forward at all.
    mtp: whether it predicts one more token: it is on the last stage, behind all others.
    hashed: whether a table chooses its experts by the token, so that no bias corrects the router.
    """

    moe: bool
    window: int
    mixer: Mixer = "attention"
    feeds: bool = True
    mtp: bool = False
    hashed: bool = False

    @property
    def mixes(self) -> bool:
        return self.mixer != "none"

    @property
    def shares_keys(self) -> bool:
        """Whether it has no keys and values of its own."""
        return self.mixer == "attention-shared"

    @property
    def attends(self) -> bool:
        """Whether it has softmax attention, with another mixer beside it or without."""
        return self.mixer in ATTENDING


class ModelSpec(Mixers):
    """Normalised shapes of a decoder-only language model; names follow Hugging Face's config.json.

    Work and memory depend on the fields below and in `mixers.Mixers`. Fields that change
    only what the network computes (rotary base and scaling, norm epsilon, router, multipliers,
    caps) are inherited from `network.Network`, which describes each.

    Counts are of elements, not bytes.
    num_experts: 0 in a dense model.
    kv_lora_rank: 0 in a model without MLA.
    intermediate_size: width of *dense* MLP layers (0: there are none).
    moe_intermediate_size: width of one routed expert.
    shared_expert_intermediate_size: width of all shared experts together.
    head_dim: with MLA, the query-key width qk_nope_head_dim + qk_rope_head_dim.
    first_k_dense_replace, moe_layer_freq, moe_layer_offset, dense_layers: layer i is MoE when i >=
        first_k_dense_replace, (i - moe_layer_offset) is a multiple of moe_layer_freq and i is in
        neither dense_layers nor mixer_only_layers.
    sliding_mask: per layer, whether it has a window. Llama 4's chunked attention is taken as a
        window of one chunk, an upper bound of its work.
    """

    name: Name = Field(min_length=1)
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    intermediate_size: Count
    vocab_size: Size
    tie_word_embeddings: StrictBool

    # swiglu stands for every gated MLP (geglu too), with three matrices; the others have two
    mlp: MlpKind = "swiglu"
    norm: NormKind = "rmsnorm"
    norm_bias: StrictBool = False  # layernorm only
    # 4: sandwich norms of Gemma 2 and 3; 1: parallel residual with a shared norm
    norms_per_layer: Count = 2
    embedding_norm: StrictBool = False  # a norm after the embedding (BLOOM)
    # head: weights of width head_dim (Qwen3, Gemma 3); full: over the whole projection (OLMo 2)
    qk_norm: QkNorm = "none"
    attention_bias: StrictBool = False  # on q, k and v
    attention_output_bias: StrictBool = False
    mlp_bias: StrictBool = False
    lm_head_bias: StrictBool = False
    attention_sinks: StrictBool = False  # one learned logit per head (gpt-oss)
    parallel_residual: StrictBool = False
    position_embedding: PositionEmbedding = "rope"
    max_position_embeddings: Count = 0  # rows of a learned table; else informative; 0: unknown

    num_experts: Count = 0
    num_experts_per_tok: Count = 0
    moe_intermediate_size: Count = 0
    n_shared_experts: Count = 0
    shared_expert_intermediate_size: Count = 0
    shared_expert_gate: StrictBool = False  # one output, Qwen2-MoE
    first_k_dense_replace: Count = 0
    moe_layer_freq: Size = 1
    moe_layer_offset: Count = 0
    dense_layers: tuple[Count, ...] = ()
    router_bias: StrictBool = False
    # DeepSeek-V3's e_score_correction_bias, one per routed expert
    router_correction_bias: StrictBool = False
    expert_bias: StrictBool = False

    kv_lora_rank: Count = 0
    q_lora_rank: Count = 0  # 0: a full query projection
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Count = 0
    v_head_dim: Count = 0

    sliding_window: Count = 0
    sliding_mask: tuple[StrictBool, ...] = ()

    def __hash__(self) -> int:
        """Hash of only the shapes, for speed: caches of work and memory ask for it often.

        Models that differ only elsewhere share a hash but are not equal.
        """
        return hash(_SHAPE(self.__dict__))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = self.clashes()
        if faults:
            raise ValueError("; ".join(str(fault) for fault in faults))
        return self

    def clashes(self, prefix: str = "model") -> list[Fault]:
        """Contradictions between fields, each as a fault; empty for a model that can be built."""
        found = (*_attention_clashes(self), *_layer_clashes(self), *_mixer_clashes(self))
        return [
            Fault(f"{prefix}.{key}", getattr(self, key), rule, remedy)
            for key, rule, remedy in found
        ]

    # ---- shapes ----------------------------------------------------------------------------------

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-head latent attention (DeepSeek-V2)."""
        return self.kv_lora_rank > 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.uses_mla else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim or self.head_dim

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP: 3 when gated, else 2."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def expert_input_size(self) -> int:
        """Width of what a routed expert reads and returns."""
        return self.moe_latent_size or self.hidden_size

    @property
    def per_layer_width(self) -> int:
        """Width of the per-layer embeddings of all layers together."""
        return self.num_hidden_layers * self.hidden_size_per_layer_input

    @property
    def num_choices(self) -> int:
        """Experts that a router chooses from, with those that compute nothing."""
        return self.num_experts + self.zero_expert_num

    @property
    def num_computing_per_tok(self) -> float:
        """Experts that compute for a token: its own, but for the zero experts' expected share."""
        chosen = self.num_experts_per_tok
        return chosen * self.num_experts / self.num_choices if self.zero_expert_num else chosen

    @property
    def sliding_layers(self) -> int:
        """Number of layers whose attention is limited to sliding_window."""
        return sum(self.sliding_mask)

    @property
    def num_moe_layers(self) -> int:
        return sum(kind.moe for kind in self.layer_kinds())

    @property
    def num_dense_layers(self) -> int:
        return sum(kind.feeds and not kind.moe for kind in self.layer_kinds())

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with softmax attention."""
        return sum(kind.attends for kind in self.layer_kinds())

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` (from 0) has routed experts."""
        placed = (
            index >= self.first_k_dense_replace
            and (index - self.moe_layer_offset) % self.moe_layer_freq == 0
        )
        others = (*self.dense_layers, *self.mixer_only_layers)
        return self.num_experts > 0 and placed and index not in others

    def layer_windows(self) -> tuple[int, ...]:
        """Attention window of each layer in tokens; 0 is full causal attention."""
        if self.sliding_windows:
            return self.sliding_windows
        mask = self.sliding_mask or (False,) * self.num_hidden_layers
        return tuple(self.sliding_window if windowed else 0 for windowed in mask)

    def at(self, window: int) -> "ModelSpec":
        """The model with the attention of a layer with this window (0: none) in all its layers."""
        differs = self.varies_heads or self.attention_k_eq_v or self.sliding_sinks
        return _windowed(self) if window and differs else self

    def widens_mlp(self, kind: LayerKind) -> bool:
        """Whether this kind of layer has a dense MLP of twice the width."""
        return self.use_double_wide_mlp and kind.shares_keys

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return _layer_kinds(self)

    def distinct_layers(self) -> tuple[tuple[LayerKind, int], ...]:
        """The kinds that occur, each with its number of layers, in order of first occurrence.

        Layers of multi-token prediction are the last.
        """
        return _distinct_layers(self)

    @property
    def parameters(self) -> "Parameters":
        return Parameters(self)

    def total_parameters(self) -> int:
        """All parameters; a tied table counts once."""
        own = self.parameters
        layers = sum(count * own.layer(kind) for kind, count in self.distinct_layers())
        return own.embedding() + layers + own.final_norm + own.head()

    def active_parameters(self) -> int:
        """Parameters that one token uses: the embedding, but no experts it is not routed to."""
        idle = round((self.num_experts - self.num_computing_per_tok) * self.parameters.expert())
        routed = sum(count for kind, count in self.distinct_layers() if kind.moe)
        return self.total_parameters() - routed * idle

    def matmul_parameters_per_token(self) -> int:
        """Active parameters without the input embedding, as `mfu` counts them.

        The input embedding is the token table and the position table. A tied head is the token
        table and so is left out, as in TorchTitan with weight tying. Its matrix product is still
        work (vocab_size * hidden_size multiply-adds per token forward), which the cost model counts
        as an op. The projection beside a per-layer embedding is a product.
        """
        tables = self.parameters.embedding() - self.per_layer_width * self.hidden_size
        return self.active_parameters() - tables

    def torchtitan_flops_per_token(self, seq_len: int) -> int:
        """FLOP per token of one training step (forward and backward), as TorchTitan counts for MFU.

        6 * parameters without the input embedding + 12 * layers * heads * head_dim * seq_len, of
        the layers with softmax attention.
        seq_len: tokens of a sequence.
        Causality and windows do not reduce the count; recomputation is not counted. With MLA,
        head_dim is the mean of the query-key and value widths, as in TorchTitan's DeepSeek-V3. Of
        compressed attention, the window and the entries that a query chooses count as its keys.
        Source: torchtitan, models/utils.py, get_dense_model_nparams_and_flops and
            get_moe_model_nparams_and_flops.
        """
        widths = sum(
            count * own.num_attention_heads * (own.qk_head_dim + own.v_dim) * keys
            for kind, count in self.distinct_layers()
            for own, keys in ((self.at(kind.window), _keys(self, kind, seq_len)),)
            if kind.attends or kind.mtp or kind.mixer in COMPRESSED
        )
        return 6 * self.matmul_parameters_per_token() + 6 * widths


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of each part of a model, in elements."""

    model: ModelSpec

    @property
    def final_norm(self) -> int:
        """Parameters of one norm over the hidden size."""
        model = self.model
        bias = model.norm == "layernorm" and model.norm_bias
        return model.hidden_size * (model.norm_weight + bias)

    def attention(self, own_keys: bool = True) -> int:
        """Projections, biases and sinks of attention in one layer, `at` whose window this is.

        Its norms are in norms().
        own_keys: False in a layer that shares another's keys and values.
        """
        model, h, heads = self.model, self.model.hidden_size, self.model.num_attention_heads
        if model.uses_mla:
            latent, rank, fused = model.q_lora_rank, model.kv_lora_rank, model.fused_query_gate
            gate = heads * model.v_dim * model.attention_output_gate
            q_out, kv_in = heads * model.qk_head_dim, rank + model.qk_rope_head_dim
            q = h * latent + latent * q_out if latent else h * q_out
            q += latent * (q_out + 2 * gate) if fused else h * gate
            kv = h * kv_in + rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
            bias = kv_in + latent  # DeepSeek puts biases on the two down projections only
        else:
            gated = heads * (model.head_dim + model.attention_output_gate * model.v_dim)
            own = 0 if model.attention_k_eq_v else model.v_dim
            both = model.num_key_value_heads * (model.head_dim + own) * own_keys
            q, kv, bias = h * gated, h * both, gated + both
        out = heads * model.v_dim * h
        biases = bias * model.attention_bias + h * model.attention_output_bias
        gates = model.attention_head_gate * h + model.attention_gate_bias
        return q + kv + out + biases + heads * (model.attention_sinks + gates)

    def _indexer(self) -> int:
        """DeepSeek's indexer: queries from their latent, keys with a LayerNorm, a weight a head."""
        model = self.model
        heads, width = model.index_n_heads, model.index_head_dim
        return model.q_lora_rank * heads * width + model.hidden_size * (width + heads) + 2 * width

    def _compressed(self, mixer: Mixer) -> int:
        """DeepSeek-V4's attention with its norms: latents, sinks, output in groups, compressor.

        A compressor projects keys and gates, of two series where entries overlap (CSA), and has a
        bias for each token of an entry and a norm; the indexer has one more, as wide as its heads.
        """
        model = self.model
        h, width, heads = model.hidden_size, model.head_dim, model.num_attention_heads
        own = model.q_lora_rank * (h + 1 + heads * width) + (h + 1) * width + heads
        own += model.o_lora_rank * (heads * width + model.o_groups * h)
        rate, chosen = model.entries(mixer)
        series = (2 if chosen else 1) * (2 * h + rate) + 1
        own += series * width * (rate > 0)
        index = series * model.index_head_dim
        index += model.index_n_heads * (model.q_lora_rank * model.index_head_dim + h)
        return own + index * (chosen > 0)

    def _mlp(self, width: int, bias: bool, outer: int = 0) -> int:
        matrices, outer = self.model.mlp_matrices, outer or self.model.hidden_size
        return matrices * outer * width + bias * ((matrices - 1) * width + outer)

    def dense_mlp(self, wide: bool = False) -> int:
        """One dense layer's MLP; wide: of twice the width."""
        model = self.model
        scalars = 2 * (model.hidden_act == "xielu")
        width = model.intermediate_size * (1 + wide)
        return self._mlp(width, model.mlp_bias) + scalars if width else 0

    def expert(self) -> int:
        model = self.model
        if not model.is_moe:
            return 0
        return self._mlp(model.moe_intermediate_size, model.expert_bias, model.expert_input_size)

    def shared_expert(self) -> int:
        """All shared experts of one layer, with their gate."""
        model = self.model
        if model.shared_expert_intermediate_size == 0:
            return 0
        return (
            self._mlp(model.shared_expert_intermediate_size, model.expert_bias)
            + model.hidden_size * model.shared_expert_gate
        )

    def router(self) -> int:
        """Router of one MoE layer: weight, bias and DeepSeek-V3's correction bias.

        The correction bias is a buffer that is published with the weights.
        """
        model = self.model
        scales = model.moe_branch_norms * (model.hidden_size + model.num_experts)
        biases = model.router_bias + model.router_correction_bias
        return model.num_choices * (model.hidden_size + biases) + scales

    def moe(self, hashed: bool = False) -> int:
        """One MoE layer: router, projections to and from a latent, routed and shared experts."""
        model = self.model
        if not model.is_moe:
            return 0
        return (
            self.router()
            - model.num_experts * (hashed and model.router_correction_bias)
            + 2 * model.hidden_size * model.moe_latent_size
            + model.num_experts * self.expert()
            + self.shared_expert()
        )

    def norms(self, kind: LayerKind) -> int:
        """Norms of one layer's branches, query-key norms, and the norms of MLA's latents.

        A layer of one branch has half of a layer's norms.
        """
        model = self.model
        branches = model.norms_per_layer * self.final_norm
        branches = branches * (kind.mixes + kind.feeds) // 2
        beside = model.moe_output_norm + 3 * model.moe_branch_norms
        branches += self.final_norm * kind.moe * beside
        branches += self.final_norm * (model.hidden_size_per_layer_input > 0)
        branches += 2 * model.hidden_size * model.gated_norm_rank * (kind.mixes + kind.moe)
        own = Parameters(model.at(kind.window))._attention_norms(not kind.shares_keys)
        return branches + (own if kind.attends else 0)

    def _attention_norms(self, own_keys: bool) -> int:
        model = self.model
        if model.uses_mla:
            rotated = model.qk_rope_head_dim * model.k_rope_norm
            inner = model.kv_lora_rank + model.q_lora_rank + rotated
        elif model.qk_norm == "full":
            heads = model.num_attention_heads + model.num_key_value_heads * own_keys
            inner = heads * model.head_dim
        else:
            inner = (1 + own_keys) * model.head_dim if model.qk_norm == "head" else 0
        return inner * (model.norm_weight + model.qk_norm_bias)

    def mixer(self, kind: LayerKind) -> int:
        """Parameters of a layer's mixer; norms() has those of attention's own norms."""
        own = Parameters(self.model.at(kind.window)).attention(not kind.shares_keys)
        attention = own if kind.attends else 0
        attention += self._indexer() * (kind.mixer == "dsa")
        attention += self._compressed(kind.mixer) * (kind.mixer in COMPRESSED)
        known = MIXER_KINDS.get(kind.mixer)
        return attention + (known.parameters(self.model, self.model.hidden_size) if known else 0)

    def layer(self, kind: LayerKind) -> int:
        model = self.model
        dense = self.dense_mlp(model.widens_mlp(kind)) * kind.feeds
        mlp = self.moe(kind.hashed) if kind.moe else dense
        gates = 2 * model.hidden_size * model.hidden_size_per_layer_input
        own = self.mixer(kind) + mlp + self.norms(kind) + gates
        joined = 2 * model.hidden_size**2 + 3 * self.final_norm
        joined += model.collapse_parameters(model.hidden_size)
        streams = model.stream_parameters(model.hidden_size, kind.mixes + kind.feeds)
        return own + streams + joined * kind.mtp

    def embedding(self) -> int:
        """Token table, learned position table and the norm after them; per-layer embeddings."""
        model = self.model
        positions = model.max_position_embeddings if model.position_embedding == "learned" else 0
        return (
            (model.vocab_size + positions) * model.hidden_size
            + model.embedding_norm * self.final_norm
            + model.per_layer_width * (model.vocab_size_per_layer_input + model.hidden_size)
            + model.hidden_size_per_layer_input
        )

    def head(self) -> int:
        """The model's own vocabulary head; only a bias where it is tied to the token table.

        Before it, residual streams become one.
        """
        model = self.model
        weight = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        weight += model.collapse_parameters(model.hidden_size)
        return weight + model.vocab_size * model.lm_head_bias


def _attention_clashes(model: ModelSpec) -> Iterator[Clash]:
    heads, kv, latent = model.num_attention_heads, model.num_key_value_heads, model.uses_mla
    widths = (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
    other = model.at(1)
    if _shares_without_lender(model):
        rule = "has a layer that shares keys and values with none before it"
        yield "mixers", rule, "give a layer of attention with the same window before it"
    if model.indexed and not (model.q_lora_rank and latent):
        rule = "an indexer reads the latent of queries"
        yield "q_lora_rank", rule, "give q_lora_rank and kv_lora_rank"
    if heads % kv:
        rule = f"does not divide {heads} attention heads"
        yield "num_key_value_heads", rule, "give a divisor of num_attention_heads"
    if other.num_attention_heads % other.num_key_value_heads:
        rule = (
            f"leaves {other.num_key_value_heads} KV heads for {other.num_attention_heads} heads of "
            "layers with a window"
        )
        yield "num_sliding_key_value_heads", rule, "give a divisor of their number of heads"
    if latent and (model.attention_k_eq_v or "attention-shared" in model.mixers):
        rule = "MLA has keys of its own in all layers"
        yield "kv_lora_rank", rule, "leave out attention_k_eq_v and attention-shared"
    if latent and 0 in widths:
        remedy = "give qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
        yield "kv_lora_rank", "MLA needs its head widths", remedy
    if latent and model.head_dim != sum(widths[:2]):
        yield "head_dim", "with MLA is qk_nope + qk_rope", f"give {sum(widths[:2])}"
    if other.uses_mla and other.head_dim != other.qk_head_dim:
        rule = "with MLA is the sum of both its parts in layers with a window"
        yield "sliding_head_dim", rule, f"give {other.qk_head_dim}"
    if model.fused_query_gate and not (model.attention_output_gate and model.q_lora_rank):
        rule = "is a gate of attention's output from the latent of queries"
        remedy = "give attention_output_gate and q_lora_rank, or leave it out"
        yield "fused_query_gate", rule, remedy
    for name in OF_MLA:
        if getattr(model, name) and not latent:
            yield name, "is of MLA alone", "give kv_lora_rank, or leave it out"
    if model.position_embedding == "learned" and model.max_position_embeddings == 0:
        rule = "a learned position table needs its rows"
        yield "max_position_embeddings", rule, "give max_position_embeddings"


def _shares_without_lender(model: ModelSpec) -> bool:
    """Whether a layer shares keys and values that no layer of its window has before it."""
    lent: set[int] = set()
    for window, mixer in zip(model.layer_windows(), model.mixers, strict=False):
        if mixer == "attention-shared" and window not in lent:
            return True
        lent |= {window} if mixer == "attention" else set()
    return False


def _layer_clashes(model: ModelSpec) -> Iterator[Clash]:
    yield from _expert_clashes(model)
    layers, lengths = model.num_hidden_layers, model.sliding_windows
    if model.intermediate_size == 0 and model.num_dense_layers > 0:
        yield "intermediate_size", "is needed by dense layers", "give the width of the dense MLP"
    for mask in ("sliding_mask", "rope_mask"):
        if len(getattr(model, mask)) not in (0, layers):
            count = counted(layers, "layer") if mask == "sliding_mask" else f"{layers} layers"
            yield mask, f"needs one value for each of {count}", "give as many values as layers"
    if any(model.sliding_mask) and model.sliding_window == 0:
        yield "sliding_window", "is needed where layers use it", "give the window in tokens"
    masked = (tuple(map(bool, lengths)), max(lengths, default=0))
    if lengths and (model.sliding_mask, model.sliding_window) != masked:
        remedy = "give a window for each layer, and the longest of them as sliding_window"
        yield "sliding_windows", "contradicts sliding_mask or sliding_window", remedy
    for key in ("hc_mult", "gated_norm_rank"):
        if getattr(model, key) > 0 and (model.parallel_residual or model.norms_per_layer == 1):
            rule = "is for each branch by itself, and these run side by side"
            yield key, rule, "leave it out, or parallel_residual and norms_per_layer"


def _expert_clashes(model: ModelSpec) -> Iterator[Clash]:
    experts, moe, groups = model.num_experts, model.is_moe, model.n_group
    chosen, needed = "num_experts_per_tok", "is needed by a MoE model"
    remedy = f"give 1 to {experts}" if moe else "give num_experts"
    if model.num_experts_per_tok > experts:
        yield chosen, f"is more than the {counted(experts, 'expert')}", remedy
    if moe and model.num_experts_per_tok == 0:
        yield chosen, needed, remedy
    if moe and model.moe_intermediate_size == 0:
        yield "moe_intermediate_size", needed, "give the width of one expert"
    if moe and model.num_moe_layers == 0:
        remedy = f"give less than {model.num_hidden_layers}, or leave the experts out"
        yield "first_k_dense_replace", "leaves no MoE layer", remedy
    for name, rule in _BESIDE_EXPERTS:
        if getattr(model, name) > 0 and not moe:
            yield name, rule, "give num_experts, or leave it out"
    if model.moe_shortcut and not (moe and not model.layer_kinds()[-1].moe):
        rule = "needs a layer without experts behind each with them"
        yield "moe_shortcut", rule, "give moe_layer_freq 2, or leave it out"
    if groups > 0 and experts % groups:
        yield "n_group", f"does not divide {experts} experts", "give a divisor of num_experts, or 0"
    if groups > 0 and not 1 <= model.topk_group <= groups:
        yield "topk_group", f"is not 1 to {groups} groups", f"give 1 to {groups}"


def _mixer_clashes(model: ModelSpec) -> Iterator[Clash]:
    used, layers = set(model.mixers), model.num_hidden_layers
    rows, width = model.vocab_size_per_layer_input, model.hidden_size_per_layer_input
    if len(model.mixers) not in (0, layers):
        rule = f"needs one value for each of {layers} layers"
        yield "mixers", rule, "give as many values as layers"
    if any(index >= layers for index in model.mixer_only_layers):
        rule = f"names a layer beyond the {layers}"
        yield "mixer_only_layers", rule, f"give 0 to {layers - 1}"
    if any(model.mixers[i : i + 1] == ("none",) for i in model.mixer_only_layers):
        yield "mixer_only_layers", "leaves a layer with nothing", "give it a mixer"
    if bool(rows) != bool(width):
        rule = f"is {rows} where hidden_size_per_layer_input is {width}"
        yield "vocab_size_per_layer_input", rule, "give both, or neither"
    for mixer, kind in MIXER_KINDS.items():
        for name in kind.sizes if mixer in used else ():
            if getattr(model, name) == 0:
                yield name, f"is needed by {mixer} layers", "give it as in the config.json"
    split = [kind.heads for mixer, kind in MIXER_KINDS.items() if mixer in used]
    split += [("o_groups", "num_attention_heads")] * len(used & COMPRESSED)
    for groups, heads in (pair for pair in split if len(pair) == 2):
        if getattr(model, heads) % max(getattr(model, groups), 1):
            rule = f"does not divide {getattr(model, heads)} heads"
            yield groups, rule, f"give a divisor of {heads}"
    if model.hc_mult == 1:
        yield "hc_mult", "is one stream, which has no mixes", "leave it out"
    for name, owners, words in _OWNED:
        if getattr(model, name) and not used & owners:
            yield name, f"is of {words} alone", "give such layers in mixers, or leave it out"


def _keys(model: ModelSpec, kind: LayerKind, seq_len: int) -> int:
    """Keys that a query of the layer is counted to attend to."""
    if kind.mixer not in COMPRESSED:
        return seq_len
    rate, chosen = model.entries(kind.mixer)
    every = seq_len // rate if rate else 0
    return min(model.sliding_window + min(chosen or every, every), seq_len)


_BESIDE_EXPERTS = (
    ("zero_expert_num", "stands beside experts that compute"),
    ("num_hash_layers", "is of layers with experts"),
)
# size -> the mixers that alone read it
_OWNED: tuple[tuple[str, frozenset[Mixer], str], ...] = (
    ("o_groups", COMPRESSED, "shared-kv, csa and hca layers"),
    ("compress_rate_csa", frozenset({"csa"}), "csa layers"),
    ("compress_rate_hca", frozenset({"hca"}), "hca layers"),
    ("use_double_wide_mlp", frozenset({"attention-shared"}), "attention-shared layers"),
)
_USUAL: tuple[Mixer, ...] = ("attention",)
_SHAPE = itemgetter(*(name for name in ModelSpec.model_fields if name not in NETWORK_FIELDS))


@lru_cache(maxsize=64)
def _windowed(model: ModelSpec) -> ModelSpec:
    """The model with the heads of its layers with a window in all layers."""
    own = {name: getattr(model, other) or getattr(model, name) for name, other in SLIDING.items()}
    unset = dict.fromkeys(SLIDING.values(), 0)
    sinks = {"attention_sinks": model.attention_sinks or model.sliding_sinks}
    unset |= {"attention_k_eq_v": False, "sliding_sinks": False}
    return model.model_copy(update={**own, **unset, **sinks})


@lru_cache(maxsize=256)
def _layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    mixers = model.mixers or _USUAL * model.num_hidden_layers
    return tuple(
        LayerKind(
            moe=model.is_moe_layer(i),
            window=window,
            mixer=mixer,
            feeds=i not in model.mixer_only_layers,
            hashed=i < model.num_hash_layers and model.is_moe_layer(i),
        )
        for i, (window, mixer) in enumerate(zip(model.layer_windows(), mixers, strict=False))
    )


@lru_cache(maxsize=256)
def _distinct_layers(model: ModelSpec) -> tuple[tuple[LayerKind, int], ...]:
    kinds = _layer_kinds(model)
    last, window = kinds[-1], model.mtp_window
    predicting = LayerKind(
        moe=last.moe and not model.mtp_dense,
        window=last.window if window is None else window,
        mixer=PREDICTING.get(last.mixer, last.mixer),
        feeds=last.feeds,
        mtp=True,
    )
    more = Counter({predicting: model.mtp_num_layers})
    return tuple((Counter(kinds) + more).items())
