"""The catalogue's block types as a trainer writes them in torch, small enough to run and faithful
in what autograd keeps.

Sources: torchtitan 0.2.2 models/llama3, models/deepseek_v3, models/moe (0.2.1 for repeat_kv);
transformers models/llama, models/gpt2. What torch runs as one CUDA kernel runs here as one
operation that keeps and allocates the same tensors on every device.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP_ALIGNMENT = 8  # torchtitan models/moe/utils.py TOKEN_GROUP_ALIGN_SIZE_M


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One model. kv_rank > 0: multi-head latent attention with qk_rope and qk_nope (its v is
    head_dim wide). experts > 0: MoE layers.
    """

    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 352
    vocab: int = 512
    layers: int = 3
    seq: int = 128
    batch: int = 1
    mlp: str = "swiglu"
    norm: str = "rms"
    rotary: str = "complex"
    bias: bool = False
    repeat_kv: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    qk_rope: int = 0
    experts: int = 0
    top_k: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0

    @property
    def tokens(self) -> int:
        return self.seq * self.batch


def _normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return torch.zeros_like(x), rows


def _gradients(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), torch.zeros_like(weight)


_OWN = partial(torch.library.custom_op, mutates_args=())
rms_norm = _OWN("planner_test::rms_norm", _normed)
rms_norm_backward = _OWN("planner_test::rms_norm_backward", _gradients)
rms_norm.register_fake(_normed)
rms_norm_backward.register_fake(_gradients)


def _keep_for_norm(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _norm_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    x, weight, rstd = ctx.saved_tensors
    return rms_norm_backward(grad, x, rstd, weight)


# tools/autograd/derivatives.yaml, _fused_rms_norm: keeps input, weight and rstd; CUDA only, so
# nn.RMSNorm is composite on this machine.
rms_norm.register_autograd(_norm_gradients, setup_context=_keep_for_norm)


class FusedNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)[0]


def norm(kind: str, width: int) -> nn.Module:
    """rms: as CUDA runs it since torch 2.8; composite: as nn.RMSNorm before; layer: LayerNorm."""
    return {"rms": FusedNorm, "composite": nn.RMSNorm, "layer": nn.LayerNorm}[kind](width)


