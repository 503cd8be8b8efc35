"""DeepSeek-V4's attention and hyper-connections: shapes, and parameters of the latter."""

from planner.specs.network import Count, Network


class ResidualStreams(Network):
    """Shapes of attention that compresses its keys, and of several residual streams.

    Attention of DeepSeek-V4, with queries of low rank and sinks, over sliding_window tokens:
    o_groups, o_lora_rank: groups of heads, and the width to which each is projected, before the
        output projection.
    compress_rate_csa, compress_rate_hca: tokens of one compressed entry. A "csa" layer attends to
        index_topk entries of twice as many tokens, which an indexer chooses, an "hca" layer to all,
        a "shared-kv" layer to none.
    num_hash_layers: leading layers whose experts a table chooses by the token.

    Hyper-connections (Xie et al. 2026), in any model:
    hc_mult: residual streams, which every branch reads as a mix and is added to; 0: one, plain.
    hc_sinkhorn_iters: iterations that make a mix of streams doubly stochastic; 0: each stream
        stays as it is (HY 4).
    """

    o_groups: Count = 0
    o_lora_rank: Count = 0
    compress_rate_csa: Count = 0
    compress_rate_hca: Count = 0
    num_hash_layers: Count = 0

    hc_mult: Count = 0
    hc_sinkhorn_iters: Count = 20

    @property
    def num_mixes(self) -> int:
        """Weights of the streams around one branch: into it, out of it, and over to others."""
        return (2 + self.hc_mult * (self.hc_sinkhorn_iters > 0)) * self.hc_mult

    def stream_parameters(self, hidden: int, sites: int) -> int:
        """Parameters of `sites` mixes around branches, in fp32: projections, biases and scales."""
        each = self.num_mixes * (self.hc_mult * hidden + 1) + 2 + (self.hc_sinkhorn_iters > 0)
        return sites * each * (self.hc_mult > 0)

    def collapse_parameters(self, hidden: int) -> int:
        """Parameters of the mix of all streams into one, before a head."""
        return (self.hc_mult * (self.hc_mult * hidden + 1) + 1) * (self.hc_mult > 0)
