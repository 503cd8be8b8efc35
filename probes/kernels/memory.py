"""Memory-bound kernels on a tensor of a given size: a copy, and a layer's elementwise kernels.

The copy defines the memory rate that the others are compared with.
Bytes moved are those that the kernel cannot avoid: each operand once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from planner.calibration.kernels import KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of, random

# row width for kernels that work by rows; judgement: rates hardly depend on it above a thousand
HIDDEN = 4096


def prepare(shape: KernelShape, device: torch.device) -> Prepared:
    """One memory-bound kernel. Raises Unavailable."""
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
