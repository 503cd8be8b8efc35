"""Memory held beyond what is alive: cached blocks, pools of graphs, buffers of dispatchers.

torch's caching allocator never moves a block: memory that one stream freed serves only that stream,
and a hole serves only what is no larger than it. A CUDA graph replays at fixed addresses: its
memory is a pool of its own, in which nothing else is put, and which memory pressure does not give
back. A dispatcher of experts takes memory for itself, outside torch's allocator.
Letters: R ranks, N layouts; arrays are (R, N) if not said.
Source: c10/cuda/CUDACachingAllocator.cpp (get_pool, get_free_block, alloc_block,
release_cached_blocks, expandable segments).
"""

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch
from planner.rules.cuda_graphs import FULL, NONE
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import MOE_DISPATCHERS
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

# DeepEP deep_ep/buffer.py (num_sms 20, two SMs a channel; get_dispatch_config: tokens of a chunk
# received over NVLink and over RDMA) and csrc/config.hpp (get_nvl_buffer_size_hint,
# get_rdma_buffer_size_hint: sent and received)
CHANNELS, NODE = 10, 8
NVLINK_TOKENS, RDMA_TOKENS = 256, 128
ELEMENT_BYTES = 2.0


def cached_bytes(own: FloatColumn, others: FloatColumn, most: FloatColumn) -> FloatColumn:
    """Bytes held beyond the most that is alive in any phase of a step, by the allocator's rules.

    own: the most of any phase that the stream of the compute allocated, with holes: freed by then,
        but smaller than what is asked for next.
    others: the most that other streams allocated: shards of gradients, which are the output of
        FSDP's reductions, and on a third stream its all-gathers.
    most: alive in the worst phase.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (all_gather_copy_in_stream,
    reduce_scatter_stream).
    """
    return np.asarray(own + others - most)


def reserved_bytes(
    allocated: FloatColumn,
    cached: FloatColumn,
    moving: FloatColumn,
    room: FloatColumn,
    shares: tuple[float, float],
) -> tuple[FloatColumn, FloatColumn]:
    """(reserved bytes, the least that would do).

    moving: the part of `allocated` that comes and goes in a step.
    room: what the device has left.
    shares: of `moving` that is lost to fragments, without and with memory pressure. Under pressure
        cudaMalloc fails, cached blocks are given back and the request is tried again; only blocks
        that cannot be split are left.
    """
    at_ease, pressed = shares
    least = allocated + pressed * moving
    return np.maximum(np.minimum(allocated + cached + at_ease * moving, room), least), least


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


def dispatch_buffer_bytes(
    batch: LayoutBatch, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec
) -> FloatColumn:
    """Bytes of one rank, (N,); 0 where NCCL exchanges torch's own tensors.

    DeepEP: chunks of tokens from each GPU of the node, and to and from each node, per channel.
    HybridEP: what all ranks of the exchange may send, before and behind the experts (DeepEP branch
    hybrid-ep, csrc/hybrid_ep/hybrid_ep.cu: max_num_of_tokens_per_rank x ranks).
    """
    row = ELEMENT_BYTES * model.expert_input_size
    ep, used = batch.ep.astype(np.float64), (batch.ep > 1) & model.is_moe
    if not used.any():
        return np.zeros(len(batch))
    nodes = np.ceil(ep / min(cluster.fabric[0].gpus, NODE))
    chunks = CHANNELS * (
        NVLINK_TOKENS * np.minimum(ep, NODE) + np.where(nodes > 1, 2.0 * RDMA_TOKENS * nodes, 0.0)
    )
    shards = np.where(batch.sequence_parallel, batch.tp, 1) * batch.cp
    tokens = batch.micro_batch_size * training.seq_len / shards
    deepep, hybridep = (
        used & (batch.moe_dispatcher == MOE_DISPATCHERS.index(name))
        for name in ("deepep", "hybridep")
    )
    return np.select([deepep, hybridep], [chunks * row, 2.0 * tokens * ep * row], 0.0)
