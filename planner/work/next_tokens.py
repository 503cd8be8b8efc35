"""Multi-token prediction as operations: what stands before and behind its layer.

The state of a token and the embedding of the next one are normalised, joined and projected to the
hidden size; a layer like the last one follows, then the model's own head with a loss of its own.
Sources: DeepSeek-V3 technical report, section 2.2; Megatron-LM core 0.18 transformer/
    multi_token_prediction.py (ColumnParallelLinear, whose output is gathered and scattered).
"""

from collections.abc import Sequence
from dataclasses import replace

from planner.specs.model import ModelSpec
from planner.work.ops import Collective, Elementwise, Op, Tensor
from planner.work.pieces import HIDDEN_SP, SCATTERED, Code, embedding, norm, projection, tp_exit

PAIR = Tensor("mtp_pair", ("tokens", "hidden_pair"))
STREAM = Tensor("x", HIDDEN_SP)


def joined(model: ModelSpec, code: Code) -> tuple[Op, ...]:
    """From the last layer's output to the input of one more."""
    state, embedded = (Tensor(name, HIDDEN_SP) for name in ("mtp_state", "mtp_embedded"))
    norms = [norm(model, f"{one.name}_norm", one, code) for one in (state, embedded)]
    return (
        *embedding("mtp_embedding", "mtp_embedded_full", embedded),
        *norms,
        Collective(
            name="mtp_in",
            site="tp_enter",
            tensor=Tensor("mtp_full", PAIR.dims),
            reads=tuple(one.makes[0] for one in norms),
            makes=(PAIR,),
            exchanged=(SCATTERED,) * 2,
        ),
        projection("mtp_proj", ("hidden_cut",), ("hidden_pair",), PAIR),
        tp_exit("mtp_sum", "mtp_proj_full", "mtp_proj_out", STREAM),
    )


def predicted(head: Sequence[Op]) -> tuple[Op, ...]:
    """The head's operations, and the softmax of its logits, which stays until the backward.

    Megatron-LM keeps it in fp32 (tensor_parallel/cross_entropy.py); a fused loss keeps half.
    """
    softmax = Tensor("mtp_softmax", ("tokens", "vocab_loss"), width="fp32")
    return tuple(
        replace(op, saves=(softmax,))
        if isinstance(op, Elementwise) and op.name == "cross_entropy"
        else op
        for op in head
    )
