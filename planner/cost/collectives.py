"""Seconds of collectives by alpha-beta on a hierarchical fabric. Letters: U groups as columns, L fabric levels.

Payload is the whole buffer: gathered, reduced or scattered; for all-to-all what one rank sends.
"""

from collections.abc import Mapping

import numpy as np

from planner.columns import FloatColumn
from planner.cost.topology import Fabric

# Times that the buffer crosses the slowest link of a ring, over (n - 1) / n. Source: NCCL performance notes (busbw factors).
PASSES: Mapping[str, float] = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "broadcast": 1.0, "rotate": 1.0, "rotate-gradients": 2.0}


def collective_seconds(
    operation: str, payload_bytes: FloatColumn, degree: FloatColumn, stride: FloatColumn, fabric: Fabric, *, base_seconds: float, nvls_gain: float = 1.0
) -> FloatColumn:
    """Seconds of one collective over groups of `degree` ranks `stride` apart; a group of one costs nothing.

    Ring over all members:  t = base + latency + passes * P * (n - 1) / n / slowest
    slowest = min over levels crossed of (members inside the level below) x (bandwidth per GPU of the level): a node's
    NICs work side by side, so a group with m members in a node leaves it at m times one NIC's rate.
    latency: one trip round the ring, inner hops at the inner latency, outer hops at the outer one; an all-reduce takes
    the shorter of two ring trips and two tree trips (log2 of the units).
    All-to-all: the share of a rank's bytes that leaves each level, at its own link's rate, levels in parallel.
    Assumes no other group on the same links, which holds for groups of one axis under default rank order.
    Source: Patarasuk and Yuan 2009; Thakur et al. 2005.
    """
    members = fabric.members(degree, stride)
    below = np.vstack([np.ones_like(degree)[None], members[:-1]])
    crossed = members > below
    if operation == "all-to-all":
        seconds = _exchange_seconds(payload_bytes, members, below, crossed, fabric)
    else:
        rate = np.where(crossed, below * fabric.bandwidth[:, None], np.inf).min(axis=0)
        one_node = crossed.sum(axis=0) == crossed[0]
        gain = np.where(one_node, nvls_gain if fabric.switched_reduction and operation == "all-reduce" else 1.0, 1.0)
        units = degree / below
        hops = np.where(crossed, units - degree / members, 0.0) * fabric.latency[:, None]
        ring = PASSES[operation] * hops.sum(axis=0)
        tree = 2.0 * (np.where(crossed, np.ceil(np.log2(np.maximum(members / below, 1.0))), 0.0) * fabric.latency[:, None] * 2.0).sum(axis=0)
        latency = np.minimum(ring, tree) if operation == "all-reduce" else ring
        seconds = latency + PASSES[operation] * payload_bytes * (degree - 1.0) / degree / (rate * gain)
    return np.where(degree > 1.0, base_seconds + seconds, 0.0)


def _exchange_seconds(payload: FloatColumn, members: FloatColumn, below: FloatColumn, crossed: FloatColumn, fabric: Fabric) -> FloatColumn:
    degree = members[-1]
    leaving = payload[None] * (degree[None] - below) / degree[None]
    per_level = np.where(crossed, leaving / fabric.bandwidth[:, None] + fabric.latency[:, None] * np.log2(np.maximum(degree, 2.0))[None], 0.0)
    return np.asarray(per_level.max(axis=0))


def send_seconds(payload_bytes: FloatColumn, stride: FloatColumn, fabric: Fabric) -> FloatColumn:
    """Seconds to send a buffer to the rank `stride` away: P / B + latency of the level that joins them."""
    joined = fabric.gpus[:, None] > stride[None, :]
    joined[-1] = True
    level = np.argmax(joined, axis=0)
    return payload_bytes / fabric.bandwidth[level] + fabric.latency[level]
