"""One step of fused AdamW on fp32 masters over a rank's parameters.

TorchTitan's optimizer.implementation selects the same kernel.
"""

import torch

from planner.calibration.kernels import UPDATE_BYTES, KernelShape
from planner.probes.kernels.base import Prepared, Unavailable

# a real model's parameters are many tensors, which a fused step takes in one launch
TENSORS = 64


def prepare(shape: KernelShape, device: torch.device) -> Prepared:
    """The step over `parameters` elements. Raises Unavailable."""
    if shape.name != "adamw":
        raise Unavailable(f"torch has no fused {shape.name}")
    each = max(1, shape["parameters"] // TENSORS)
    parameters = [torch.zeros(each, device=device, requires_grad=True) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return Prepared(run=optimizer.step, moved_bytes=UPDATE_BYTES * each * TENSORS)
