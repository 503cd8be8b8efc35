"""`collective_seconds` and `send_seconds` as the pricer calls them, for columns of groups.
Algorithms: test_collective_algorithms.
"""

from typing import Any

import numpy as np
import pytest

from planner.cost.network.collectives import collective_seconds, send_seconds
from planner.cost.network.nccl import IDEAL
from planner.cost.network.rings_and_trees import OPERATIONS
from planner.cost.network.topology import Fabric
from tests.pricing import cluster_of

INNER, OUTER, ALPHA, FAR = 400e9, 50e9, 1e-6, 5e-6
LARGE = 8e9
Column = np.ndarray[Any, np.dtype[np.float64]]


def fabric(
    num_gpus: int, *levels: dict[str, Any], gpu: str = "a100-sxm-80gb", ideal: bool = True
) -> Fabric:
    switches = [{"topology": "switch", **level} for level in levels]
    return Fabric.build(cluster_of(num_gpus, *switches, gpu=gpu), library=IDEAL if ideal else None)


NODE = {"gpus": 8, "bandwidth": INNER, "latency": ALPHA}


def nodes(num_gpus: int = 64, **given: Any) -> Fabric:
    return fabric(num_gpus, NODE, {"bandwidth": OUTER, "latency": FAR}, **given)


def column(*values: float) -> Column:
    return np.array(values, dtype=np.float64)


def seconds(operation: str, *group: float, on: Fabric | None = None, **given: float) -> float:
    """group: payload, ranks, their stride unless it is one; on one node of 8 GPUs, unless said."""
    columns = (*map(column, (*group, 1.0)[:3]), on or fabric(8, NODE))
    (answer,) = collective_seconds(operation, *columns, **{"base_seconds": 0.0} | given)
    return float(answer)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rings_of_one_level(n: int) -> None:
    """n - 1 rounds of P / n. Ring attention: P is all blocks, and gradients travel back with them.
    All-reduce: two rings, the shortest for a large buffer; trees are for small ones."""

    def ring(payload: float) -> float:
        return (n - 1) * (payload / (n * INNER) + ALPHA)

    for payload in (1.0, 1e5, 1e6, 1e7, LARGE):
        once = pytest.approx(ring(payload), rel=1e-9)
        for operation in ("all-gather", "reduce-scatter", "rotate"):
            assert seconds(operation, payload, n) == once, operation
        twice = seconds("rotate-gradients", payload, n)
        assert twice == pytest.approx(2 * ring(payload), rel=1e-9)
        assert seconds("all-reduce", payload, n) <= twice * (1 + 1e-9)
    large, small = seconds("all-reduce", LARGE, n), seconds("all-reduce", 8.0, n)
    assert large == pytest.approx(2 * ring(LARGE), rel=1e-9)
    assert n == 2 or 2 * np.log2(n) * ALPHA <= small < 2 * ring(8.0)
    # (n - 1) / n of what a rank sends crosses its own link, all partners at once
    exchanged = (n - 1) / n * LARGE / INNER
    assert seconds("all-to-all", LARGE, n) == pytest.approx(exchanged, rel=1e-4)


@pytest.mark.parametrize("operation", [*OPERATIONS, "rotate", "rotate-gradients"])
def test_a_group_of_one_is_free(operation: str) -> None:
    for on in (None, nodes(), nodes(ideal=False)):
        assert seconds(operation, LARGE, 1, on=on, base_seconds=1e-5) == 0.0


def test_the_trainers_own_time_is_added_once() -> None:
    bare, busy = (seconds("all-gather", LARGE, 8, base_seconds=base) for base in (0.0, 3e-5))
    assert busy - bare == pytest.approx(3e-5)


def test_nvlink_sharp_speeds_up_all_reduce_alone_and_only_inside_the_switch() -> None:
    """In the switch each byte leaves once, 1 / n of the result returns."""
    both = sharp, plain = [nodes(gpu=gpu) for gpu in ("h100-sxm-80gb", "a100-sxm-80gb")]
    assert (sharp.switched_reduction, plain.switched_reduction) == (True, False)
    inside = [seconds("all-reduce", LARGE, 8, on=on) for on in both]
    expected = [(1 + 1 / 8) * LARGE / INNER, 2 * 7 / 8 * LARGE / INNER]
    assert inside == pytest.approx(expected, rel=1e-3)
    for operation, stride in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 8)):
        assert len({seconds(operation, LARGE, 8, stride, on=on) for on in both}) == 1, operation
    gained = seconds("all-reduce", LARGE, 8, on=sharp, nvls_gain=2.0)
    assert gained == pytest.approx(inside[0] / 2, rel=1e-3)


def test_members_in_a_node_share_its_nics() -> None:
    """A ring leaves each full node at 8 NICs, one member a node at one; the slower level counts."""
    whole = seconds("all-gather", LARGE, 16, on=nodes())
    assert whole == pytest.approx(15 / 16 * LARGE / min(INNER, 8 * OUTER), rel=2e-3)
    for stride, rate in ((8, OUTER), (4, 2 * OUTER)):
        found = seconds("all-gather", LARGE, 8, stride, on=nodes())
        assert found == pytest.approx(7 / 8 * LARGE / rate, rel=1e-3)


def test_a_ring_over_nodes_pays_the_far_latency_only_between_them() -> None:
    assert seconds("all-gather", 1e-3, 16, on=nodes()) == pytest.approx(14 * ALPHA + FAR, rel=1e-6)
    assert seconds("all-gather", 1e-3, 8, 8, on=nodes()) == pytest.approx(7 * FAR, rel=1e-6)


def test_expert_exchange_sends_out_of_the_node_what_is_not_in_it() -> None:
    """16 ranks on two nodes: half of what a rank sends leaves the node, at its own NIC."""
    found = seconds("all-to-all", LARGE, 16, on=nodes())
    assert found == pytest.approx(LARGE / 2 / OUTER, rel=1e-3)


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter", "all-reduce"])
def test_no_collective_beats_the_bytes_that_must_cross_a_ranks_links(operation: str) -> None:
    """A rank receives (n - 1) / n of the buffer; a calibrated library does not beat the wire."""
    for on in (nodes(gpu="h100-sxm-80gb", ideal=ideal) for ideal in (True, False)):
        for n in (2, 4, 8):
            assert seconds(operation, LARGE, n, on=on) >= (n - 1) / n * LARGE / INNER


def test_a_send_takes_the_level_that_joins_both_ranks() -> None:
    """16 stages of a GPU, 8 a node: of 15 hops one leaves. Of 4 GPUs: 3 of 7. Of 8: every hop."""
    near, far = LARGE / INNER + ALPHA, LARGE / OUTER + FAR
    one = send_seconds(column(LARGE, LARGE), column(1, 8), nodes())
    assert one == pytest.approx([near, far], rel=1e-6)
    means = send_seconds(column(*[LARGE] * 3), column(1, 4, 8), nodes(), column(16, 8, 8))
    expected = [(14 * near + far) / 15, (4 * near + 3 * far) / 7, far]
    assert means == pytest.approx(expected, rel=1e-6)
