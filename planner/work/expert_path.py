"""Bytes that a trainer's own code moves between the router and the experts, and back.

Every count is of elements read and written (16 bits each, an fp32 element counts as two) per
element of a routed row, kernel by kernel, from the trainer's source. Four places:

    gather    a token's copies into the experts' order, before they are sent
    regroup   received copies into the order of the local experts, padded to the alignment
    ungroup   back into the order in which they came
    scatter   copies into the tokens' order, scaled by their scores and summed
"""

from collections.abc import Mapping

from planner.specs.model import ModelSpec
from planner.work.ops import Elementwise, Moves
from planner.work.pieces import Code

# place -> (moves, eager kernels in forward, and of them those that a trainer of fused modules still
# launches one by one); the fused are torch.compile's or the trainer's
Path = Mapping[str, tuple[Moves, int, int]]
# torchtitan 0.2.2 models/moe/moe.py, models/moe/utils.py, distributed/expert_parallel.py.
# Forward kernels: x[index] 2; vstack 2 and x[permuted] 2; index_put 2; zeros 1, index_put 2, then
# float 3 and bmm 2. Their gradients: an index's is zeros and an accumulating index_put, which reads
# the gradient and reads and writes the sum (aten/src/ATen/native/cuda/Indexing.cu,
# indexing_backward_kernel) 3 and 1; an index_put's is an index 2; a slice's is zeros and a copy 3;
# bmm's writes one fp32 gradient and reads the fp32 rows for that of the scores 4; float's is a cast
# 3. Compiled, the gather takes the cast and the scaling in, and so does the sum.
_TORCH = {
    "gather": (Moves(2.0, 3.0, 2.0, 3.0), 3, 0),
    "regroup": (Moves(4.0, 4.0, 2.0, 3.0), 22, 0),
    "ungroup": (Moves(2.0, 5.0, 2.0, 3.0), 2, 0),
    "scatter": (Moves(8.0, 9.0, 5.0, 5.0), 6, 0),
}
# The same with `score_before_experts`: float 3, product 4, cast 3 before the experts (backward:
# cast 3, two products of fp32 rows 4 and 6, a sum over them 2, cast 3), a plain sum behind them.
_TORCH_SCORES_FIRST = _TORCH | {
    "gather": (Moves(12.0, 21.0, 2.0, 6.0), 6, 0),
    "scatter": (Moves(4.0, 3.0, 4.0, 3.0), 4, 0),
}
# Megatron-Core transformer/moe/{moe_utils,token_dispatcher}.py with permute fusion (Transformer
# Engine's moe_permute, moe_sort_chunks_by_index, moe_unpermute): one kernel each, which reads and
# writes every row once; the scores are applied inside the experts' activation.
_MEGATRON = {
    name: (Moves(2.0, 2.0, 2.0, 2.0), kernels, kernels)
    for name, kernels in (("gather", 8), ("regroup", 3), ("ungroup", 3), ("scatter", 8))
}
PATHS: Mapping[str, Path] = {
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
        each=("experts_local",), moves=Moves(14.0, 20.0, 14.0, 20.0),
    )  # fmt: skip
    return (op,) * (model.expert_bias and code.expert_path == "fused")
