"""The model of a ModelSpec as torch modules: a whole decoder, or one pipeline stage's part.

Letters: B sequences, T local tokens, C hidden size. Built on the meta device; parallelism replaces
its parameters before they get storage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from planner.probes.reference.attention_kernels import AttentionCore, Sequence
from planner.probes.reference.collectives import Wait
from planner.probes.reference.moe import MixtureOfExperts, activated
from planner.probes.reference.norms import RmsNorm
from planner.specs.model import LayerKind, ModelSpec

ROPE_BASE, NORM_EPSILON = 500_000.0, 1e-5  # Llama 3; they do not affect cost
Rope = torch.Tensor  # complex (T, D / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The layers that a stage holds, by their number in the model; whether it has both ends."""

    layers: tuple[int, ...]
    first: bool
    last: bool


class Transformer(nn.Module):
    """One part of a decoder: tokens (B, T) or hidden states in, logits or hidden states out."""

    def __init__(self, spec: ModelSpec, part: ModelPart, *, unfused: bool, seq_len: int) -> None:
        super().__init__()
        self.spec, self.part = spec, part
        kinds = spec.layer_kinds()
        hidden, vocabulary = spec.hidden_size, spec.vocab_size
        self.tok_embeddings = nn.Embedding(vocabulary, hidden) if part.first else None
        learned = part.first and spec.position_embedding == "learned"
        self.position_embeddings = PositionTable(spec) if learned else None
        self.embedding_norm = _norm(spec) if part.first and spec.embedding_norm else None
        self.layers = nn.ModuleDict(
            {str(i): Block(spec, kinds[i], unfused=unfused, seq_len=seq_len) for i in part.layers}
        )
        self.norm = _norm(spec) if part.last else None
        self.output = _linear(part.last, hidden, vocabulary, spec.lm_head_bias)
        self.tie()

    @property
    def tied(self) -> bool:
        """Whether the token table and the head are one parameter here."""
        return self.spec.tie_word_embeddings and self.part.first and self.part.last

    def tie(self) -> None:
        """Makes the head's matrix the token table if one part holds both."""
        if self.tied:
            assert self.output is not None
            assert self.tok_embeddings is not None
            self.output.weight = self.tok_embeddings.weight

    def place(self, sequence: Sequence) -> None:
        """Sets in every layer which positions of the sequence this rank holds.

        Parameters must be on their device. Layers hold rotary tables, for FSDP2 would cast an
        argument to the parameter dtype at each call.
        """
        positions = sequence.local
        rope: Rope | None = None
        if self.spec.position_embedding == "rope" or self.spec.uses_mla:
            width = self.spec.head_dim // 2 * 2
            if self.spec.uses_mla:
                width = self.spec.qk_rope_head_dim
            pairs = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
            angle = torch.outer(positions.float(), ROPE_BASE ** (-pairs / width))
            rope = torch.polar(torch.ones_like(angle), angle)
        if self.position_embeddings is not None:
            self.position_embeddings.positions = positions
        for module in self.modules():
            if isinstance(module, AttentionCore):
                module.place(sequence)
            if isinstance(module, Block):
                module.rope = rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One microbatch through this part."""
        if self.tok_embeddings is not None:
            x = Wait.apply(self.tok_embeddings(x))
        x = _through(self.position_embeddings, x)
        x = _through(self.embedding_norm, x)
        for layer in self.layers.values():
            x = layer(x)
        return _through(self.output, _through(self.norm, x))


class PositionTable(nn.Module):
    """A learned vector per position, added to the embedded tokens.

    share, weight_hook: under sequence parallelism, the rank's positions and the table's copy.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.table = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.positions: torch.Tensor | None = None
        self.share: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.weight_hook: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to x (B, T, C) the vectors of its positions."""
        assert self.positions is not None
        positions = self.positions if self.share is None else self.share(self.positions)
        weight = self.table.weight
        if self.weight_hook is not None:
            weight = self.weight_hook(weight)
        return x + F.embedding(positions, weight)


class Block(nn.Module):
    """One layer: attention and MLP or experts, each with its residual."""

    def __init__(self, spec: ModelSpec, kind: LayerKind, *, unfused: bool, seq_len: int) -> None:
        super().__init__()
        window = kind.window if 0 < kind.window < seq_len else 0
        core = AttentionCore(window=window, unfused=unfused, has_sinks=spec.attention_sinks)
        self.rope: Rope | None = None
        self.parallel_residual = spec.parallel_residual
        self.attention: nn.Module = (
            LatentAttention(spec, core) if spec.uses_mla else AttentionLayer(spec, core)
        )
        norms = spec.norms_per_layer
        self.attention_norm = _norm(spec) if norms >= 1 else None
        self.ffn_norm = _norm(spec) if norms >= 2 else None
        self.attention_post_norm = _norm(spec) if norms >= 3 else None
        self.ffn_post_norm = _norm(spec) if norms >= 4 else None
        self.feed_forward = (
            None if kind.moe else FeedForward(spec, spec.intermediate_size, bias=spec.mlp_bias)
        )
        self.moe = _experts(spec) if kind.moe else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        entered = _through(self.attention_norm, x)
        attended = _through(self.attention_post_norm, self.attention(entered, self.rope))
        if self.parallel_residual:
            fed = self._mlp(entered if self.ffn_norm is None else self.ffn_norm(x))
            return x + attended + fed
        h = x + attended
        return h + self._mlp(_through(self.ffn_norm, h))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        block = self.moe if self.feed_forward is None else self.feed_forward
        return _through(self.ffn_post_norm, _through(block, x))


class AttentionLayer(nn.Module):
    """Grouped-query attention."""

    def __init__(self, spec: ModelSpec, core: AttentionCore) -> None:
        super().__init__()
        h, width, heads = spec.hidden_size, spec.head_dim, spec.num_attention_heads
        queries, keys = heads * width, spec.num_key_value_heads * width
        self.head_dim, self.norm_kind = width, spec.qk_norm
        self.rotates = spec.position_embedding == "rope"
        self.wq = nn.Linear(h, queries, bias=spec.attention_bias)
        self.wk = nn.Linear(h, keys, bias=spec.attention_bias)
        self.wv = nn.Linear(h, keys, bias=spec.attention_bias)
        self.wo = nn.Linear(queries, h, bias=spec.attention_output_bias)
        self.q_norm = _query_norm(spec, queries)
        self.k_norm = _query_norm(spec, keys)
        self.sinks = nn.Parameter(torch.empty(heads)) if spec.attention_sinks else None
        self.core = core

    def forward(self, x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.norm_kind == "full":
            q, k = _through(self.q_norm, q), _through(self.k_norm, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.norm_kind == "head":
            q, k = _through(self.q_norm, q), _through(self.k_norm, k)
        if self.rotates and rope is not None:
            q, k = rotated(q, rope), rotated(k, rope)
        sinks = self.sinks.to_local() if isinstance(self.sinks, DTensor) else self.sinks
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks)
        return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): narrow projections, one shared rotary key."""

    def __init__(self, spec: ModelSpec, core: AttentionCore) -> None:
        super().__init__()
        h, heads = spec.hidden_size, spec.num_attention_heads
        self.nope, self.rotary = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self.value, self.latent = spec.v_head_dim, spec.kv_lora_rank
        query_width, narrow = heads * spec.qk_head_dim, spec.q_lora_rank
        bias = spec.attention_bias
        self.wq = _linear(not narrow, h, query_width)
        self.wq_a = _linear(bool(narrow), h, narrow, bias)
        self.q_norm = RmsNorm(narrow, eps=NORM_EPSILON) if narrow else None
        self.wq_b = _linear(bool(narrow), narrow, query_width)
        self.wkv_a = nn.Linear(h, self.latent + self.rotary, bias=bias)
        self.kv_norm = RmsNorm(self.latent, eps=NORM_EPSILON)
        self.wkv_b = nn.Linear(self.latent, heads * (self.nope + self.value), bias=False)
        self.wo = nn.Linear(heads * self.value, h, bias=spec.attention_output_bias)
        self.core = core

    def forward(self, x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        assert rope is not None
        q = x
        for part in (self.wq, self.wq_a, self.q_norm, self.wq_b):
            q = _through(part, q)
        q = q.unflatten(-1, (-1, self.nope + self.rotary))
        latent, shared = self.wkv_a(x).split([self.latent, self.rotary], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.nope + self.value))
        if isinstance(shared, DTensor):  # each rank's heads give one part of its gradient
            shared = shared.to_local(grad_placements=[Partial()])
        q_nope, q_rotary = q.split([self.nope, self.rotary], dim=-1)
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        k_rotary = rotated(shared.unsqueeze(-2), rope).expand(*k_nope.shape[:-1], self.rotary)
        q = torch.cat([q_nope, rotated(q_rotary, rope)], dim=-1)
        k = torch.cat([k_nope, k_rotary], dim=-1)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """An MLP: gated (three matrices), or two matrices with GELU or squared ReLU."""

    def __init__(self, spec: ModelSpec, width: int, *, bias: bool) -> None:
        super().__init__()
        self.kind = spec.mlp
        self.w1 = nn.Linear(spec.hidden_size, width, bias=bias)
        self.w3 = _linear(spec.mlp == "swiglu", spec.hidden_size, width, bias)
        self.w2 = nn.Linear(width, spec.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.w3 is not None:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]
        return self.w2(activated(self.w1(x), self.kind))  # type: ignore[no-any-return]


def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotary embedding of x (B, T, heads, D) as wide as the table, in fp32 as TorchTitan's."""
    width = 2 * rope.shape[-1]
    pairs = torch.view_as_complex(x[..., :width].float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * rope[:, None, :]).flatten(-2).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def _through(module: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """The output of a module; x itself where the model has none there."""
    return x if module is None else cast(torch.Tensor, module(x))


def _linear(present: bool, taken: int, given: int, bias: bool = False) -> nn.Linear | None:
    return nn.Linear(taken, given, bias=bias) if present else None


def _experts(spec: ModelSpec) -> MixtureOfExperts:
    width = spec.shared_expert_intermediate_size
    shared = FeedForward(spec, width, bias=spec.expert_bias) if width else None
    return MixtureOfExperts(spec, shared)


def _norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.hidden_size, bias=spec.norm_bias)
    return RmsNorm(spec.hidden_size, eps=NORM_EPSILON)


def _query_norm(spec: ModelSpec, width: int) -> nn.Module | None:
    if spec.qk_norm == "none":
        return None
    return RmsNorm(spec.head_dim if spec.qk_norm == "head" else width, eps=NORM_EPSILON)
