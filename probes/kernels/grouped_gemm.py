"""Grouped matrix product of all experts in one kernel: `groups` times (m, k) by (k, n).

TorchTitan's grouped experts run it so. All groups have equally many rows, which is nearly true of
random routing. Source: torchtitan 0.2.2 models/moe/moe.py (torch._grouped_mm, bf16).
"""

import torch

from planner.calibration.kernels import KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of, random


def prepare(shape: KernelShape, device: torch.device) -> Prepared:
    """The grouped product of one shape. Raises Unavailable."""
    groups, m, n, k = shape["groups"], shape["m"], shape["n"], shape["k"]
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        raise Unavailable(f"torch {torch.__version__} has no grouped product")
    dtype = dtype_of(shape.dtype)
    if dtype != torch.bfloat16:
        raise Unavailable("torch's grouped product takes bfloat16 alone")
    rows, weights = (
        random(groups * m, k, dtype=dtype, device=device),
        random(groups, k, n, dtype=dtype, device=device),
    )
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * m
    moved = float(dtype.itemsize * groups * (m * k + k * n + m * n))
    return Prepared(
        run=lambda: grouped(rows, weights, offs=ends),
        flops=2.0 * groups * m * n * k,
        moved_bytes=moved,
    )
