"""Collective algorithms against brute force: messages by link, groups by rank."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from planner.cost.network.algorithms import ALGORITHMS
from planner.cost.network.collectives import candidates, collective_seconds, send_seconds
from planner.cost.network.nccl import IDEAL, LIBRARIES
from planner.cost.network.rings_and_trees import OPERATIONS
from planner.cost.network.topology import Fabric, Placement
from planner.errors import SpecError
from planner.intake.machines import read_cluster
from planner.plan.collective import collective
from planner.specs.cluster import ClusterSpec

BANDWIDTH, LATENCY, SIZE = 100e9, 2e-6, 3e8
Point = tuple[int, ...]


def cluster(num_gpus: int, *levels: dict[str, Any], gpu: str = "h100-sxm-80gb") -> ClusterSpec:
    node = {} if num_gpus % 8 == 0 or num_gpus < 8 else {"gpus_per_node": num_gpus}
    return read_cluster(
        {"gpu": gpu, "num_gpus": num_gpus, **node, **({"fabric": list(levels)} if levels else {})}
    )


def flat(num_gpus: int, **level: Any) -> ClusterSpec:
    return cluster(
        num_gpus,
        {
            "gpus": num_gpus,
            "bandwidth": BANDWIDTH,
            "latency": LATENCY,
            "topology": "switch",
            **level,
        },
    )


def one(value: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([float(value)])


# Ring and tree on a switch: every message simulated.


def simulate_ring_all_reduce(n: int) -> tuple[float, list[set[tuple[int, int]]]]:
    """(seconds, (chunk, source) that each rank ends with), by 2 (n - 1) lockstep rounds."""
    held = [{chunk: {rank} for chunk in range(n)} for rank in range(n)]
    seconds = 0.0
    for step in range(2 * (n - 1)):
        messages = []
        for rank in range(n):
            chunk = (rank - step) % n if step < n - 1 else (rank + 1 - (step - n + 1)) % n
            messages.append(((rank + 1) % n, chunk, set(held[rank][chunk])))
        for target, chunk, content in messages:
            held[target][chunk] = held[target][chunk] | content
        seconds += LATENCY + SIZE / n / BANDWIDTH
    return seconds, [
        {(chunk, source) for chunk, sources in rank.items() for source in sources} for rank in held
    ]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_ring_all_reduce_step_by_step(n: int) -> None:
    seconds, held = simulate_ring_all_reduce(n)
    assert all(content == set(itertools.product(range(n), range(n))) for content in held)
    found = collective("all-reduce", SIZE, flat(n), algorithm="ring").seconds
    assert found == pytest.approx(seconds, rel=1e-12)


def double_tree(n: int) -> list[list[tuple[int, int]]]:
    """(child, parent) of an in-order binary tree over ranks and its mirror: Sanders et al. 2009."""

    def parent(rank: int) -> int | None:
        bit = rank & -rank if rank else 1 << (max(n - 1, 1)).bit_length()
        if rank == 0:
            return None
        up = (rank ^ bit) | (bit << 1)
        return up if up < n else rank ^ bit

    tree = [(rank, up) for rank in range(n) if (up := parent(rank)) is not None]
    return [tree, [(n - 1 - a, n - 1 - b) for a, b in tree]]


@pytest.mark.parametrize("n", [4, 8, 16, 32, 64])
def test_double_binary_tree_sends_at_most_twice_the_buffer(n: int) -> None:
    sent: Counter[int] = Counter()
    for tree in double_tree(n):
        assert len(tree) == n - 1
        for child, up in tree:
            sent[child] += 1
            sent[up] += 1
    answer = collective("all-reduce", SIZE, flat(n), algorithm="double-binary-tree")
    assert max(sent.values()) / 2 <= 2.0
    assert answer.wire_bytes_per_rank == max(sent.values()) / 2 * SIZE
    assert answer.steps == 2 * math.ceil(math.log2(n))


# Grids: bytes counted on every link of a torus or mesh.


def walk(shape: Point, wrapped: bool, start: Point, end: Point) -> list[list[tuple[Point, Point]]]:
    """Shortest dimension-ordered routes; two where a wrapped dimension is half way round."""
    routes: list[list[tuple[Point, Point]]] = [[]]
    here = start
    for d, side in enumerate(shape):
        gap = (end[d] - start[d]) % side if wrapped else end[d] - start[d]
        ways = (
            [gap]
            if not wrapped or 2 * gap < side
            else [gap - side]
            if 2 * gap > side
            else [gap, gap - side]
        )
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
    n, wrapped = math.prod(shape), topology != "mesh"
    load: Counter[Any] = Counter()
    points = list(itertools.product(*(range(side) for side in shape)))
    for start, end in itertools.permutations(points, 2):
        routes = walk(shape, wrapped, start, end)
        for route in routes:
            for link in route:
                load[link] += SIZE / n / len(routes)
    seconds = max(load.values()) / (BANDWIDTH / (2 * len(shape)))
    given = {} if topology == "ring" else {"shape": list(shape)}
    fabric = Fabric.build(flat(n, topology=topology, latency=0.0, **given), library=IDEAL)
    place = Placement.of(fabric, one(n), one(1))
    found = candidates("all-to-all", place, automatic=False)
    line = next(c.line for c in found if c.algorithm.name == "direct")
    assert line.seconds_per_byte[0] * SIZE == pytest.approx(seconds, rel=1e-9)
    grid = "torus" if wrapped else "mesh"
    # dimension after dimension, the parts of the buffer in turn: the same links, k phases of r hops
    of_grid = next(c.line for c in found if c.algorithm.name == grid)
    assert of_grid.seconds_per_byte[0] * SIZE == pytest.approx(seconds, rel=1e-9)
    reach = max(side // 2 if wrapped else side - 1 for side in shape)
    assert of_grid.steps[0] == len(shape) * reach
    slow = flat(n, topology=topology, **given)
    stated = seconds + len(shape) * reach * LATENCY
    answer = collective("all-to-all", SIZE, slow, algorithm=grid)
    assert answer.seconds == pytest.approx(stated, rel=1e-9)


def simulate_grid_reduce_scatter(shape: Point, wrapped: bool) -> float:
    """Seconds of k parts, part i along dimension i + phase, by the fullest link of each step."""
    k, link = len(shape), BANDWIDTH / (2 * len(shape))
    rest, seconds = [SIZE / k] * k, 0.0
    for phase in range(k):
        slowest = 0.0
        for part in range(k):
            side = shape[(part + phase) % k]
            chunk = rest[part] / side
            # A closed ring sends half of each chunk either way; a line every chunk towards its
            # owner, so a link passes side - 1.
            busy = (side - 1) * (chunk / 2 if wrapped else chunk)
            slowest = max(slowest, (side - 1) * LATENCY + busy / link)
            rest[part] = chunk
        seconds += slowest
    return seconds


@pytest.mark.parametrize("shape", [(4, 4), (8, 2), (2, 3), (4, 4, 4), (2, 4, 8)])
@pytest.mark.parametrize("topology", ["torus", "mesh"])
def test_reduce_scatter_over_a_grid(shape: Point, topology: str) -> None:
    expected = simulate_grid_reduce_scatter(shape, topology == "torus")
    answer = collective(
        "reduce-scatter",
        SIZE,
        flat(math.prod(shape), topology=topology, shape=list(shape)),
        algorithm=topology,
    )
    exact = len(set(shape)) == 1 or len(shape) == 2
    # Latency and bytes of the slowest part are taken apart: an upper bound where three unequal
    # sides meet.
    assert expected * (1 - 1e-9) <= answer.seconds <= expected * (1 + 1e-9 if exact else 1.01)


def test_groups_of_a_torus_use_the_links_of_their_dimensions_and_share_them() -> None:
    torus = flat(64, topology="torus", shape=[8, 8])

    def seconds(ranks: int, stride: int) -> float:
        group = {"num_ranks": ranks, "stride": stride, "algorithm": "torus"}
        return collective("all-gather", SIZE, torus, **group).seconds

    row, column = seconds(8, 1), seconds(8, 8)
    assert row == pytest.approx(column)
    bandwidth_term = 7 / 8 * SIZE / (BANDWIDTH / 2)
    assert row == pytest.approx(7 * LATENCY + bandwidth_term)
    # Half a row is a line: one link one way; every second point of a row shares links with the
    #     group in between.
    assert seconds(4, 1) == pytest.approx(3 * LATENCY + 3 / 4 * SIZE / (BANDWIDTH / 4))
    assert seconds(4, 2) == pytest.approx(3 * 2 * LATENCY + 3 / 4 * SIZE / (BANDWIDTH / 4))


def test_a_full_mesh_gives_a_pair_one_link() -> None:
    answer = collective("all-reduce", 4 * 2**30, cluster(8, gpu="mi300x-192gb"), num_ranks=2)
    assert answer.bus_bandwidth_bytes_per_second == pytest.approx(47.7e9, rel=0.15)


# Level by level, by hand: three nodes of four GPUs.


@pytest.mark.parametrize(
    ("operation", "inside", "between", "steps"),
    [
        (
            "reduce-scatter",
            3 / 4,
            1 / 4 * 2 / 3,
            5,
        ),  # between nodes a quarter of the buffer is left
        ("all-gather", 3 / 4, 1 / 4 * 2 / 3, 5),
        ("all-reduce", 2 * 3 / 4, 2 * 1 / 4 * 2 / 3, 10),
        ("broadcast", 1.0, 1.0, 5),
        ("all-to-all", 3 / 4, 2 / 3, 5),
    ],
)
def test_a_hierarchical_collective_on_two_levels(
    operation: str, inside: float, between: float, steps: int
) -> None:
    node = {"gpus": 4, "bandwidth": 400e9, "latency": 1e-6}
    nodes = cluster(12, node, {"bandwidth": 50e9, "latency": 5e-6})
    answer = collective(operation, SIZE, nodes, algorithm="hierarchical")
    latency = steps / 5 * (3 * 1e-6 + 2 * 5e-6)
    assert answer.seconds == pytest.approx(
        latency + SIZE * (inside / 400e9 + between / 50e9), rel=1e-12
    )
    assert answer.steps == steps
    assert answer.wire_bytes_per_rank == pytest.approx(SIZE * (inside + between))


# Placement: groups enumerated.


def brute_placement(degree: int, stride: int, gpus: int, num_gpus: int) -> tuple[int, int]:
    """(units that the widest group touches, members in the emptiest unit of one that crosses)."""
    widest, fewest, block = 1, degree, degree * stride
    for base in range(0, num_gpus - block + 1, block):
        for offset in range(stride):
            counts = Counter((base + offset + i * stride) // gpus for i in range(degree))
            widest = max(widest, len(counts))
            fewest = min(fewest, *counts.values()) if len(counts) > 1 else fewest
    return widest, fewest


@pytest.mark.parametrize("gpus", [4, 6, 8])
def test_placement_counts_every_group(gpus: int) -> None:
    num_gpus = 96
    fabric = Fabric.build(cluster(num_gpus, {"gpus": gpus}, {}))
    for degree, stride in itertools.product(range(2, 25), range(1, 17)):
        if degree * stride > num_gpus:
            continue
        place = Placement.of(fabric, one(degree), one(stride))
        widest, fewest = brute_placement(degree, stride, gpus, num_gpus)
        assert place.units[1][0] == widest, (degree, stride)
        assert place.fewest[1][0] <= fewest <= place.fewest[1][0] + 1, (degree, stride)
        assert place.hops.sum() == degree - 1


def test_a_straddling_group_pays_for_the_boundary() -> None:
    nodes = cluster(48)
    inside = collective("all-gather", SIZE, nodes, num_ranks=4).seconds
    astride = collective("all-gather", SIZE, nodes, num_ranks=6).seconds
    whole = collective("all-gather", SIZE, nodes, num_ranks=16).seconds
    assert astride > 3 * inside
    assert astride > 2 * whole  # two members leave the node through two NICs, eight through eight


def test_members_side_by_side_leave_a_node_together_and_strided_groups_do_not_contend() -> None:
    inside = {"gpus": 8, "bandwidth": 450e9, "latency": 0}
    two = cluster(64, inside, {"bandwidth": 50e9, "latency": 0})
    wide = collective("all-gather", SIZE, two, num_ranks=64, algorithm="ring").seconds
    strided = collective("all-gather", SIZE, two, num_ranks=8, stride=8, algorithm="ring").seconds
    assert wide == pytest.approx(63 / 64 * SIZE / (8 * 50e9))
    assert strided == pytest.approx(7 / 8 * SIZE / 50e9)
    thin = cluster(
        64,
        {"gpus": 8, "bandwidth": 450e9, "latency": 0},
        {"bandwidth": 50e9, "latency": 0, "oversubscription": 4},
    )
    assert collective(
        "all-gather", SIZE, thin, num_ranks=8, stride=8, algorithm="ring"
    ).seconds == pytest.approx(4 * strided)


def test_a_pipeline_sends_inside_the_node_most_of_the_time() -> None:
    fabric = Fabric.build(cluster(64), library=IDEAL)
    near, far = (send_seconds(one(SIZE), one(stride), fabric)[0] for stride in (1, 8))
    hops = [far if (rank + 4) // 8 != rank // 8 else near for rank in range(0, 28, 4)]
    assert send_seconds(one(SIZE), one(4), fabric, one(8))[0] == pytest.approx(np.mean(hops))
    assert near == pytest.approx(SIZE / 450e9 + 1.9e-6)
    assert far == pytest.approx(SIZE / 50e9 + 4e-6)


# The pricing path.


def test_columns_equal_single_groups_and_remember_them() -> None:
    fabric = Fabric.build(cluster(64))
    draw = np.random.default_rng(0)
    degree, stride = 2.0 ** draw.integers(0, 4, 200), 2.0 ** draw.integers(0, 3, 200)
    payload = 10.0 ** draw.uniform(3, 9, (3, 200))
    for operation in OPERATIONS:
        together = collective_seconds(operation, payload, degree, stride, fabric, base_seconds=1e-6)
        assert together.shape == payload.shape
        group = (payload, degree, stride, fabric)
        assert (collective_seconds(operation, *group, base_seconds=1e-6) == together).all()
        for index in range(0, 200, 17):
            fresh = dataclasses.replace(fabric, remembered={})
            at = slice(index, index + 1)
            single = collective_seconds(
                operation, payload[0, at], degree[at], stride[at], fresh, base_seconds=1e-6
            )
            assert single[0] == together[0, index]


@pytest.mark.parametrize(
    "gpu",
    ["h100-sxm-80gb", "a100-pcie-80gb", "mi300x-192gb", "tpu-v5p", "gb200-nvl72-186gb", "cpu"],
)
def test_price_is_the_fastest_candidate_and_grows_with_size(gpu: str) -> None:
    machine = cluster(64, gpu=gpu)
    fabric = Fabric.build(machine)
    sizes = np.geomspace(1e2, 1e10, 40)
    for operation, (degree, stride) in itertools.product(
        OPERATIONS, [(2, 1), (8, 1), (8, 8), (64, 1), (6, 1), (3, 5)]
    ):
        found = candidates(operation, Placement.of(fabric, one(degree), one(stride)))
        lines = [c.line for c in found if c.line.applies[0]]
        every = [line.latency_seconds[0] + line.seconds_per_byte[0] * sizes for line in lines]
        columns = np.full(len(sizes), float(degree)), np.full(len(sizes), float(stride))
        seconds = collective_seconds(operation, sizes, *columns, fabric, base_seconds=0.0)
        assert seconds == pytest.approx(np.min(every, axis=0), rel=1e-12)
        assert (np.diff(seconds) > 0).all()
        assert np.isfinite(seconds).all()


def test_a_group_of_one_is_free() -> None:
    fabric = Fabric.build(cluster(8))
    for operation in OPERATIONS:
        nothing = (one(1e9), one(1), one(1), fabric)
        assert collective_seconds(operation, *nothing, base_seconds=1e-5)[0] == 0.0


@pytest.mark.parametrize("topology", ["switch", "ring", "tree", "mesh", "torus"])
def test_more_bandwidth_and_less_latency_are_never_slower(topology: str) -> None:
    shape = {"shape": [4, 4]} if topology == "torus" else {}
    operations = ("all-reduce", "all-gather", "broadcast", "all-to-all")
    for operation, size in itertools.product(operations, (1e4, 1e9)):
        base = collective(operation, size, flat(16, topology=topology, **shape)).seconds
        assert (
            collective(
                operation, size, flat(16, topology=topology, bandwidth=2 * BANDWIDTH, **shape)
            ).seconds
            <= base
        )
        assert (
            collective(
                operation, size, flat(16, topology=topology, latency=LATENCY / 2, **shape)
            ).seconds
            <= base
        )


def test_topologies_differ() -> None:
    fabrics = {t: flat(64, topology=t) for t in ("switch", "ring", "tree")}
    seconds = {t: collective("all-to-all", SIZE, fabric).seconds for t, fabric in fabrics.items()}
    torus = flat(64, topology="torus", shape=[4, 4, 4])
    seconds["torus"] = collective("all-to-all", SIZE, torus).seconds
    assert seconds["switch"] < seconds["torus"] < seconds["ring"]
    assert seconds["torus"] < seconds["tree"]


def test_every_algorithm_is_reachable_and_lower_envelopes_are_flat_tables() -> None:
    names = [row.name for row in ALGORITHMS]
    assert len(set(names)) == len(names)
    assert {operation for row in ALGORITHMS for operation in row.automatic} == set(OPERATIONS)
    for library in LIBRARIES.values():
        assert library.source
        assert all(
            0 < p.inner_share <= 1 and 0 < p.outer_share <= 1
            for p in (*library.collectives, *library.exchange, *library.in_switch)
        )


# The use case.


def test_answer_explains_its_choice() -> None:
    answer = collective("AllReduce", 2**30, cluster(64))
    assert answer.operation == "all-reduce"
    assert answer.basis == "calibrated"
    assert answer.seconds == min(c.seconds for c in answer.candidates if c.automatic)
    assert answer.algorithm in answer.why
    assert "8 x 50 GB/s" in answer.why
    assert answer.bus_bandwidth_bytes_per_second == pytest.approx(
        2 * 63 / 64 * answer.algorithm_bandwidth_bytes_per_second
    )
    assert [c.seconds for c in answer.candidates] == sorted(c.seconds for c in answer.candidates)


@pytest.mark.parametrize(("given", "field", "remedy"), [
    ({"op": "gossip"}, "op", "all-reduce"),
    ({"size_bytes": 0.0}, "size", "GiB"),
    ({"size_bytes": float("nan")}, "size", "GiB"),
    ({"num_ranks": 1}, "num_ranks", "up to 64"),
    ({"num_ranks": 65}, "num_ranks", "at most 64"),
    ({"num_ranks": 16, "stride": 8}, "num_ranks", "at most 8"),
    ({"stride": 0}, "stride", "use 1"),
    ({"algorithm": "carrier-pigeon"}, "algorithm", "ring"),
    ({"algorithm": "torus"}, "algorithm", "ring"),
    ({"algorithm": "pairwise"}, "algorithm", "ring"),
    ({"op": "p2p", "num_ranks": 3}, "num_ranks", "use 2"),
])  # fmt: skip
def test_wrong_requests_name_the_field_and_what_would_pass(
    given: dict[str, Any], field: str, remedy: str
) -> None:
    request: dict[str, Any] = {"op": "all-reduce", "size_bytes": 1e9, **given}
    with pytest.raises(SpecError) as error:
        collective(request.pop("op"), request.pop("size_bytes"), cluster(64), **request)
    assert error.value.faults[0].field == field
    assert remedy in error.value.faults[0].remedy


# Reduce.


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_a_reduce_is_a_broadcast_backwards(op: str) -> None:
    """Ring: the buffer passes n - 1 hops in a pipeline. Tree: ceil(log2 n) times the buffer."""
    ring, tree = (
        collective(op, SIZE, flat(8), algorithm=name).seconds for name in ("ring", "tree")
    )
    assert ring == pytest.approx(7 * LATENCY + SIZE / BANDWIDTH, rel=1e-12)
    assert tree == pytest.approx(3 * (LATENCY + SIZE / BANDWIDTH), rel=1e-12)
