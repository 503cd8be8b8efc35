"""What work is: operations over named dimensions. Nothing here knows a model, a layout or a GPU.

A dimension is a name ("tokens", "heads", "ffn"); its local size on a rank comes from `axes.local_sizes`.
Op = Gemm | Attention | Elementwise | Collective, in the order in which a layer runs them.
"""

from dataclasses import dataclass

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that autograd may keep: its elements are the product of `dims`.

    width: "compute" (the parameter dtype), "linear" (what a linear layer keeps of its input, by precision recipe), "expert" (what a
        grouped one keeps), "fp32" or "byte".  eager_only: kept by eager autograd, recomputed inside a fused or compiled kernel.
    """

    name: str
    dims: Dims
    width: str = "compute"
    eager_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """rows x depth times depth x cols, `batch` times (grouped experts). Backward: one for the input, one for the weight.

    role: "linear" (precision recipe applies), "expert" (grouped), "router" or "head" (kept in high precision).
    """

    name: str
    rows: Dims
    cols: Dims
    depth: Dims
    saves: tuple[Tensor, ...]
    output: Tensor
    batch: Dims = ()
    role: str = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal softmax attention of one layer. window: tokens each query sees, 0 for all before it.

    saves: q, k, v, and output with its log-sum-exp (flash) or the probabilities (unfused).
    """

    name: str
    window: int
    saves: tuple[Tensor, ...]
    output: Tensor
    statistics: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """A memory-bound operation on `dims` elements: elements read and written per element, eager and fused, both directions.

    Kernel counts are eager; fused kernels count one per op and direction.
    """

    name: str
    dims: Dims
    forward_moves: float
    backward_moves: float
    fused_forward_moves: float
    fused_backward_moves: float
    kernels: int
    saves: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    width: str = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A place where an axis may have to communicate; `axes.collectives_at` says which collective, if any.

    site: a key of `axes.SITES`.  tensor: the full (gathered or reduced, or sent) buffer on one rank.
    linear: what is all-gathered here (or, backward, its gradient) feeds linear layers, whose precision it may have.
    """

    name: str
    site: str
    tensor: Tensor
    linear: bool = True


Op = Gemm | Attention | Elementwise | Collective
