"""Differentiable collectives on plain tensors, each with the collective that its backward needs.

They use torch's functional operators, so that a checkpointing policy sees them by name and compiled
blocks can contain them.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group."""
    return cast(
        torch.Tensor, _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
    )


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Parts of all ranks along `dim`, in rank order."""
    size = group.size()
    out = cast(
        torch.Tensor,
        _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name)),
    )
    return out if dim == 0 else torch.cat(out.chunk(size), dim=dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Own part along `dim` of the sum over the group."""
    size = group.size()
    x = x if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    return cast(
        torch.Tensor,
        _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)),
    )


def all_to_all(
    x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends rows of `x` cut by `sent`, one part to each rank; returns `received` rows from each."""
    return cast(
        torch.Tensor,
        _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group.group_name)),
    )


def own_part(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The part of `x` along `dim` that belongs to the caller's rank."""
    return x.chunk(group.size(), dim=dim)[group.rank()]


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


class Wait(torch.autograd.Function):
    """Waits for a collective whose result torch returned early.

    A compiled block must not get such a tensor: its gradient comes back as zeros (torch 2.13,
    AOTAutograd on AsyncCollectiveTensor).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Gather(torch.autograd.Function):
    """all-gather forward; backward reduce-scatters, because every rank uses the whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class Copy(torch.autograd.Function):
    """Identity forward; backward sums over ranks that each hold a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Split(torch.autograd.Function):
    """Own part of a replicated tensor forward; backward gathers the parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class Join(torch.autograd.Function):
    """All parts forward, as a replicated tensor; backward takes the rank's part of the gradient.

    That gradient is equal on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(grad, ctx.group, ctx.dim).contiguous(), None, None


class Exchange(torch.autograd.Function):
    """all-to-all of rows; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None
