"""`collective_seconds` and `send_seconds` as the pricer calls them, for columns of groups.
Algorithms: test_collective_algorithms.
"""

from typing import Any

import numpy as np
import pytest

from planner.cost.network.collectives import collective_seconds, send_seconds
from planner.cost.network.nccl import IDEAL
from planner.cost.network.topology import Fabric, Placement
from planner.intake.machines import read_cluster

INNER, OUTER, ALPHA, FAR = 400e9, 50e9, 1e-6, 5e-6
LARGE = 8e9
Column = np.ndarray[Any, np.dtype[np.float64]]


def fabric(
    num_gpus: int, *levels: dict[str, Any], gpu: str = "a100-sxm-80gb", ideal: bool = True
) -> Fabric:
    values: dict[str, Any] = {"gpu": gpu, "num_gpus": num_gpus}
    values["fabric"] = [{"topology": "switch", **level} for level in levels]
    return Fabric.build(read_cluster(values), library=IDEAL if ideal else None)


def one_level(num_gpus: int = 8, **given: Any) -> Fabric:
    return fabric(num_gpus, {"gpus": num_gpus, "bandwidth": INNER, "latency": ALPHA}, **given)


def nodes(num_gpus: int = 64, **given: Any) -> Fabric:
    return fabric(
        num_gpus,
        {"gpus": 8, "bandwidth": INNER, "latency": ALPHA},
        {"bandwidth": OUTER, "latency": FAR},
        **given,
    )


def column(*values: float) -> Column:
    return np.array(values, dtype=np.float64)


def seconds(
    operation: str,
    payload: float,
    degree: float,
    stride: float,
    on: Fabric,
    base: float = 0.0,
    **given: float,
) -> float:
    (answer,) = collective_seconds(
        operation, column(payload), column(degree), column(stride), on, base_seconds=base, **given
    )
    return float(answer)


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("payload", [1.0, 1e6, LARGE])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_gather_and_scatter_are_one_ring(operation: str, payload: float, n: int) -> None:
    """(n - 1) (P / (n B) + a)."""
    assert seconds(operation, payload, n, 1, one_level()) == pytest.approx(
        (n - 1) * (payload / (n * INNER) + ALPHA), rel=1e-9
    )


@pytest.mark.parametrize("n", [4, 8])
def test_a_large_all_reduce_is_two_rings_and_a_small_one_less(n: int) -> None:
    """2 (n - 1) (P / (n B) + a), the shortest for a large buffer; trees are for small ones."""

    def ring(payload: float) -> float:
        return 2 * (n - 1) * (payload / (n * INNER) + ALPHA)

    assert seconds("all-reduce", LARGE, n, 1, one_level()) == pytest.approx(ring(LARGE), rel=1e-9)
    assert 2 * np.log2(n) * ALPHA <= seconds("all-reduce", 8.0, n, 1, one_level()) < ring(8.0)


def test_all_reduce_is_not_slower_than_scatter_and_gather() -> None:
    for payload in (1.0, 1e5, 1e7, LARGE):
        names = ("reduce-scatter", "all-gather")
        parts = sum(seconds(operation, payload, 8, 1, one_level()) for operation in names)
        assert seconds("all-reduce", payload, 8, 1, one_level()) <= parts * (1 + 1e-12)


def test_all_to_all_leaves_at_the_ranks_own_rate() -> None:
    """(n - 1) / n of what a rank sends crosses its own link, all partners at once."""
    moved = 7 / 8 * LARGE / INNER
    assert seconds("all-to-all", LARGE, 8, 1, one_level()) == pytest.approx(moved, rel=1e-4)


def test_a_rotation_is_as_many_sends_as_there_are_other_ranks() -> None:
    """Ring attention: P is all blocks, n - 1 sends of P / n; gradients travel back with them."""
    once = seconds("rotate", LARGE, 8, 1, one_level())
    assert once == pytest.approx(7 * (LARGE / 8 / INNER + ALPHA), rel=1e-9)
    found = seconds("rotate-gradients", LARGE, 8, 1, one_level())
    assert found == pytest.approx(2 * once, rel=1e-9)


