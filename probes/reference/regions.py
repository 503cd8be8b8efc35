"""What a selectively checkpointed region must not look into: sharding hooks, and composed kernels
that a GPU runs as one operator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

Tensors = tuple[torch.Tensor, ...]


class Region:
    """One checkpointed region: results of composed kernels, kept in forward and handed out again in
    recomputation.
    """

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
    """The result of `compute`, which a selective-op region keeps as a GPU's region keeps its
    attention operator's output.
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
    """Makes a pair of torch's selective modes a region that this module can hide things from."""
    if forward.__class__ is _CachingTorchDispatchMode:
        region = Region()
        for mode, kind in ((forward, _Forward), (again, _Again)):
            mode.__class__ = kind
            vars(mode)["region"] = region


def hide_hooks(module: nn.Module) -> None:
    """Call after `fully_shard` on a module inside a layer. Its gathers happen at other times in
    forward than in recomputation, and torch 2.13's selective policy demands the same operators in
    both.
    """

    def enter(*_: Any) -> None:
        _State.hidden = True

    def leave(*_: Any) -> None:
        _State.hidden = False

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_pre_hook(leave)
    module.register_forward_hook(enter, prepend=True)
    module.register_forward_hook(leave)


class _Forward(_CachingTorchDispatchMode):
    region: Region

    def __enter__(self) -> Any:
        self.before, _State.region = _State.region, self.region
        self.region.again = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _State.region = self.before
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            func(*args, **(kwargs or {}))
            if _State.hidden
            else super().__torch_dispatch__(func, types, args, kwargs)
        )


class _Again(_CachedTorchDispatchMode):
    region: Region

    def __enter__(self) -> Any:
        self.before, _State.region = _State.region, self.region
        self.region.again = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _State.region, _State.hidden = self.before, False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            func(*args, **(kwargs or {}))
            if _State.hidden
            else super().__torch_dispatch__(func, types, args, kwargs)
        )
