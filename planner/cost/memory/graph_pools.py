"""What CUDA graphs hold besides what they compute with.

A graph replays at fixed addresses. Its memory is a pool of its own, in which nothing else is put,
and which memory pressure does not give back.
Letters: R ranks, N layouts.
"""

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.rules.cuda_graphs import FULL, NONE


def private_bytes(
    graphs: IntColumn, last_layer_bytes: FloatColumn, stream_bytes: FloatColumn
) -> FloatColumn:
    """Bytes reserved for graphs beyond the peak, (R, N).

    last_layer_bytes: what a layer's backward needs besides what was saved. Freed inside the pool,
        it serves no eager kernel (graphs of layers); what another stream frees is not reused before
        a capture ends (graphs of a step).
    stream_bytes: an activation between layers. A graph has its input, its output and the gradients
        of both at fixed places.
    An estimate: Megatron Bridge 0.5 docs/training/cuda-graphs.md says 0 to 2 GB for graphs of
    layers, and more than 10 GB for those of a step under PP or with large experts.
    Source: pytorch c10/cuda/CUDACachingAllocator.cpp (PrivatePool), TransformerEngine
    pytorch/graph.py (static_input_surface, static_grad_outputs).
    """
    return np.where(graphs != NONE, last_layer_bytes + 4.0 * stream_bytes, 0.0)


def fixed_gradients(graphs: IntColumn, shard: FloatColumn) -> FloatColumn:
    """Elements of the gradients' shard that stay from step to step, (R, N).

    A graph of a step writes them to fixed places, so they are zeroed instead of freed.
    Source: torchtitan 0.3 trainer.py (zero_grad(set_to_none=...)).
    """
    return np.where(graphs == FULL, shard, 0.0)