@pytest.mark.parametrize(
    "operation",
    ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "rotate", "rotate-gradients"],
)
def test_a_group_of_one_is_free(operation: str) -> None:
    for on in (one_level(), nodes(), nodes(ideal=False)):
        assert seconds(operation, LARGE, 1, 1, on, base=1e-5) == 0.0


def test_the_trainers_own_time_is_added_once() -> None:
    bare, busy = (
        seconds("all-gather", LARGE, 8, 1, one_level(), base=base) for base in (0.0, 3e-5)
    )
    assert busy - bare == pytest.approx(3e-5)


def test_nvlink_sharp_speeds_up_all_reduce_alone_and_only_inside_the_switch() -> None:
    with_sharp, without = (nodes(gpu=gpu) for gpu in ("h100-sxm-80gb", "a100-sxm-80gb"))
    assert with_sharp.switched_reduction
    assert not without.switched_reduction
    inside = [seconds("all-reduce", LARGE, 8, 1, on) for on in (with_sharp, without)]
    assert inside[0] == pytest.approx((1 + 1 / 8) * LARGE / INNER, rel=1e-3), (
        "each byte leaves once, 1 / n of the result returns"
    )
    assert inside[1] == pytest.approx(2 * 7 / 8 * LARGE / INNER, rel=1e-3)
    for operation in ("all-gather", "reduce-scatter"):
        sharp, plain = (seconds(operation, LARGE, 8, 1, each) for each in (with_sharp, without))
        assert sharp == plain
    sharp, plain = (seconds("all-reduce", LARGE, 8, 8, each) for each in (with_sharp, without))
    assert sharp == plain
    gained = seconds("all-reduce", LARGE, 8, 1, with_sharp, nvls_gain=2.0)
    assert gained == pytest.approx(inside[0] / 2, rel=1e-3)


