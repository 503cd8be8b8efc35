"""Work: operations over named dimensions. Nothing here knows a model, a layout or a GPU.

A dimension is a name ("tokens", "heads", "ffn"); `axes.local_sizes` gives its size on a rank.
Op = Gemm | Attention | Elementwise | Collective, in the order in which a layer runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec, cast

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that autograd may save: its elements are the product of `dims`.

    width: the format of an element.
        "compute": the parameter dtype.
        "linear": what a linear layer saves of its input, by precision recipe.
        "expert": what a grouped GEMM saves of its input.
        "weight": a gradient that waits for the layer's reduction.
        "fp32", "index" (int64), "byte".
    eager_only: saved by eager autograd, recomputed inside a fused or compiled kernel.
    fused_only: the reverse.
    """

    name: str
    dims: Dims
    width: str = "compute"
    eager_only: bool = False
    fused_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """rows x depth times depth x cols, `batch` times (grouped experts).

    The backward has two: one for the input, one for the weight.
    reads: activations that get a gradient in backward (for every kind of operation), as
        `work.liveness` follows them.
    role: "linear" (the precision recipe applies), "expert" (grouped), "router" or "head" (left in
        high precision).
    """

    name: str
    rows: Dims
    cols: Dims
    depth: Dims
    saves: tuple[Tensor, ...]
    output: Tensor
    reads: tuple[Tensor, ...] = ()
    batch: Dims = ()
    role: str = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal softmax attention of one layer.

    window: tokens that each query sees, 0 for all before it.
    compressed: tokens of an entry that queries see besides, 0 for none; chosen: entries of each
        query, 0 for all before it.
    heads, widths: its query heads, and the widths of its keys and values.
    saves: q, k, v, and the output with its log-sum-exp (flash) or the probabilities (unfused).
    workspace: buffers of the backward kernel.
    """

    name: str
    window: int
    saves: tuple[Tensor, ...]
    output: Tensor
    statistics: Tensor
    reads: tuple[Tensor, ...] = ()
    workspace: tuple[Tensor, ...] = ()
    compressed: int = 0
    chosen: int = 0
    heads: str = "heads"
    widths: tuple[str, str] = ("qk_dim", "v_dim")


class Moves(NamedTuple):
    """Elements that kernels read and write per element: eager ones, then a fused one."""

    forward: float
    backward: float
    fused_forward: float
    fused_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """A memory-bound operation on `dims` elements.

    kernels: eager ones in forward. Fused kernels count as one per operation and direction.
    singles: of them, those that a trainer of fused modules still launches one by one, in each
        direction.
    waits: times that the forward makes the host wait for the device, where tokens are exchanged or
        a trainer's kernels need sizes on the host.
    compiles: False where torch.compile leaves it eager.
    makes: what it returns.
    shares: the gradient passes through it without a copy (an addition).
    workspace: gradients between its own eager kernels.
    casts: these replace the incoming gradient, which is free by then.
    forward_workspace: what recomputation holds when it comes here, besides all that it saves.
    forward_results: what it holds besides where it runs on to the layer's end.
    products, backward_products: small matrix products that its kernels make, each by the dimensions
        whose product are its multiply-adds.
    as_attention: their tiles are as large as in fused attention, and as fast.
    each: dimensions along which `singles` are launched one by one.
    """

    name: str
    dims: Dims
    moves: Moves
    kernels: int
    saves: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    width: str = "compute"
    reads: tuple[Tensor, ...] = ()
    makes: tuple[Tensor, ...] = ()
    shares: bool = False
    workspace: tuple[Tensor, ...] = ()
    casts: bool = False
    singles: int = 0
    waits: int = 0
    compiles: bool = True
    forward_workspace: tuple[Tensor, ...] = ()
    forward_results: tuple[Tensor, ...] = ()
    products: tuple[Dims, ...] = ()
    backward_products: tuple[Dims, ...] = ()
    as_attention: bool = False
    each: Dims = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A place where an axis may have to communicate; `axes.SITES` says which collective runs there.

    site: a key of `axes.SITES`.
    tensor: the full (gathered, reduced or sent) buffer on one rank.
    linear: what is all-gathered here (or its gradient in backward) feeds linear layers, whose
        precision it may have.
    exchanged: the second buffer that exists while it runs backward, if anything communicates.
    """

    name: str
    site: str
    tensor: Tensor
    linear: bool = True
    reads: tuple[Tensor, ...] = ()
    makes: tuple[Tensor, ...] = ()
    exchanged: tuple[Tensor, ...] = ()


Op = Gemm | Attention | Elementwise | Collective


P = ParamSpec("P")


class Ops(tuple[Op, ...]):
    """Operations in the order in which they run, hashed once.

    Many functions remember what they made of a layer's operations, and ask for their hash each
    time.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[type["Ops"], tuple[tuple[Op, ...]]]:
        return Ops, (tuple(self),)  # another process hashes strings otherwise


def remembered(make: Callable[P, tuple[Op, ...]]) -> Callable[P, Ops]:
    """A function that makes the operations of a layer, embedding or head once for each argument."""

    @lru_cache(maxsize=256)
    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Ops:
        return Ops(make(*args, **kwargs))

    return cast("Callable[P, Ops]", made)
