"""Collectives between the processes that torchrun started, one group at a time.

A group has `ranks` processes, `stride` apart, the first at rank 0. Every process takes part in
creating a group; those outside it wait at the end.
Bytes are those of the whole buffer that is gathered, reduced or scattered. For an all-to-all and a
send they are what one rank sends (`planner-cli collective`).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from planner.calibration.kernels import KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of
from planner.units import counted


def prepare(shape: KernelShape, device: torch.device) -> Prepared | None:
    """The collective; None on a rank outside the group.

    All processes must call it, in the same order. Raises Unavailable on all of them.
    """
    if not dist.is_initialized():
        raise Unavailable(
            f"{shape.name} between {shape['ranks']} ranks needs torchrun with "
            f"{counted(shape.num_gpus, 'process')}"
        )
    if shape.num_gpus > dist.get_world_size():
        raise Unavailable(
            f"{shape['ranks']} ranks {shape['stride']} apart need "
            f"{counted(shape.num_gpus, 'process')}, not {dist.get_world_size()}"
        )
    if shape.name not in NAMES:
        raise Unavailable(f"{shape.name} is none of {', '.join(NAMES)}")
    members = [shape["stride"] * place for place in range(shape["ranks"])]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    dtype = dtype_of(shape.dtype)
    count = max(1, shape["bytes"] // (dtype.itemsize * len(members))) * len(members)
    whole = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(count // len(members), dtype=dtype, device=device)
    return Prepared(
        run=NAMES[shape.name](whole, part, members, group),
        moved_bytes=float(count * dtype.itemsize),
    )


Group = dist.ProcessGroup
Build = Callable[[torch.Tensor, torch.Tensor, list[int], Group], Callable[[], object]]


def _all_gather(
    whole: torch.Tensor, part: torch.Tensor, members: list[int], group: Group
) -> Callable[[], object]:
    # its name since torch 2.13
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return lambda: gather(whole, part, group=group)


def _reduce_scatter(
    whole: torch.Tensor, part: torch.Tensor, members: list[int], group: Group
) -> Callable[[], object]:
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return lambda: scatter(part, whole, group=group)


def _all_reduce(
    whole: torch.Tensor, part: torch.Tensor, members: list[int], group: Group
) -> Callable[[], object]:
    return lambda: dist.all_reduce(whole, group=group)


def _all_to_all(
    whole: torch.Tensor, part: torch.Tensor, members: list[int], group: Group
) -> Callable[[], object]:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _send(
    whole: torch.Tensor, part: torch.Tensor, members: list[int], group: Group
) -> Callable[[], object]:
    first, last = members[0], members[-1]
    if dist.get_rank() == first:
        return lambda: dist.send(whole, last, group=group)
    return lambda: dist.recv(whole, first, group=group)


NAMES: dict[str, Build] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "send": _send,
}
