"""Differentiable collectives on plain tensors, each with the collective that its backward needs.

They use torch's functional operators, so that a checkpointing policy sees them by name and compiled
blocks can contain them.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group."""
    return _waited(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Parts of all ranks along `dim`, in rank order."""
    size = group.size()
    out = _waited(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return out if dim == 0 else torch.cat(out.chunk(size), dim=dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Own part along `dim` of the sum over the group."""
    size = group.size()
    x = x if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    return _waited(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name))


def all_to_all(
    x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends rows of `x` cut by `sent`, one part to each rank; returns `received` rows from each."""
    return _waited(_ops.all_to_all_single(x.contiguous(), received, sent, group.group_name))


def _waited(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _ops.wait_tensor(x))


def own_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The part of `x` along `dim` that belongs to the caller's rank."""
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


class RepeatedShard(AllGather):
    """FSDP2's gather of an emulated rank: its own shard in every rank's place, by two kernels.

    torch's fake process group copies once a rank: 512 launches a gather in a world of 512. Moving
    nothing would leave garbage to compute with, and a GPU draws another power on it.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the gathered parameters, from torch's allocator."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fills the output around the input, which FSDP2 has put into its own place already."""
        rows, rank = output_tensor.view(group.size(), -1), group.rank()
        for others in (rows[:rank], rows[rank + 1 :]):
            others.copy_(input_tensor)


def _differentiable(
    there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]
) -> type[torch.autograd.Function]:
    """`there` in the forward, and `back` on its gradient. Both take what `apply` is given."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *where: Any) -> torch.Tensor:
            ctx.where = where
            return there(x, *where)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return back(grad, *ctx.where), *(None for _ in ctx.where)

    return Pair


def _unchanged(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.view_as(x)


def _arrived(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)


# A compiled block must not get a tensor that torch returned before its collective ended: its
# gradient comes back as zeros (torch 2.13, AOTAutograd on AsyncCollectiveTensor).
Wait = _differentiable(_arrived, _unchanged)
Gather = _differentiable(all_gather, reduce_scatter)  # every rank uses the whole
Scatter = _differentiable(reduce_scatter, all_gather)
Copy = _differentiable(_unchanged, all_reduce)  # each rank holds a part of the gradient
Reduce = _differentiable(all_reduce, _unchanged)
Split = _differentiable(own_part, all_gather)  # own part of a replicated tensor
Join = _differentiable(all_gather, own_part)  # to a replicated tensor, whose gradient all share
Exchange = _differentiable(
    all_to_all, lambda grad, received, sent, group: all_to_all(grad, sent, received, group)
)
