"""The kernels that can be timed by themselves, one line each below.

A function turns a `planner.calibration.kernels.KernelShape` into something to time. It is imported
when a kernel of its kind is timed, so that this list needs no torch.
"""

from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from planner.calibration import kernels as shapes
from planner.probes.kernels.base import Prepared

if TYPE_CHECKING:
    import torch

    Prepare = Callable[[shapes.KernelShape, torch.device], Prepared | None]

KERNELS: "dict[str, str | Prepare]" = {}


def register(
    kind: str, prepare: "str | Prepare", *, sizes: Iterable[str] = (), names: Iterable[str] = ()
) -> None:
    """Adds a kind of kernel.

    prepare: the function that prepares it on a device, or `module:function` of it. It raises
        `planner.probes.kernels.base.Unavailable` if torch or the device has no such kernel.
    sizes, names: for a kind that the cost model does not know (`planner.calibration.kernels`).
    """
    if kind not in shapes.SIZES:
        shapes.declare(kind, sizes, names)
    KERNELS[kind] = prepare


register("gemm", "planner.probes.kernels.compute:gemm")
register("grouped-gemm", "planner.probes.kernels.compute:grouped_gemm")
register("attention", "planner.probes.kernels.compute:attention")
register("attention-backward", "planner.probes.kernels.compute:attention")
register("memory", "planner.probes.kernels.compute:memory")
register("optimizer", "planner.probes.kernels.compute:optimizer")
register("collective", "planner.probes.kernels.collectives:prepare")


def prepared(shape: shapes.KernelShape, device: "torch.device") -> Prepared | None:
    """The kernel of a shape; None on a rank that takes no part. Raises Unavailable."""
    found = KERNELS[shape.kind]
    prepare: Prepare = resolve_name(found) if isinstance(found, str) else found
    return prepare(shape, device)
