"""Collective algorithms against brute force: messages by link, groups by rank."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from planner.cost.network.algorithms import ALGORITHMS
from planner.cost.network.collectives import candidates, collective_seconds
from planner.cost.network.nccl import IDEAL, LIBRARIES
from planner.cost.network.rings_and_trees import OPERATIONS
from planner.cost.network.topology import Fabric, Placement
from planner.errors import SpecError
from planner.plan.collective import collective
from tests.pricing import BANDWIDTH, LATENCY, cluster_of, flat

SIZE = 3e8
Point = tuple[int, ...]


def one(value: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([float(value)])


def walk(shape: Point, wrapped: bool, start: Point, end: Point) -> list[list[tuple[Point, Point]]]:
    """Shortest dimension-ordered routes; two where a wrapped dimension is half way round."""
    routes: list[list[tuple[Point, Point]]] = [[]]
    here = start
    for d, side in enumerate(shape):
        gap = (end[d] - start[d]) % side if wrapped else end[d] - start[d]
        ways = [gap] if not wrapped or 2 * gap <= side else []
        ways += [gap - side] if wrapped and 2 * gap >= side else []
        grown = []
        for way in ways:
            point, steps = here, []
            for _ in range(abs(way)):
                moved = list(point)
                moved[d] = (moved[d] + int(np.sign(way))) % side
                # The two links between the points of a ring of two are told apart by the way taken.
                steps.append((point, (*moved, int(np.sign(way)))))
                point = tuple(moved)
            grown.append(steps)
        routes = [route + steps for route in routes for steps in grown]
        here = (*end[: d + 1], *start[d + 1 :])
    return routes


@pytest.mark.parametrize(("shape", "topology"), [
    ((5,), "ring"), ((8,), "ring"), ((2, 4), "torus"), ((3, 3), "torus"), ((4, 4), "mesh"),
    ((2, 2, 4), "torus"),
])  # fmt: skip
def test_all_to_all_loads_the_busiest_link_of_a_grid(shape: Point, topology: str) -> None:
    """Directly, or dimension after dimension, the parts of the buffer in turn: the same links, k
    phases of r hops."""
    n, wrapped = math.prod(shape), topology != "mesh"
    load: Counter[Any] = Counter()
    points = itertools.product(*(range(side) for side in shape))
    for start, end in itertools.permutations(points, 2):
        routes = walk(shape, wrapped, start, end)
        for link in itertools.chain.from_iterable(routes):
            load[link] += SIZE / n / len(routes)
    seconds = max(load.values()) / (BANDWIDTH / (2 * len(shape)))
    given = {"topology": topology} | ({} if topology == "ring" else {"shape": list(shape)})
    fabric = Fabric.build(flat(n, latency=0.0, **given), library=IDEAL)
    found = candidates("all-to-all", Placement.of(fabric, one(n), one(1)), automatic=False)
    lines = {each.algorithm.name: each.line for each in found}
    grid = "torus" if wrapped else "mesh"
    for name in ("direct", grid):
        assert lines[name].seconds_per_byte[0] * SIZE == pytest.approx(seconds, rel=1e-9)
    steps = len(shape) * max(side // 2 if wrapped else side - 1 for side in shape)
    assert lines[grid].steps[0] == steps
    answer = collective("all-to-all", SIZE, flat(n, **given), algorithm=grid)
    assert answer.seconds == pytest.approx(seconds + steps * LATENCY, rel=1e-9)


def simulate_grid_reduce_scatter(shape: Point, wrapped: bool) -> float:
    """Seconds of k parts, part i along dimension i + phase, by the fullest link of each step.

    A closed ring sends half of each chunk either way; a line every chunk towards its owner, so a
    link passes side - 1.
    """
    k, link = len(shape), BANDWIDTH / (2 * len(shape))
    rest, seconds = [SIZE / k] * k, 0.0
    for phase in range(k):
        slowest = 0.0
        for part in range(k):
            side = shape[(part + phase) % k]
            rest[part] /= side
            busy = (side - 1) * rest[part] / (2 if wrapped else 1)
            slowest = max(slowest, (side - 1) * LATENCY + busy / link)
        seconds += slowest
    return seconds


@pytest.mark.parametrize("shape", [(4, 4), (8, 2), (2, 3), (4, 4, 4), (2, 4, 8)])
@pytest.mark.parametrize("topology", ["torus", "mesh"])
def test_reduce_scatter_over_a_grid(shape: Point, topology: str) -> None:
    """Latency and bytes of the slowest part are taken apart: an upper bound where three unequal
    sides meet."""
    expected = simulate_grid_reduce_scatter(shape, topology == "torus")
    grid = flat(math.prod(shape), topology=topology, shape=list(shape))
    answer = collective("reduce-scatter", SIZE, grid, algorithm=topology)
    exact = len(set(shape)) == 1 or len(shape) == 2
    assert expected * (1 - 1e-9) <= answer.seconds <= expected * (1 + 1e-9 if exact else 1.01)


@pytest.mark.parametrize(("ranks", "stride", "hops", "links"), [
    (8, 1, 7, 1 / 2),
    (8, 8, 7, 1 / 2),
    (4, 1, 3, 1 / 4),  # half a row is a line: one link one way
    (4, 2, 3 * 2, 1 / 4),  # every second point of a row shares links with the group in between
])  # fmt: skip
def test_groups_of_a_torus_use_the_links_of_their_dimensions_and_share_them(
    ranks: int, stride: int, hops: int, links: float
) -> None:
    torus = flat(64, topology="torus", shape=[8, 8])
    group = {"num_ranks": ranks, "stride": stride, "algorithm": "torus"}
    moved = (ranks - 1) / ranks * SIZE / (BANDWIDTH * links)
    found = collective("all-gather", SIZE, torus, **group).seconds
    assert found == pytest.approx(hops * LATENCY + moved)


def test_a_full_mesh_gives_a_pair_one_link() -> None:
    answer = collective("all-reduce", 4 * 2**30, cluster_of(8, gpu="mi300x-192gb"), num_ranks=2)
    assert answer.bus_bandwidth_bytes_per_second == pytest.approx(47.7e9, rel=0.15)


# Level by level, by hand: three nodes of four GPUs.


@pytest.mark.parametrize(("operation", "inside", "between", "steps"), [
    # between nodes a quarter of the buffer is left
    ("reduce-scatter", 3 / 4, 1 / 4 * 2 / 3, 5),
    ("all-gather", 3 / 4, 1 / 4 * 2 / 3, 5),
    ("all-reduce", 2 * 3 / 4, 2 * 1 / 4 * 2 / 3, 10),
    ("broadcast", 1.0, 1.0, 5),
    ("all-to-all", 3 / 4, 2 / 3, 5),
])  # fmt: skip
def test_a_hierarchical_collective_on_two_levels(
    operation: str, inside: float, between: float, steps: int
) -> None:
    node = {"gpus": 4, "bandwidth": 400e9, "latency": 1e-6}
    nodes = cluster_of(12, node, {"bandwidth": 50e9, "latency": 5e-6})
    answer = collective(operation, SIZE, nodes, algorithm="hierarchical")
    latency = steps / 5 * (3 * 1e-6 + 2 * 5e-6)
    moved = SIZE * (inside / 400e9 + between / 50e9)
    assert answer.seconds == pytest.approx(latency + moved, rel=1e-12)
    assert answer.steps == steps
    assert answer.wire_bytes_per_rank == pytest.approx(SIZE * (inside + between))


def brute_placement(degree: int, stride: int, gpus: int, num_gpus: int) -> tuple[int, int]:
    """(units that the widest group touches, members in the emptiest unit of one that crosses)."""
    widest, fewest, block = 1, degree, degree * stride
    for base in range(0, num_gpus - block + 1, block):
        for offset in range(stride):
            counts = Counter((base + offset + i * stride) // gpus for i in range(degree))
            widest = max(widest, len(counts))
            fewest = min(fewest, *counts.values()) if len(counts) > 1 else fewest
    return widest, fewest


@pytest.mark.parametrize(("gpus", "num_gpus"), [(4, 96), (6, 96), (8, 96), (8, 64)])
def test_placement_counts_every_group(gpus: int, num_gpus: int) -> None:
    fabric = Fabric.build(cluster_of(num_gpus, {"gpus": gpus}, {}))
    degrees = (*range(2, 25), 32, 64)
    for degree, stride in itertools.product(degrees, (*range(1, 17), 32)):
        if degree * stride > num_gpus:
            continue
        place = Placement.of(fabric, one(degree), one(stride))
        widest, fewest = brute_placement(degree, stride, gpus, num_gpus)
        assert place.units[1][0] == widest, (degree, stride)
        aligned = all(size.bit_count() == 1 for size in (degree, stride, gpus)) and widest > 1
        most = fewest if aligned else place.fewest[1][0] + 1
        assert place.fewest[1][0] <= fewest <= most, (degree, stride)
        assert fewest == place.fewest[1][0] or not aligned, (degree, stride)
        assert place.hops.sum() == degree - 1


def test_a_straddling_group_pays_for_the_boundary() -> None:
    """Two members leave the node through two NICs, eight through eight."""
    nodes = cluster_of(48)
    groups = (collective("all-gather", SIZE, nodes, num_ranks=ranks) for ranks in (4, 6, 16))
    inside, astride, whole = (group.seconds for group in groups)
    assert astride > max(3 * inside, 2 * whole)


@pytest.mark.parametrize(("ranks", "stride", "thin", "rate"), [
    (64, 1, 1, 8 * 50e9), (8, 8, 1, 50e9), (8, 8, 4, 50e9 / 4),
])  # fmt: skip
def test_members_side_by_side_leave_a_node_together_and_strided_groups_do_not_contend(
    ranks: int, stride: int, thin: int, rate: float
) -> None:
    """thin: how often the uplinks are oversubscribed."""
    inside = {"gpus": 8, "bandwidth": 450e9, "latency": 0}
    outside = {"bandwidth": 50e9, "latency": 0, "oversubscription": thin}
    group = {"num_ranks": ranks, "stride": stride, "algorithm": "ring"}
    found = collective("all-gather", SIZE, cluster_of(64, inside, outside), **group).seconds
    assert found == pytest.approx((ranks - 1) / ranks * SIZE / rate)


@pytest.mark.parametrize("library", [None, IDEAL])
@pytest.mark.parametrize("operation", [*OPERATIONS, "rotate"])
def test_columns_equal_single_groups_and_remember_them(operation: str, library: Any) -> None:
    fabric = Fabric.build(cluster_of(64), library=library)
    draw = np.random.default_rng(0)
    degree, stride = 2.0 ** draw.integers(0, 4, 200), 2.0 ** draw.integers(0, 3, 200)
    payload = 10.0 ** draw.uniform(0, 10, (3, 200))
    group = (payload, degree, stride, fabric)
    together = collective_seconds(operation, *group, base_seconds=1e-6)
    assert together.shape == payload.shape
    assert (collective_seconds(operation, *group, base_seconds=1e-6) == together).all()
    for index in range(0, 200, 17):
        at, fresh = slice(index, index + 1), dataclasses.replace(fabric, remembered={})
        alone = (payload[0, at], degree[at], stride[at], fresh)
        assert collective_seconds(operation, *alone, base_seconds=1e-6)[0] == together[0, index]


@pytest.mark.parametrize(
    "gpu",
    ["h100-sxm-80gb", "a100-pcie-80gb", "mi300x-192gb", "tpu-v5p", "gb200-nvl72-186gb", "cpu"],
)
def test_price_is_the_fastest_candidate_and_grows_with_size(gpu: str) -> None:
    fabric, sizes = Fabric.build(cluster_of(64, gpu=gpu)), np.geomspace(1e2, 1e10, 40)
    groups = [(2, 1), (8, 1), (8, 8), (64, 1), (6, 1), (3, 5)]
    for operation, (degree, stride) in itertools.product(OPERATIONS, groups):
        found = candidates(operation, Placement.of(fabric, one(degree), one(stride)))
        lines = [c.line for c in found if c.line.applies[0]]
        every = [line.latency_seconds[0] + line.seconds_per_byte[0] * sizes for line in lines]
        columns = np.full(len(sizes), float(degree)), np.full(len(sizes), float(stride))
        seconds = collective_seconds(operation, sizes, *columns, fabric, base_seconds=0.0)
        assert seconds == pytest.approx(np.min(every, axis=0), rel=1e-12)
        assert (np.diff(seconds) > 0).all()
        assert np.isfinite(seconds).all()


@pytest.mark.parametrize("topology", ["switch", "ring", "tree", "mesh", "torus"])
def test_more_bandwidth_and_less_latency_are_never_slower(topology: str) -> None:
    given = {"topology": topology} | ({"shape": [4, 4]} if topology == "torus" else {})
    operations = ("all-reduce", "all-gather", "broadcast", "all-to-all")
    for operation, size in itertools.product(operations, (1e4, 1e9)):
        base, wide, near = (
            collective(operation, size, flat(16, **given, **better)).seconds
            for better in ({}, {"bandwidth": 2 * BANDWIDTH}, {"latency": LATENCY / 2})
        )
        assert max(wide, near) <= base


def test_topologies_differ() -> None:
    shapes = {"switch": {}, "ring": {}, "tree": {}, "torus": {"shape": [4, 4, 4]}}
    seconds = {
        topology: collective("all-to-all", SIZE, flat(64, topology=topology, **shape)).seconds
        for topology, shape in shapes.items()
    }
    assert seconds["switch"] < seconds["torus"] < min(seconds["ring"], seconds["tree"])


def test_every_algorithm_is_reachable_and_lower_envelopes_are_flat_tables() -> None:
    names = [row.name for row in ALGORITHMS]
    assert len(set(names)) == len(names)
    assert {operation for row in ALGORITHMS for operation in row.automatic} == set(OPERATIONS)
    for library in LIBRARIES.values():
        assert library.source
        points = (*library.collectives, *library.exchange, *library.in_switch)
        assert all(0 < share <= 1 for p in points for share in (p.inner_share, p.outer_share))


def test_answer_explains_its_choice() -> None:
    answer = collective("AllReduce", 2**30, cluster_of(64))
    assert answer.operation == "all-reduce"
    assert answer.basis == "calibrated"
    assert answer.seconds == min(c.seconds for c in answer.candidates if c.automatic)
    assert answer.algorithm in answer.why
    assert "8 x 50 GB/s" in answer.why
    bus, own = answer.bus_bandwidth_bytes_per_second, answer.algorithm_bandwidth_bytes_per_second
    assert bus == pytest.approx(2 * 63 / 64 * own)
    assert [c.seconds for c in answer.candidates] == sorted(c.seconds for c in answer.candidates)


@pytest.mark.parametrize(("given", "field", "remedy"), [
    ({"op": "gossip"}, "op", "all-reduce"), ({"size_bytes": 0.0}, "size", "GiB"),
    ({"size_bytes": float("nan")}, "size", "GiB"), ({"num_ranks": 1}, "num_ranks", "up to 64"),
    ({"num_ranks": 65}, "num_ranks", "at most 64"),
    ({"num_ranks": 16, "stride": 8}, "num_ranks", "at most 8"), ({"stride": 0}, "stride", "use 1"),
    ({"algorithm": "carrier-pigeon"}, "algorithm", "ring"),
    ({"algorithm": "torus"}, "algorithm", "ring"), ({"algorithm": "pairwise"}, "algorithm", "ring"),
    ({"op": "p2p", "num_ranks": 3}, "num_ranks", "use 2"),
])  # fmt: skip
def test_wrong_requests_name_the_field_and_what_would_pass(
    given: dict[str, Any], field: str, remedy: str
) -> None:
    request: dict[str, Any] = {"op": "all-reduce", "size_bytes": 1e9, **given}
    with pytest.raises(SpecError) as error:
        collective(request.pop("op"), request.pop("size_bytes"), cluster_of(64), **request)
    assert error.value.faults[0].field == field
    assert remedy in error.value.faults[0].remedy
