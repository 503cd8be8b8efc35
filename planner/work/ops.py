"""What work is: operations over named dimensions. Nothing here knows a model, a layout or a GPU.

A dimension is a name ("tokens", "heads", "ffn"); its local size on a rank comes from
`axes.local_sizes`.
Op = Gemm | Attention | Elementwise | Collective, in the order in which a layer runs them.
"""

from dataclasses import dataclass

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that autograd may keep: its elements are the product of `dims`.

    width: "compute" (the parameter dtype), "linear" (what a linear layer keeps of its input, by
        precision recipe), "expert" (what a grouped one keeps), "weight" (a gradient that waits for
        the layer's reduction), "fp32", "index" (int64) or "byte".
    eager_only: kept by eager autograd, recomputed inside a fused or compiled kernel.  fused_only:
        the reverse.
    """

    name: str
    dims: Dims
    width: str = "compute"
    eager_only: bool = False
    fused_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """rows x depth times depth x cols, `batch` times (grouped experts). Backward: one for the
    input, one for the weight.

    reads: activations that get a gradient in backward (of every operation), as `work.liveness`
        follows them.
    role: "linear" (precision recipe applies), "expert" (grouped), "router" or "head" (kept in high
        precision).
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
    """Causal softmax attention of one layer. window: tokens each query sees, 0 for all before it.

    saves: q, k, v, and output with its log-sum-exp (flash) or the probabilities (unfused).
    workspace: buffers of the backward kernel.
    """

    name: str
    window: int
    saves: tuple[Tensor, ...]
    output: Tensor
    statistics: Tensor
    reads: tuple[Tensor, ...] = ()
    workspace: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """A memory-bound operation on `dims` elements: elements read and written per element, eager and
    fused, both directions.

    kernels: eager, forward; fused kernels count one per op and direction.  singles: of them, those
        that a trainer of fused modules still launches one by one, in each direction.
    waits: times forward makes the host wait for the device, where tokens are exchanged or a
        trainer's kernels need sizes on the host.
    makes: what it returns where that is not `output` alone.  shares: the gradient passes through it
        without a copy (an addition).
    workspace: gradients between its own eager kernels.  casts: these replace the incoming gradient,
        which is free by then.
    forward_workspace: what recomputation holds when it comes here, beside all that it keeps.
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
    reads: tuple[Tensor, ...] = ()
    makes: tuple[Tensor, ...] = ()
    shares: bool = False
    workspace: tuple[Tensor, ...] = ()
    casts: bool = False
    singles: int = 0
    waits: int = 0
    forward_workspace: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A place where an axis may have to communicate; `axes.collectives_at` says which collective,
    if any.

    site: a key of `axes.SITES`.  tensor: the full (gathered or reduced, or sent) buffer on one
        rank.
    linear: what is all-gathered here (or, backward, its gradient) feeds linear layers, whose
        precision it may have.
    exchanged: the second buffer that exists while it runs backward, empty where nothing
        communicates.
    """

    name: str
    site: str
    tensor: Tensor
    linear: bool = True
    reads: tuple[Tensor, ...] = ()
    makes: tuple[Tensor, ...] = ()
    exchanged: tuple[Tensor, ...] = ()


Op = Gemm | Attention | Elementwise | Collective
