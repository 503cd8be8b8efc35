"""What torch's caching allocator holds from the device, from what is allocated.

Letters: R ranks, N layouts; all (R, N).
The allocator never moves a block: memory that one stream freed serves only that stream, and a hole
serves only what is no larger than it.
Source: c10/cuda/CUDACachingAllocator.cpp (get_pool, get_free_block, alloc_block,
release_cached_blocks, expandable segments).
"""

import numpy as np

from planner.columns import FloatColumn


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
