"""By what mechanism a release hides tensor-parallel communication under its own GEMMs.

Nothing else hides it: a rank needs what a collective gives before it goes on. The rows of each
trainer stand in its file.
"""

from dataclasses import dataclass, field
from typing import Literal

from planner.trainers.release import Releases

Mechanism = Literal["user-buffers", "symmetric-memory", "deferred"]
MECHANISMS: tuple[Mechanism, ...] = ("user-buffers", "symmetric-memory", "deferred")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpOverlap:
    """One mechanism and the runs that have it.

    mechanism:
        user-buffers: Transformer Engine cuts the all-gather before and the reduce-scatter after a
            linear layer into one chunk a rank and moves each under the GEMM of another; the
            reduce-scatter of input gradients runs whole under the GEMM of weight gradients. Its
            buffers have no names for MLA's projections, and Megatron-LM switches it off for the
            whole model (core/extensions/transformer_engine.py, TELinear).
        symmetric-memory: torch's async TP, which cuts all of them, in the backward too.
        deferred: input gradients of column-parallel layers are reduced while the GEMM of weight
            gradients runs, which does not need them. All else blocks.
        The first two move the parts of sequence parallelism by peer copies: without it, or where a
        group leaves the domain of peers (NVLink), they do not run.
    asked: only where the layout sets `async_tp`; otherwise always.
    releases: those that have it.
    """

    mechanism: Mechanism
    asked: bool = False
    releases: Releases = field(default_factory=Releases)
    source: str = field(compare=False)

    @property
    def among_peers(self) -> bool:
        """Whether it needs sequence parallelism within a domain of peers."""
        return self.mechanism != "deferred"


SYMMETRIC_MEMORY = TpOverlap(
    mechanism="symmetric-memory",
    asked=True,
    source="torch/_inductor/fx_passes/micro_pipeline_tp.py (all-gather-matmul and "
    "matmul-reduce-scatter), distributed/_symmetric_memory",
)
DEFERRED = TpOverlap(
    mechanism="deferred",
    source="Megatron-LM core/tensor_parallel/layers.py "
    "LinearWithGradAccumulationAndAsyncCommunication: the gradient's reduction starts before the "
    "GEMM of weight gradients and is waited for after it; Transformer Engine "
    "pytorch/module/linear.py does the same",
)
