"""Where a group of ranks lies on the fabric: how many members share each level, and which links it crosses.

Letters: U groups as columns, L levels from inner to outer.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn
from planner.specs.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Levels as arrays (L,): GPUs joined by one unit of the level, usable bytes a second per GPU, seconds a hop."""

    gpus: FloatColumn
    bandwidth: FloatColumn
    latency: FloatColumn
    switched_reduction: bool

    @classmethod
    def build(cls, cluster: ClusterSpec, intra_share: float, inter_share: float) -> "Fabric":
        """Datasheet bandwidths times the share that collectives reach: inside the innermost level, and beyond it."""
        shares = [intra_share] + [inter_share] * (len(cluster.fabric) - 1)
        return cls(
            gpus=np.array([float(level.gpus) for level in cluster.fabric]),
            bandwidth=np.array([s * level.bandwidth_bytes_per_second / level.oversubscription for s, level in zip(shares, cluster.fabric, strict=True)]),
            latency=np.array([level.latency_seconds for level in cluster.fabric]),
            switched_reduction=cluster.gpu.nvls,
        )

    def members(self, degree: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Members of one group inside one unit of each level, (L, U).

        Ranks of a group are `stride` apart. A unit of g GPUs holds g / stride of them, at least one, at most all;
        a stride that does not divide g straddles the boundary, and the fuller unit is counted short (conservative).
        """
        inside = np.maximum(np.floor(self.gpus[:, None] / stride[None, :]), 1.0)
        counted = np.minimum(inside, degree[None, :])
        counted[-1] = degree
        return np.asarray(np.maximum.accumulate(counted, axis=0))
