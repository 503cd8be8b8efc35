"""Regions that selective checkpointing must not see.

That is sharding hooks, and composed kernels that a GPU runs as one operator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

Tensors = tuple[torch.Tensor, ...]


class Region:
    """One checkpointed region: saves results of composed kernels in forward for recomputation."""

    def __init__(self) -> None:
        self.kept: list[Tensors] = []
        self.again = False


class _State:
    hidden = False
    region: Region | None = None


@contextmanager
def _hidden() -> Iterator[None]:
    before, _State.hidden = _State.hidden, True
    try:
        yield
    finally:
        _State.hidden = before


def as_one_kept_operator(compute: Callable[[], Tensors]) -> Tensors:
    """The result of `compute`, saved by a selective-op region as one operator.

    A GPU's region saves its attention operator's output in the same way.
    """
    region = _State.region
    if region is None:
        return compute()
    if region.again:
        return region.kept.pop(0)
    with _hidden():
        result = compute()
    region.kept.append(tuple(tensor.detach() for tensor in result))
    return result


def adopt(forward: Any, again: Any) -> None:
    """Makes a pair of torch's selective modes a region from which this module can hide things."""
    if forward.__class__ is _CachingTorchDispatchMode:
        region = Region()
        for mode, kind in ((forward, _Forward), (again, _Again)):
            mode.__class__ = kind
            vars(mode)["region"] = region


def hide_hooks(module: nn.Module) -> None:
    """Hides a layer's FSDP hooks from the region. Call it after `fully_shard` on a module inside.

    Its gathers happen at other times in forward than in recomputation, and torch 2.13's selective
    policy requires the same operators in both.
    """

    def enter(*_: Any) -> None:
        _State.hidden = True

    def leave(*_: Any) -> None:
        _State.hidden = False

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_pre_hook(leave)
    module.register_forward_hook(enter, prepend=True)
    module.register_forward_hook(leave)


class _InRegion:
    """A selective mode of torch that runs inside a region."""

    region: Region
    again: bool

    def __enter__(self) -> Any:
        self.before, _State.region = _State.region, self.region
        self.region.again = self.again
        return super().__enter__()  # type: ignore[misc]

    def __exit__(self, *error: Any) -> None:
        _State.region, _State.hidden = self.before, _State.hidden and not self.again
        super().__exit__(*error)  # type: ignore[misc]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _State.hidden:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]


class _Forward(_InRegion, _CachingTorchDispatchMode):
    again = False


class _Again(_InRegion, _CachedTorchDispatchMode):
    again = True
