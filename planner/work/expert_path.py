"""Bytes that a trainer's own code moves between the router and the experts, and back.

Every count is of elements read and written (16 bits each, an fp32 element counts as two) per
element of a routed row, kernel by kernel, from the trainer's source. Four places:

    gather    a token's copies into the experts' order, before they are sent
    regroup   received copies into the order of the local experts, padded to the alignment
    ungroup   back into the order in which they came
    scatter   copies into the tokens' order, scaled by their scores and summed
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.specs.model import ModelSpec
from planner.work.ops import Elementwise
from planner.work.pieces import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """One place.

    forward, backward: of the eager kernels.
    fused_forward, fused_backward: of torch.compile's or the trainer's fused ones.
    kernels: eager ones in forward.
    singles: of them, those that a trainer of fused modules still launches one by one.
    """

    forward: float
    backward: float
    fused_forward: float
    fused_backward: float
    kernels: int
    singles: int = 0


# torchtitan 0.2.2 models/moe/moe.py, models/moe/utils.py, distributed/expert_parallel.py.
# Forward kernels: x[index] 2; vstack 2 and x[permuted] 2; index_put 2; zeros 1, index_put 2, then
# float 3 and bmm 2. Their gradients: an index's is zeros and an accumulating index_put, which reads
# the gradient and reads and writes the sum (aten/src/ATen/native/cuda/Indexing.cu,
# indexing_backward_kernel) 3 and 1; an index_put's is an index 2; a slice's is zeros and a copy 3;
# bmm's writes one fp32 gradient and reads the fp32 rows for that of the scores 4; float's is a cast
# 3. Compiled, the gather takes the cast and the scaling in, and so does the sum.
_TORCH = {
    "gather": Moves(forward=2.0, backward=3.0, fused_forward=2.0, fused_backward=3.0, kernels=3),
    "regroup": Moves(forward=4.0, backward=4.0, fused_forward=2.0, fused_backward=3.0, kernels=22),
    "ungroup": Moves(forward=2.0, backward=5.0, fused_forward=2.0, fused_backward=3.0, kernels=2),
    "scatter": Moves(forward=8.0, backward=9.0, fused_forward=5.0, fused_backward=5.0, kernels=6),
}
# The same with `score_before_experts`: float 3, product 4, cast 3 before the experts (backward:
# cast 3, two products of fp32 rows 4 and 6, a sum over them 2, cast 3), a plain sum behind them.
_TORCH_SCORES_FIRST = _TORCH | {
    "gather": Moves(forward=12.0, backward=21.0, fused_forward=2.0, fused_backward=6.0, kernels=6),
    "scatter": Moves(forward=4.0, backward=3.0, fused_forward=4.0, fused_backward=3.0, kernels=4),
}
# Megatron-Core transformer/moe/{moe_utils,token_dispatcher}.py with permute fusion (Transformer
# Engine's moe_permute, moe_sort_chunks_by_index, moe_unpermute): one kernel each, which reads and
# writes every row once; the scores are applied inside the experts' activation.
_MEGATRON = {
    name: Moves(
        forward=2.0, backward=2.0, fused_forward=2.0, fused_backward=2.0,
        kernels=kernels, singles=kernels,
    )
    for name, kernels in (("gather", 8), ("regroup", 3), ("ungroup", 3), ("scatter", 8))
}  # fmt: skip
PATHS: Mapping[str, Mapping[str, Moves]] = {
    "torch": _TORCH,
    "torch-scores-first": _TORCH_SCORES_FIRST,
    "fused": _MEGATRON,
}


def weighed_biases(model: ModelSpec, code: Code) -> tuple[Elementwise, ...]:
    """Biases of the experts' outputs times the rows' scores, which Megatron adds expert by expert.

    Forward, scores being fp32, which counts twice: product 2, sum 5, rows of all experts joined 4,
    cast 3. Backward: cast 3, cast of each expert's 3, joined 2, gradients of biases and of scores 6
    each. An expert takes 2 launches forward and 6 backward.
    Source: Megatron-LM core transformer/moe/experts.py (TEGroupedMLP._apply_bias).
    """
    op = Elementwise(
        name="expert_bias", dims=("tokens_grouped", "expert_hidden"), kernels=4, singles=4,
        each=("experts_local",), forward_moves=14.0, fused_forward_moves=14.0,
        backward_moves=20.0, fused_backward_moves=20.0,
    )  # fmt: skip
    return (op,) * (model.expert_bias and code.expert_path == "fused")
