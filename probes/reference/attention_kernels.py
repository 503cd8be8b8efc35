"""The core of attention: softmax(q k^T) v with a causal or sliding mask.

Letters: B sequences, H query heads, K key-value heads, T local tokens, S tokens attended over, D
width. q (B, H, T, D), k v (B, K, S, D).
The device and the context axis choose the kernel. On GPUs torch's own kernels run:
scaled_dot_product_attention, under its context parallelism, and FlexAttention for windows and
sinks. On CPUs torch has no fused kernel that differentiates under rings, sinks or windows, so
`CpuFlash` composes them from its flash operator. It saves for backward what a GPU's flash kernel
saves: q, k, v (at K heads), the output and its log-sum-exp.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from planner.probes.reference.collectives import Exchange, Gather
from planner.probes.reference.regions import as_one_kept_operator

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEADS, SEQUENCE = 1, 2
_aten = torch.ops.aten


class Sequence:
    """Positions of this rank's tokens, of its queries and its keys, with masks from them."""

    def __init__(self, local: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> None:
        self.local, self.queries, self.keys = local, queries, keys
        self._dense: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._blocks: dict[int, Any] = {}

    def dense_mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask (T, S): zero where a query may see a key, else minus infinity."""
        if (window, dtype) not in self._dense:
            distance = self.queries[:, None] - self.keys[None, :]
            seen = (distance >= 0) & ((distance < window) if window else True)
            zero = torch.zeros((), dtype=dtype, device=distance.device)
            masked = zero.expand(distance.shape).masked_fill(~seen, float("-inf"))
            self._dense[window, dtype] = masked
        return self._dense[window, dtype]

    def block_mask(self, window: int) -> Any:
        """The mask for FlexAttention."""
        if window not in self._blocks:
            from torch.nn.attention.flex_attention import create_block_mask

            queries, keys = self.queries, self.keys

            def seen(
                b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
            ) -> torch.Tensor:
                distance = queries[q] - keys[k]
                return (distance >= 0) & (distance < window) if window else distance >= 0

            # built eagerly it holds the whole (T, S): 10.7 GB for 32,768 tokens on an H200
            self._blocks[window] = torch.compile(create_block_mask)(
                seen, None, None, len(queries), len(keys), device=str(queries.device)
            )
        return self._blocks[window]


class AttentionCore(nn.Module):
    """One layer's attention without its projections.

    q, k and v must be its first arguments: torch's context parallelism hooks them.
    window: tokens a query looks back on, 0 for all.
    unfused: probabilities are materialised.
    has_sinks: one learned logit per head.
    group, method: ranks over which the sequence is cut, and how keys and values reach them; set by
        `context_parallel`.
    sequence: set once positions are known.
    """

    def __init__(self, *, window: int, unfused: bool, has_sinks: bool) -> None:
        super().__init__()
        self.window, self.unfused, self.has_sinks = window, unfused, has_sinks
        self.group: dist.ProcessGroup | None = None
        self.method = ""
        self.sequence: Sequence | None = None

    def place(self, sequence: Sequence) -> None:
        """Sets the positions, and builds FlexAttention's mask, which no compiled block can do."""
        self.sequence = sequence
        if sequence.local.device.type == "cuda" and not self.unfused and self._needs_mask():
            sequence.block_mask(self.window)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Output (B, H, T, D of v)."""
        group = self.group
        if group is None:
            return self._attend(q, k, v, sinks)
        if self.method == "ulysses":
            sinks = None if sinks is None else sinks.chunk(group.size())[group.rank()]
            q, k, v = (_ulysses(x, group, HEADS, SEQUENCE) for x in (q, k, v))
            return _ulysses(self._attend(q, k, v, sinks), group, SEQUENCE, HEADS)
        if self._needs_mask():
            k, v = (Gather.apply(x, group, SEQUENCE) for x in (k, v))
        return self._attend(q, k, v, sinks)

    def _needs_mask(self) -> bool:
        """Whether this layer needs all keys under a mask, as no causal kernel or ring runs it."""
        assert self.sequence is not None
        return self.window > 0 or (self.has_sinks and self.sequence.local.device.type != "cpu")

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.sequence is not None
        masked = self._needs_mask()
        if self.unfused:
            dense = self.sequence.dense_mask(self.window, torch.float32)
            return _materialised(q, k, v, sinks, dense)
        if q.device.type == "cpu":
            ring = None if masked or self.method == "ulysses" else self.group
            mask = self.sequence.dense_mask(self.window, q.dtype) if masked else None
            return cast(torch.Tensor, CpuFlash.apply(q, k, v, sinks, mask, ring))
        if masked:
            return _flex(q, k, v, sinks, self.sequence.block_mask(self.window))
        return fused(q, k, v)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by the first of the kernels that TorchTitan prefers, in its order.

    torch's own order begins with flash on most GPUs. Source: torchtitan models/attention.py, 0.2.2.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, block_mask: Any
) -> torch.Tensor:
    """FlexAttention; a sink joins the softmax's denominator: out x sigmoid(lse - sink)."""
    how = {"block_mask": block_mask, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks is None:
        return cast(torch.Tensor, _compiled_flex()(q, k, v, **how))
    out, lse = _compiled_flex()(q, k, v, **how, return_lse=True)
    share = torch.sigmoid(lse - sinks[None, :, None])[..., None]
    return cast(torch.Tensor, out * share.to(out.dtype))


def _materialised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5 + mask
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(v.dtype) @ v
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


def _ulysses(x: torch.Tensor, group: dist.ProcessGroup, given: int, taken: int) -> torch.Tensor:
    """Exchange of all heads on some tokens for some heads on all tokens, or back; x (B, H, T, D).

    given, taken: the dimension that is cut over the ranks, and the one that is joined.
    """
    n = group.size()
    parts = torch.stack(x.chunk(n, given))
    came = Exchange.apply(parts, [1] * n, [1] * n, group)
    return torch.cat(cast(torch.Tensor, came).unbind(), taken)


class CpuFlash(torch.autograd.Function):
    """torch's flash attention for CPUs, extended with masks, sinks, narrower values and a ring.

    The ring runs over context-parallel ranks.
    A sink is a key of value zero: with lse' = log(exp(lse) + exp(sink)) the output becomes out
    exp(lse - lse'), and the flash backward on (out', lse') is already the gradient of that softmax;
    d sink = -sum exp(sink - lse') (d out . out').
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        ring: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Computes the output, and saves what backward needs."""
        op = _aten._scaled_dot_product_flash_attention_for_cpu.default
        padded = _widened(v, q.shape[-1])
        if ring is None:
            out, lse = op(q, k, padded, 0.0, mask is None, attn_mask=mask)
        else:
            passed = {"query": q, "key": k, "value": padded, "is_causal": True, "dropout_p": 0.0}
            there, _ = _ring()
            out, lse = as_one_kept_operator(lambda: there(ring, SEQUENCE, op, **passed))
        out = out[..., : v.shape[-1]]
        if sinks is not None:
            both = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out, lse = out * torch.exp(lse - both)[..., None].to(out.dtype), both
        ctx.save_for_backward(q, k, v, out, lse, sinks, mask)
        ctx.ring = ring
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks, mask = ctx.saved_tensors
        width, op = q.shape[-1], _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        wide_v, wide_out, wide_grad = (_widened(one, width) for one in (v, out, grad))
        if ctx.ring is None:
            grads = op(wide_grad, q, k, wide_v, wide_out, lse, 0.0, mask is None, attn_mask=mask)
        else:
            _, back = _ring()
            grads = back(
                ctx.ring,
                SEQUENCE,
                op,
                grad_out=wide_grad,
                grad_out_name="grad_out",
                query=q,
                key=k,
                value=wide_v,
                out=wide_out,
                logsumexp=lse,
                is_causal=True,
                dropout_p=0.0,
            )
        grad_q, grad_k, grad_v = grads[:3]
        grad_sinks = None
        if sinks is not None:
            moved = (grad * out).sum(dim=-1).to(lse.dtype)
            share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse) * moved
            grad_sinks = -share.sum(dim=(0, 2)).to(sinks.dtype)
        return grad_q, grad_k, grad_v[..., : v.shape[-1]], grad_sinks, None, None


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _ring() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's ring around any flash operator, and its backward (alike in torch 2.11 and 2.13)."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    return ring._templated_ring_attention, ring._templated_ring_attention_backward
