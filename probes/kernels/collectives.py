"""Collectives between the processes that torchrun started, one group at a time.

A group has `ranks` processes, `stride` apart, the first at rank 0. Every process takes part in
creating a group; those outside it wait at the end.
Bytes are those of the whole buffer that is gathered, reduced or scattered. For an all-to-all and a
send they are what one rank sends (`planner-cli collective`).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from planner.calibration.kernels import KernelShape
from planner.probes.kernels.base import Prepared, Unavailable, dtype_of
from planner.units import counted


def prepare(shape: KernelShape, device: torch.device) -> Prepared | None:
    """The collective; None outside the group. All processes call it in turn. Raises Unavailable."""
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
        run=NAMES[shape.name](whole, part, group), moved_bytes=float(count * dtype.itemsize)
    )


Build = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Callable[[], object]]


def _all_to_all(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _send(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    """From the first to the last of the group; whoever stands between them waits."""
    if dist.get_rank(group) == 0:
        return lambda: dist.send(whole, group=group, group_dst=group.size() - 1)
    return lambda: dist.recv(whole, group=group, group_src=0)


# their names since torch 2.13
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
NAMES: dict[str, Build] = {
    "all-gather": lambda whole, part, group: partial(GATHER, whole, part, group=group),
    "reduce-scatter": lambda whole, part, group: partial(SCATTER, part, whole, group=group),
    "all-reduce": lambda whole, _, group: partial(dist.all_reduce, whole, group=group),
    "all-to-all": _all_to_all,
    "send": _send,
}
