"""Matrix products as linear layers run them: (m, k) by (n, k) transposed.

In 16 bits, float32 (TF32 if the GPU has it) or float8. Float8 runs through torch._scaled_mm, which
torchao's linear layers call. Source: torchao 0.18 float8/float8_ops.py.
"""

from collections.abc import Callable

import torch

from planner.calibration.kernels import KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of, random

ROWWISE = {"float8-rowwise", "float8-rowwise-gw-hp"}
FLOAT8 = {"float8-tensorwise", "float8-delayed", *ROWWISE}
MULTIPLE = 16  # sizes that a float8 product needs (aten/src/ATen/native/cuda/Blas.cpp)


def prepare(shape: KernelShape, device: torch.device) -> Prepared:
    """The product of one shape. Raises Unavailable."""
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
    rowwise = recipe in ROWWISE
    scales = (
        (torch.ones(m, 1, device=device), torch.ones(1, n, device=device))
        if rowwise
        else (torch.ones((), device=device), torch.ones((), device=device))
    )

    def run() -> object:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=scales[0],
            scale_b=scales[1],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return run
