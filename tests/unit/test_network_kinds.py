"""What joins the nodes, and how a domain of many GPUs is left: against their closed forms."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.network.collectives import candidates
from planner.cost.network.nccl import LIBRARIES, OUT_OF_ORDER
from planner.cost.network.topology import Fabric, Placement
from planner.errors import SpecError
from planner.intake.machines import read_cluster
from planner.specs.fabric import NETWORK_LATENCY_SECONDS


def fabric(gpu: str, num_gpus: int, level: dict[str, Any], **library: Any) -> Fabric:
    cluster = read_cluster({"gpu": gpu, "num_gpus": num_gpus, "fabric": [{}, level]})
    family = cluster.gpu.family
    return Fabric.build(cluster, library=replace(LIBRARIES[family], **library))


def line(on: Fabric, algorithm: str, protocol: str, members: int) -> tuple[float, float]:
    place = Placement.of(on, np.array([float(members)]), np.array([1.0]))
    found = {(c.algorithm.name, c.protocol.name): c.line for c in candidates("all-reduce", place)}
    chosen = found[algorithm, protocol]
    return float(chosen.latency_seconds[0]), float(chosen.seconds_per_byte[0])


def test_a_network_has_its_own_latency_unless_one_is_typed() -> None:
    def latency(level: dict[str, Any]) -> float:
        cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 16, "fabric": [{}, level]})
        return cluster.fabric[1].latency_seconds

    assert latency({"network": "efa"}) == NETWORK_LATENCY_SECONDS["efa"] == 18e-6
    assert latency({"network": "efa", "latency": "5 us"}) == pytest.approx(5e-6)
    assert latency({}) == latency({"network": "infiniband"}) == latency({"network": "roce"}) == 4e-6
    with pytest.raises(SpecError, match="network"):
        latency({"network": "token-ring"})


@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_every_protocol_crosses_a_network_out_of_order_in_its_own_way(protocol: str) -> None:
    efa, usual = (fabric("a100-sxm-80gb", 32, {"network": kind}) for kind in ("efa", "roce"))
    own = next(p for p in LIBRARIES["ampere"].collectives if p.name == protocol)
    crossing = OUT_OF_ORDER[protocol]
    inside = own.base_seconds + 2 * 28 * own.inner_hop * 1.9e-6
    for on, hop, share, start, step in (
        (efa, crossing.hop, crossing.share, crossing.base_seconds, 18e-6),
        (usual, own.outer_hop, own.outer_share, 0.0, 4e-6),
    ):
        latency, per_byte = line(on, "ring", protocol, 32)
        assert latency == pytest.approx(inside + 2 * 3 * hop * step + start)
        slowest = min(8 * 25e9 * share, 300e9 * own.inner_share)
        copied = 1.0 / (LIBRARIES["ampere"].copy_share * 300e9) / 32
        assert per_byte == pytest.approx(2 * 31 / 32 / slowest + copied)
    assert line(efa, "ring", protocol, 8) == line(usual, "ring", protocol, 8)


def test_a_domain_is_left_through_so_many_nics_at_most() -> None:
    level = {"bandwidth": "400 Gb/s"}
    bound, free = (
        line(fabric("gb200-nvl72-186gb", 288, level, most_lanes=lanes), "ring", "Simple", 288)[1]
        for lanes in (9.0, float("inf"))
    )
    simple = LIBRARIES["blackwell"].collectives[-1]
    passes, copied = 2 * 287 / 288, 1.0 / (LIBRARIES["blackwell"].copy_share * 900e9) / 288
    assert bound == pytest.approx(passes / (9 * 50e9 * simple.outer_share) + copied)
    assert free == pytest.approx(passes / (900e9 * simple.inner_share) + copied)


def test_a_reduction_in_a_large_switch_starts_later_and_is_slower() -> None:
    level = {"bandwidth": "400 Gb/s"}
    given = {"in_switch_flag_seconds": 2e-6, "in_switch_decline": 0.5}
    plain = fabric("gb200-nvl72-186gb", 144, level, **dict.fromkeys(given, 0.0))
    marked = fabric("gb200-nvl72-186gb", 144, level, **given)
    for members, slower in ((4, 1.0), (8, 1.0), (72, 3.0)):
        before, after = (line(on, "nvls", "Simple", members) for on in (plain, marked))
        assert after[0] - before[0] == pytest.approx(members * 2e-6)
        assert after[1] == pytest.approx(slower * before[1])


def test_a_tree_goes_on_from_the_switch_over_two_nodes_only() -> None:
    for nodes, expected in ((2, True), (4, False)):
        on = fabric("h100-sxm-80gb", 8 * nodes, {})
        place = Placement.of(on, np.array([8.0 * nodes]), np.array([1.0]))
        found = [c for c in candidates("all-reduce", place) if c.algorithm.name == "nvls-tree"]
        assert [bool(c.line.applies[0]) for c in found] == [expected]


def test_the_chain_of_a_tree_costs_more_after_seven_hops() -> None:
    level = {"bandwidth": "400 Gb/s"}
    on = [fabric("gb200-nvl72-186gb", 288, level, long_chain_hop_seconds=x) for x in (None, 37e-6)]
    short, long = (line(one, "double-binary-tree", "Simple", 288)[0] for one in on)
    hop = LIBRARIES["blackwell"].collectives[-1].inner_hop * 1.9e-6
    assert long - short == pytest.approx(2 * (71 - 7) * (37e-6 - hop))
