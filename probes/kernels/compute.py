"""Kernels of one device: products, attention, memory-bound kernels, the optimizer's step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from planner.calibration.kernels import BACKWARD, UPDATE_BYTES, KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of, random
from planner.probes.reference.attention_kernels import fused

ROWWISE = {"float8-rowwise", "float8-rowwise-gw-hp"}
FLOAT8 = {"float8-tensorwise", "float8-delayed", *ROWWISE}
MULTIPLE = 16  # sizes that a float8 product needs (aten/src/ATen/native/cuda/Blas.cpp)
# row width for kernels that work by rows; judgement: rates hardly depend on it above a thousand
HIDDEN = 4096
# a real model's parameters are many tensors, which a fused step takes in one launch
TENSORS = 64


def gemm(shape: KernelShape, device: torch.device) -> Prepared:
    """A product as linear layers run it: (m, k) by (n, k) transposed. Raises Unavailable.

    In 16 bits, float32 (TF32 if the GPU has it) or float8, through the torch._scaled_mm that
    torchao's linear layers call. Source: torchao 0.18 float8/float8_ops.py.
    """
    m, n, k = shape["m"], shape["n"], shape["k"]
    flops = 2.0 * m * n * k
    if shape.dtype in FLOAT8:
        return Prepared(
            run=_float8(m, n, k, shape.dtype, device),
            flops=flops,
            moved_bytes=float(m * k + k * n + 2 * m * n),
        )
    dtype = dtype_of(shape.dtype)
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("high")
    left, right = random(m, k, dtype=dtype, device=device), random(n, k, dtype=dtype, device=device)
    return Prepared(
        run=lambda: left @ right.t(),
        flops=flops,
        moved_bytes=float(dtype.itemsize * (m * k + k * n + m * n)),
    )


def _float8(m: int, n: int, k: int, recipe: str, device: torch.device) -> Callable[[], object]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise Unavailable("this GPU has no float8 products (compute capability 8.9 or later)")
    if n % MULTIPLE or k % MULTIPLE:
        raise Unavailable(f"a float8 product needs multiples of {MULTIPLE}, not n {n} and k {k}")
    left = random(m, k, dtype=torch.float8_e4m3fn, device=device)
    right = random(n, k, dtype=torch.float8_e4m3fn, device=device)
    sizes: tuple[tuple[int, ...], ...] = ((m, 1), (1, n)) if recipe in ROWWISE else ((), ())
    scale_a, scale_b = (torch.ones(size, device=device) for size in sizes)
    how: Any = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.bfloat16}
    return lambda: torch._scaled_mm(left, right.t(), **how, use_fast_accum=True)


def grouped_gemm(shape: KernelShape, device: torch.device) -> Prepared:
    """The products of all experts in one kernel: `groups` times (m, k) by (k, n).

    All groups have equally many rows, which is nearly true of random routing. Raises Unavailable.
    Source: torchtitan 0.2.2 models/moe/moe.py (torch._grouped_mm, bf16).
    """
    groups, m, n, k = shape["groups"], shape["m"], shape["n"], shape["k"]
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        raise Unavailable(f"torch {torch.__version__} has no grouped product")
    dtype = dtype_of(shape.dtype)
    if dtype != torch.bfloat16:
        raise Unavailable("torch's grouped product takes bfloat16 alone")
    rows = random(groups * m, k, dtype=dtype, device=device)
    weights = random(groups, k, n, dtype=dtype, device=device)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * m
    moved = float(dtype.itemsize * groups * (m * k + k * n + m * n))
    return Prepared(
        run=lambda: grouped(rows, weights, offs=ends),
        flops=2.0 * groups * m * n * k,
        moved_bytes=moved,
    )


def attention(shape: KernelShape, device: torch.device) -> Prepared:
    """Causal attention by the kernel that trainers prefer, or its backward. Raises Unavailable.

    Flops: 2 x batch x heads x seq x (seq / 2) x (head_dim + v_head_dim), times 2.5 backward.
    Source: FlashAttention-2 (Dao 2023).
    """
    if shape["window"]:
        raise Unavailable("torch's scaled_dot_product_attention has no sliding window")
    dtype = dtype_of(shape.dtype)
    batch, heads, kv_heads, seq = shape["batch"], shape["heads"], shape["kv_heads"], shape["seq"]
    width, v_width = shape["head_dim"], shape["v_head_dim"]
    widths = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    q, k, v = (
        random(batch, count, seq, width, dtype=dtype, device=device).requires_grad_()
        for count, width in widths
    )
    elements = sum(count * width for count, width in (*widths, (heads, v_width)))
    flops = 2.0 * batch * heads * seq * (seq / 2.0) * (width + v_width)
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


def memory(shape: KernelShape, device: torch.device) -> Prepared:
    """A copy, which defines the memory rate, or one of a layer's elementwise kernels.

    Bytes moved are those that it cannot avoid: each operand once. Raises Unavailable.
    """
    if shape.name not in NAMES:
        raise Unavailable(f"{shape.name} is none of {', '.join(NAMES)}")
    dtype = dtype_of(shape.dtype)
    width = min(HIDDEN, max(1, shape["bytes"] // dtype.itemsize))
    rows = max(1, shape["bytes"] // (dtype.itemsize * width))
    x = random(rows, width, dtype=dtype, device=device)
    run, moves = NAMES[shape.name](x)
    return Prepared(run=run, moved_bytes=float(moves * x.numel() * dtype.itemsize))


Kernel = tuple[Callable[[], object], float]


def _copy(x: torch.Tensor) -> Kernel:
    y = torch.empty_like(x)
    return lambda: y.copy_(x), 2.0


def _add(x: torch.Tensor) -> Kernel:
    y = x.clone()
    return lambda: x + y, 3.0


def _swiglu(x: torch.Tensor) -> Kernel:
    y = x.clone()
    return lambda: F.silu(x) * y, 5.0


def _rmsnorm(x: torch.Tensor) -> Kernel:
    weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return lambda: F.rms_norm(x, (x.shape[-1],), weight), 2.0


def _cross_entropy(x: torch.Tensor) -> Kernel:
    """Forward and backward of the loss in fp32, as TorchTitan computes it.

    Bytes by 2-byte element: upcast (6), log-softmax (8), its gradient (12 to 16), downcast (6).
    """
    logits = x.requires_grad_()
    targets = torch.randint(0, x.shape[-1], (x.shape[0],), device=x.device)
    return lambda: torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits), 18.0


NAMES: dict[str, Callable[[torch.Tensor], Kernel]] = {
    "copy": _copy,
    "add": _add,
    "swiglu": _swiglu,
    "rmsnorm": _rmsnorm,
    "cross-entropy": _cross_entropy,
}


def optimizer(shape: KernelShape, device: torch.device) -> Prepared:
    """A step of fused AdamW over `parameters` fp32 masters, as TorchTitan's. Raises Unavailable."""
    if shape.name != "adamw":
        raise Unavailable(f"torch has no fused {shape.name}")
    each = max(1, shape["parameters"] // TENSORS)
    parameters = [torch.zeros(each, device=device, requires_grad=True) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    adamw = torch.optim.AdamW(parameters, fused=True)
    return Prepared(run=adamw.step, moved_bytes=UPDATE_BYTES * each * TENSORS)
