"""The kernels that can be timed by themselves, one line each below.

A function turns a `planner.calibration.kernels.KernelShape` into something to time.
"""

from collections.abc import Callable, Iterable

import torch

from planner.calibration import kernels as shapes
from planner.probes.kernels import collectives, compute
from planner.probes.kernels.base import Prepared

Prepare = Callable[[shapes.KernelShape, torch.device], Prepared | None]
KERNELS: dict[str, Prepare] = {}


def register(
    kind: str, prepare: Prepare, *, sizes: Iterable[str] = (), names: Iterable[str] = ()
) -> None:
    """Adds a kind of kernel.

    prepare: prepares it with its operands on a device; None on a rank that takes no part. It raises
        `planner.probes.kernels.base.Unavailable` if torch or the device has no such kernel.
    sizes, names: for a kind that the cost model does not know (`planner.calibration.kernels`).
    """
    if kind not in shapes.SIZES:
        shapes.declare(kind, sizes, names)
    KERNELS[kind] = prepare


register("gemm", compute.gemm)
register("grouped-gemm", compute.grouped_gemm)
register("attention", compute.attention)
register("attention-backward", compute.attention)
register("memory", compute.memory)
register("optimizer", compute.optimizer)
register("collective", collectives.prepare)
