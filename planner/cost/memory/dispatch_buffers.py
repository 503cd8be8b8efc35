"""Device memory that a dispatcher of experts takes for itself, outside torch's allocator.

Letters: N layouts.
"""

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
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