@pytest.mark.parametrize(("degree", "stride", "in_a_node", "nodes_touched"), [
    (8, 1, 8, 1), (16, 1, 8, 2), (64, 1, 8, 8), (8, 8, 1, 8), (4, 2, 4, 1), (8, 4, 2, 4),
    (4, 16, 1, 4), (2, 32, 1, 2), (1, 1, 1, 1),
])  # fmt: skip
def test_members_of_a_group_in_a_node(
    degree: int, stride: int, in_a_node: int, nodes_touched: int
) -> None:
    """Counted rank by rank: b, b + stride, ... for every b at which a tiling of 64 GPUs starts."""
    place = Placement.of(nodes(), column(degree), column(stride))
    starts = [b for b in range(64) if b % (degree * stride) < stride]
    groups = [{(b + k * stride) // 8 for k in range(degree)} for b in starts]
    assert max(len(group) for group in groups) == nodes_touched == place.units[1][0]
    assert degree / nodes_touched == in_a_node
    if degree > 1 and nodes_touched > 1:
        assert place.fewest[1][0] == in_a_node


def test_members_in_a_node_share_its_nics() -> None:
    """A ring leaves each full node at 8 NICs, one member a node at one; the slower level counts."""
    whole = seconds("all-gather", LARGE, 16, 1, nodes())
    assert whole == pytest.approx(15 / 16 * LARGE / min(INNER, 8 * OUTER), rel=2e-3)
    for stride, rate in ((8, OUTER), (4, 2 * OUTER)):
        found = seconds("all-gather", LARGE, 8, stride, nodes())
        assert found == pytest.approx(7 / 8 * LARGE / rate, rel=1e-3)


def test_a_ring_over_nodes_pays_the_far_latency_only_between_them() -> None:
    assert seconds("all-gather", 1e-3, 16, 1, nodes()) == pytest.approx(14 * ALPHA + FAR, rel=1e-6)
    assert seconds("all-gather", 1e-3, 8, 8, nodes()) == pytest.approx(7 * FAR, rel=1e-6)


def test_expert_exchange_sends_out_of_the_node_what_is_not_in_it() -> None:
    """16 ranks on two nodes: half of what a rank sends leaves the node, at its own NIC."""
    found = seconds("all-to-all", LARGE, 16, 1, nodes())
    assert found == pytest.approx(LARGE / 2 / OUTER, rel=1e-3)


def test_oversubscription_divides_the_uplink() -> None:
    levels = [
        {"gpus": 8, "bandwidth": INNER, "latency": ALPHA},
        {"bandwidth": OUTER, "latency": FAR, "oversubscription": 4},
    ]
    thin = fabric(64, *levels)
    assert seconds("all-gather", LARGE, 8, 8, thin) == pytest.approx(
        4 * seconds("all-gather", LARGE, 8, 8, nodes()), rel=1e-3
    )


@pytest.mark.parametrize(
    "operation", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "rotate"]
)
@pytest.mark.parametrize("ideal", [True, False])
def test_a_column_is_its_rows(operation: str, ideal: bool) -> None:
    rng = np.random.default_rng(7)
    degree = 2.0 ** rng.integers(0, 7, 60)
    stride = 2.0 ** np.array([rng.integers(0, 7 - int(np.log2(d))) for d in degree])
    payload = 10 ** rng.uniform(0, 10, 60)
    group = (payload, degree, stride, nodes(ideal=ideal))
    together = collective_seconds(operation, *group, base_seconds=1e-5)
    alone = [
        seconds(operation, p, d, s, nodes(ideal=ideal), base=1e-5)
        for p, d, s in zip(payload, degree, stride, strict=True)
    ]
    assert together == pytest.approx(np.array(alone), rel=1e-9)


@pytest.mark.parametrize(
    "operation", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "rotate"]
)
def test_more_bytes_are_never_faster(operation: str) -> None:
    payload = 10 ** np.linspace(0, 11, 200)
    for degree, stride in ((8.0, 1.0), (16.0, 1.0), (8.0, 8.0), (64.0, 1.0)):
        groups = np.full(200, degree), np.full(200, stride)
        took = collective_seconds(
            operation, payload, *groups, nodes(gpu="h100-sxm-80gb", ideal=False), base_seconds=0.0
        )
        assert (np.diff(took) >= -1e-15).all()


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter", "all-reduce"])
def test_no_collective_beats_the_bytes_that_must_cross_a_ranks_links(operation: str) -> None:
    """A rank receives (n - 1) / n of the buffer; a calibrated library does not beat the wire."""
    for on in (nodes(gpu="h100-sxm-80gb"), nodes(gpu="h100-sxm-80gb", ideal=False)):
        for n in (2, 4, 8):
            assert seconds(operation, LARGE, n, 1, on) >= (n - 1) / n * LARGE / INNER


def test_a_send_takes_the_level_that_joins_both_ranks() -> None:
    near, far = send_seconds(column(LARGE, LARGE), column(1, 8), nodes())
    assert near == pytest.approx(LARGE / INNER + ALPHA, rel=1e-6)
    assert far == pytest.approx(LARGE / OUTER + FAR, rel=1e-6)


def test_a_pipelines_hops_are_averaged_over_those_that_leave_a_node() -> None:
    """16 stages of a GPU, 8 a node: of 15 hops one leaves. Stages of 8 GPUs: every hop leaves."""
    near, far = LARGE / INNER + ALPHA, LARGE / OUTER + FAR
    mean, wide = send_seconds(column(LARGE, LARGE), column(1, 8), nodes(), column(16, 8))
    assert mean == pytest.approx((14 * near + far) / 15, rel=1e-6)
    assert wide == pytest.approx(far, rel=1e-6)