def rotate(x: Tensor, table: Tensor, kind: str) -> Tensor:
    """complex: torchtitan's apply_rotary_emb; half: transformers' rotate_half."""
    if kind == "none":
        return x
    if kind == "complex":
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[None, : x.shape[1], None]).flatten(3).type_as(x)
    cos, sin = table[:, None, : x.shape[1], None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fused attention on (batch, seq, heads, dim): CUDA's operations where no kernel has to run
    (cuDNN's for a narrower v), else CPU's; its heads are joined.
    """
    narrower = q.shape[-1] != v.shape[-1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.device.type != "meta":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif narrower:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out = cudnn(q, k, v, None, True, 0.0, True)[0]
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out.transpose(1, 2).contiguous().flatten(2)


def rotary_table(s: Sizes) -> Tensor:
    """One table for all layers, on the default device."""
    width = s.qk_rope or s.head_dim
    if s.rotary == "half":
        return torch.zeros(2, s.seq, width, dtype=torch.bfloat16)
    return torch.zeros(s.seq, width // 2, dtype=torch.complex64)


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.wq = nn.Linear(s.hidden, s.heads * s.head_dim, bias=s.bias)
        self.wk = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=s.bias)
        self.wv = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=s.bias)
        self.wo = nn.Linear(s.heads * s.head_dim, s.hidden, bias=s.bias)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.s.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, table, self.s.rotary), rotate(k, table, self.s.rotary)
        if self.s.repeat_kv and (times := self.s.heads // self.s.kv_heads) > 1:
            repeated = (t[:, :, :, None].expand(-1, -1, -1, times, -1) for t in (k, v))
            k, v = (t.reshape(batch, seq, -1, self.s.head_dim) for t in repeated)
        return self.wo(attend(q, k, v))


class LatentAttention(nn.Module):
    """torchtitan models/deepseek_v3: queries, keys and values through narrow projections."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.qk = s.head_dim + s.qk_rope
        if s.q_rank:
            self.wq_a = nn.Linear(s.hidden, s.q_rank, bias=False)
            self.q_norm = norm(s.norm, s.q_rank)
        self.wq_b = nn.Linear(s.q_rank or s.hidden, s.heads * self.qk, bias=False)
        self.wkv_a = nn.Linear(s.hidden, s.kv_rank + s.qk_rope, bias=False)
        self.kv_norm = norm(s.norm, s.kv_rank)
        self.wkv_b = nn.Linear(s.kv_rank, s.heads * 2 * s.head_dim, bias=False)
        self.wo = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        s, (batch, seq, _) = self.s, x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x)) if s.q_rank else x).view(batch, seq, -1, self.qk)
        q_nope, q_pe = torch.split(q, [s.head_dim, s.qk_rope], dim=-1)
        q = torch.cat([q_nope, rotate(q_pe, table, "complex")], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [s.kv_rank, s.qk_rope], dim=-1)
        k_pe = rotate(k_pe.unsqueeze(2), table, "complex")
        kv = self.wkv_b(self.kv_norm(kv)).view(batch, seq, -1, 2 * s.head_dim)
        k_nope, v = torch.split(kv, [s.head_dim, s.head_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        return self.wo(attend(q, k, v))


class FeedForward(nn.Module):
    def __init__(self, s: Sizes, width: int) -> None:
        super().__init__()
        self.kind = s.mlp
        self.w1 = nn.Linear(s.hidden, width, bias=s.bias)
        if s.mlp == "swiglu":
            self.w3 = nn.Linear(s.hidden, width, bias=s.bias)
        self.w2 = nn.Linear(width, s.hidden, bias=s.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.w2(F.gelu(self.w1(x)) if self.kind == "gelu" else F.relu(self.w1(x)).square())


class GroupedExperts(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(s.experts, s.expert_ffn, s.hidden))
        self.w2 = nn.Parameter(torch.empty(s.experts, s.hidden, s.expert_ffn))
        self.w3 = nn.Parameter(torch.empty(s.experts, s.expert_ffn, s.hidden))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=offsets)


class MoE(nn.Module):
    """Token choice, top-k, scores applied before the experts, rows of each expert padded to the
    alignment of grouped_mm.
    """

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = GroupedExperts(s)
        self.shared = FeedForward(s, s.shared_ffn) if s.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        s, shape = self.s, x.shape
        x = x.view(-1, s.hidden)
        scores = F.softmax(self.gate(x).to(torch.float32), dim=1)
        chosen = torch.topk(scores, k=s.top_k, dim=-1, sorted=False)[1]
        top = scores.gather(dim=1, index=chosen) * 1.0
        order = torch.argsort(chosen.view(-1), stable=True)
        top_sorted = top.view(-1)[order]
        routed = x[order // s.top_k]
        routed = (routed.to(torch.float32) * top_sorted.reshape(-1, 1)).to(x.dtype)
        out = self.padded_experts(routed)
        shared = self.shared(x) if self.shared is not None else None
        unsorted = torch.zeros(routed.shape, dtype=out.dtype, device=out.device)
        unsorted[order] = out
        combined = unsorted.reshape(-1, s.top_k, s.hidden).sum(dim=1)
        return (combined if shared is None else shared + combined).reshape(shape)

    def padded_experts(self, routed: Tensor) -> Tensor:
        """torchtitan models/moe/utils.py, indices_padding_wrapper."""
        rows = routed.shape[0] + self.s.experts * GROUP_ALIGNMENT
        places = torch.zeros(rows, dtype=torch.int32, device=routed.device)
        counts = torch.zeros(self.s.experts, dtype=torch.int32, device=routed.device)
        routed = torch.vstack((routed, routed.new_zeros(routed.shape[-1])))
        shape = routed.shape
        routed = routed[places, :]
        out = self.experts(routed, counts)
        unpadded = out.new_empty(shape)
        unpadded[places, :] = out
        return unpadded[:-1]


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = norm(s.norm, s.hidden), norm(s.norm, s.hidden)
        self.attention = LatentAttention(s) if s.kv_rank else Attention(s)
        self.feed_forward = MoE(s) if s.experts else FeedForward(s, s.ffn)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Module):
    """Final norm and projection as one module: sharded together, as torchtitan does with a list,
    which the tracker would take for two.
    """

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.norm = norm(s.norm, s.hidden)
        self.output = nn.Linear(s.hidden, s.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Model(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList([Block(s) for _ in range(s.layers)])
        self.head = Head(s)
        self.register_buffer("table", rotary_table(s), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden_states(ids))

    def hidden_states(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x


class HeadlessModel(Model):
    """Ends with the final norm: a chunked loss runs the projection itself."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head.norm(self.hidden_states(ids))
        return out


class GradientOfHiddenStates(torch.autograd.Function):
    """Hands a gradient that is known already to what made the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def chunked_loss(hidden: Tensor, labels: Tensor, head: nn.Module, chunks: int) -> Tensor:
    """torchtitan 0.3.0 components/loss.py: projection, loss and their backward, chunk by chunk."""
    parts = [part.contiguous().detach().requires_grad_() for part in hidden.chunk(chunks, dim=1)]
    labels_of = labels.chunk(chunks, dim=1)
    gradient = torch.zeros(hidden.shape, dtype=torch.float32)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for index, part in enumerate(parts):
        if index == chunks - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        cross_entropy(head(part), labels_of[index]).backward()
        size = part.shape[1]
        gradient[:, index * size : (index + 1) * size] = part.grad
        part.grad = None
    head.reshard()
    return GradientOfHiddenStates.apply(hidden, gradient.to(hidden.dtype))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan components/loss.py."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")
