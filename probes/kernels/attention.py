"""Causal attention with the kernel that trainers' order of preference picks.

Forward and backward are timed separately.
Flops: 2 x batch x heads x seq x (seq / 2) x (head_dim + v_head_dim), times 2.5 backward. Source:
    FlashAttention-2 (Dao 2023).
"""

import torch

from planner.calibration.kernels import BACKWARD, KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of, random
from planner.probes.reference.attention_kernels import fused


def prepare(shape: KernelShape, device: torch.device) -> Prepared:
    """Attention of one shape, or its backward. Raises Unavailable."""
    if shape["window"]:
        raise Unavailable("torch's scaled_dot_product_attention has no sliding window")
    dtype = dtype_of(shape.dtype)
    batch, heads, kv_heads, seq = shape["batch"], shape["heads"], shape["kv_heads"], shape["seq"]
    widths = (
        (heads, shape["head_dim"]),
        (kv_heads, shape["head_dim"]),
        (kv_heads, shape["v_head_dim"]),
    )
    q, k, v = (
        random(batch, count, seq, width, dtype=dtype, device=device).requires_grad_()
        for count, width in widths
    )
    elements = sum(count * width for count, width in (*widths, (heads, shape["v_head_dim"])))
    flops = 2.0 * batch * heads * seq * (seq / 2.0) * (shape["head_dim"] + shape["v_head_dim"])
    moved = float(dtype.itemsize * batch * seq * elements)

    def forward() -> torch.Tensor:
        return fused(q, k, v)

    if shape.kind == "attention":
        return Prepared(run=forward, flops=flops, moved_bytes=moved)
    out = forward()
    gradient = torch.randn_like(out)
    return Prepared(
        run=lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
        flops=BACKWARD * flops,
        moved_bytes=2.0 * moved,
    )
