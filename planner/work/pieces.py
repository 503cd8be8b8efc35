"""Pieces that attention and feed-forward blocks share.

They are linear layers, norms, the borders of tensor parallelism, and a trainer's own code.
"""

from dataclasses import dataclass, replace

from planner.specs.model import ModelSpec
from planner.work.ops import Collective, Dims, Elementwise, Gemm, Moves, Tensor

HIDDEN: Dims = ("tokens", "hidden")
HIDDEN_SP: Dims = ("tokens_sp", "hidden")
ATTENTION_IN = Tensor("attention_in", HIDDEN)
GATHERED: Dims = ("tokens_gathered", "hidden")
SCATTERED = Tensor("scattered", ("tokens_scattered", "hidden"))

# (kernels, moves forward, moves backward) of an eager norm. One kernel: native_layer_norm and
# _fused_rms_norm (its backward reads the input twice). A chain: cast, square and mean, scale, cast
# back, weight, with four of the seven tensors in fp32; backward twice each of them, and the sum of
# two gradients. Source: aten/src/ATen/native/layer_norm.cpp (rms_norm_composite),
# tools/autograd/derivatives.yaml.
ONE_KERNEL_NORM, COMPOSITE_NORM = (1, 2.0, 4.0), (8, 14.0, 38.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """How a trainer's own code differs in what autograd saves.

    composite_norm: eager RMSNorm is a chain of kernels that saves two fp32 tensors instead of its
        input.
    repeats_kv: keys and values are copied to all query heads before attention (repeat_kv).
    scores_first: routed tokens are multiplied by their scores in fp32 before the experts.
    scores_inside: their activation is multiplied by them, in one kernel.
    chunks_loss: head and loss run on LOSS_CHUNKS parts of the tokens, one after the other.
    expert_path: whose kernels permute tokens, a key of `expert_path.PATHS`.
    compiles_exchange: torch.compile covers what runs between the router and the experts.
    drops_residual: the model's dropout behind attention and feed-forward runs.
    own_mixers: recurrent mixers are Megatron-Core's, which copy their kernels' inputs.
    """

    composite_norm: bool = False
    repeats_kv: bool = False
    scores_first: bool = False
    scores_inside: bool = False
    chunks_loss: bool = False
    expert_path: str = "torch"
    compiles_exchange: bool = True
    drops_residual: bool = False
    own_mixers: bool = False

    @property
    def saves_outputs(self) -> bool:
        """Whether autograd saves the experts' outputs, for their product with the scores."""
        return not (self.scores_first or self.scores_inside)


PLAIN = Code()
LOSS_CHUNKS = 8  # torchtitan 0.3.0 components/loss.py (ChunkedLossWrapper.Config.num_chunks)


def norm_saves(model: ModelSpec, name: str, source: Tensor, composite: bool) -> tuple[Tensor, ...]:
    """Bytes saved by one norm: input, a reciprocal deviation a row, for LayerNorm also a mean.

    Source: tools/autograd/derivatives.yaml (_fused_rms_norm, native_layer_norm);
    aten/src/ATen/native/layer_norm.cpp, rms_norm_composite: the fp32 copy of the input (for its
    square and the product), and the fp32 product before the weight.
    """
    rows = source.dims[:-1]
    statistics = Tensor(f"{name}_rstd", rows, width="fp32")
    if model.norm == "layernorm":
        return source, statistics, Tensor(f"{name}_mean", rows, width="fp32")
    if composite:
        kept = tuple(
            Tensor(f"{name}_{part}", source.dims, width="fp32", eager_only=True)
            for part in ("upcast", "scaled")
        )
        return Tensor(source.name, source.dims, fused_only=True), *kept, statistics
    return source, statistics


def upcast(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor that eager code saves in fp32, and a fused kernel as it is."""
    copy = replace(tensor, name=f"{tensor.name}_fp32", width="fp32", eager_only=True)
    return copy, replace(tensor, fused_only=True)


def norm(model: ModelSpec, name: str, source: Tensor, code: Code) -> Elementwise:
    """A norm; of the residual stream and with norms behind the branches, one of two."""
    kernels, forward, backward = (
        COMPOSITE_NORM if code.composite_norm and model.norm != "layernorm" else ONE_KERNEL_NORM
    )
    sandwich = model.norms_per_layer / 2 if name in ("attention_norm", "mlp_norm") else 1.0
    output = Tensor(f"{name}_out", source.dims)
    return Elementwise(
        name=name,
        dims=source.dims,
        kernels=max(1, round(kernels * sandwich)),
        saves=norm_saves(model, name, source, code.composite_norm),
        moves=Moves(forward * sandwich, backward * sandwich, 2.0 * sandwich, 4.0 * sandwich),
        output=output,
        reads=(source,),
        makes=(output,),
        workspace=(Tensor("chain", source.dims, width="fp32", eager_only=True),) * 4
        if code.composite_norm
        else (),
        casts=code.composite_norm,
    )


def tp_exit(name: str, full: str, source: str, output: Tensor) -> Collective:
    """Partial sums of the TP ranks become the residual stream again."""
    return Collective(
        name=name,
        site="tp_exit",
        tensor=Tensor(full, HIDDEN),
        reads=(Tensor(source, GATHERED),),
        makes=(output,),
    )


def across_heads(name: str, tensor: Tensor) -> Collective:
    """Context parallelism's all-to-all: some tokens of all heads for all tokens of some heads."""
    return Collective(name=name, site="cp_heads", tensor=tensor)


def product(
    name: str,
    rows: Dims,
    depth: Dims,
    cols: Dims,
    source: Tensor,
    output: Tensor | None = None,
    *,
    saves: tuple[Tensor, ...] = (),
    batch: Dims = (),
    role: str = "linear",
) -> Gemm:
    """A tensor times weights; it saves the tensor unless other `saves` are given.

    output: one of rows x cols unless given.
    """
    return Gemm(
        name=name,
        rows=rows,
        cols=cols,
        depth=depth,
        saves=saves or (source,),
        output=output or Tensor(f"{name}_out", (*rows, *cols)),
        reads=(source,),
        batch=batch,
        role=role,
    )


def projection(name: str, cols: Dims, depth: Dims, source: Tensor, output: str = "") -> Gemm:
    """A column-parallel linear layer.

    It saves its input as `tokens_saved` rows, the number that the trainer's code saves.
    """
    dims: Dims = ("tokens_saved", *source.dims[1:]) if source.dims == HIDDEN else source.dims
    made = Tensor(output or f"{name}_out", ("tokens", *cols))
    saves = (Tensor(source.name, dims, width="linear"),)
    return product(name, ("tokens",), depth, cols, source, made, saves=saves)


def output_projection(name: str, depth: Dims, source: Tensor) -> Gemm:
    """A row-parallel linear layer back to the hidden size."""
    read = Tensor(source.name, source.dims)
    return product(name, ("tokens",), depth, ("hidden",), read, saves=(source,))


def embedding(
    name: str, made: str, *makes: Tensor, dims: Dims = HIDDEN
) -> tuple[Elementwise, Collective]:
    """Gathered rows of the token table, and their sum over the ranks of TP that hold some each."""
    return (
        Elementwise(name=name, dims=dims, kernels=2, moves=Moves(2.0, 4.0, 2.0, 4.0)),
        Collective(
            name=f"{name}_sum", site="tp_exit", tensor=Tensor(made, dims), linear=False, makes=makes
        ),
    )
