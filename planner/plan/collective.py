"""The use case of the `collective` command: how long an operation takes on a cluster, and why."""

import math
from typing import cast

import numpy as np

from planner.cost.network.algorithms import ALGORITHMS
from planner.cost.network.collectives import Candidate, candidates, choose
from planner.cost.network.nccl import IDEAL
from planner.cost.network.rings_and_trees import ROOTED
from planner.cost.network.topology import Fabric, Placement
from planner.errors import Fault, SpecError, fault
from planner.specs.cluster import ClusterSpec
from planner.specs.collective import CollectiveAnswer, CollectiveCandidate, CollectiveOperation
from planner.units import EXAMPLES, counted, format_bytes, format_seconds

OPERATIONS: tuple[CollectiveOperation, ...] = (
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "p2p",
)  # fmt: skip
_SPELLINGS = {"send": "p2p", "sendrecv": "p2p", "pointtopoint": "p2p"} | {
    name.replace("-", ""): name for name in OPERATIONS
}
_ALGORITHM_SPELLINGS = {
    "switch": "direct",
    "binomialtree": "tree",
    "doubletree": "double-binary-tree",
} | {row.name.replace("-", ""): row.name for row in ALGORITHMS}


def collective(
    op: str,
    size_bytes: float,
    cluster: ClusterSpec,
    *,
    num_ranks: int | None = None,
    stride: int = 1,
    algorithm: str | None = None,
) -> CollectiveAnswer:
    """Seconds, steps and bytes of one operation.

    num_ranks: all GPUs unless given (two for p2p).
    stride: distance between neighbouring ranks of the group.
    algorithm: priced by its closed form on the fabric's own bandwidth and latency. None: the
        fastest of those that the library chooses from, with its measured curves.

    Raises SpecError naming the field, what was given, the rule and what would pass.
    """
    operation = _operation(op)
    ranks = _ranks(operation, size_bytes, cluster, num_ranks, stride)
    measured, ideal = Fabric.build(cluster), Fabric.build(cluster, library=IDEAL)
    group = np.array([float(ranks)]), np.array([float(stride)])
    place = Placement.of(measured, *group)
    calibrated = candidates(operation, place, automatic=False)
    on_paper = candidates(operation, Placement.of(ideal, *group), automatic=False)
    closed = {c.algorithm.name: c for c in on_paper}
    order, seconds = choose(calibrated, size_bytes)
    shown: dict[str, CollectiveCandidate] = {}
    for index in order:
        found, name = calibrated[index], calibrated[index].algorithm.name
        one = _candidate(found, closed[name], operation, size_bytes, seconds[index])
        shown.setdefault(name, one)
    ranked = tuple(shown.values())
    if algorithm is None:
        best, basis = next(c for c in ranked if c.automatic), measured.library.basis
        took, protocol = best.seconds, best.protocol
        why = _why(cluster, place, best, ranked, calibrated)
    else:
        best, basis = _named(algorithm, operation, ranked), IDEAL.basis
        took, protocol = best.closed_form_seconds, IDEAL.collectives[0].name
        why = (
            f"{best.summary}; closed form on the fabric's bandwidth and latency; with the "
            f"library's measured curves ({best.protocol}) it would take "
            f"{format_seconds(best.seconds)}. {_where(place, cluster)}"
        )
    factor = (2.0 if operation == "all-reduce" else 1.0) * (
        1.0 if operation in (*ROOTED, "p2p") else (ranks - 1.0) / ranks
    )
    return CollectiveAnswer(
        operation=operation,
        size_bytes=size_bytes,
        num_ranks=ranks,
        stride=stride,
        algorithm=best.algorithm,
        protocol=protocol,
        seconds=took,
        steps=best.steps,
        wire_bytes_per_rank=best.wire_bytes_per_rank,
        algorithm_bandwidth_bytes_per_second=size_bytes / took,
        bus_bandwidth_bytes_per_second=factor * size_bytes / took,
        basis=basis,
        why=why,
        candidates=ranked,
    )


def _operation(op: str) -> CollectiveOperation:
    plain = str(op).lower().replace("-", "").replace("_", "").replace(" ", "")
    if plain not in _SPELLINGS:
        raise fault("op", op, "no such operation", f"use {', '.join(OPERATIONS)}")
    return cast(CollectiveOperation, _SPELLINGS[plain])


def _ranks(
    operation: str, size_bytes: float, cluster: ClusterSpec, num_ranks: int | None, stride: int
) -> int:
    """Ranks of the group; raises SpecError with every fault at once."""
    faults = []
    if not (math.isfinite(size_bytes) and size_bytes > 0):
        example = f"use for example {EXAMPLES['bytes']}"
        faults.append(Fault("size", size_bytes, "must be positive", example))
    if stride < 1:
        faults.append(Fault("stride", stride, "must be at least 1", "use 1 for neighbours"))
    default = 2 if operation == "p2p" else max(cluster.num_gpus // max(stride, 1), 1)
    ranks, rule = default if num_ranks is None else num_ranks, ""
    if operation == "p2p" and ranks != 2:
        rule, remedy = "a p2p joins two ranks", "leave it out, or use 2"
    elif ranks < 2:
        rule, remedy = "must be at least 2", f"use a number up to {cluster.num_gpus}"
    elif stride >= 1 and (ranks - 1) * stride >= cluster.num_gpus:
        reach = f"{counted(ranks, 'rank')} {stride} apart reach beyond the "
        rule = f"{reach}{counted(cluster.num_gpus, 'GPU')} of the cluster"
        fitting = (cluster.num_gpus - 1) // stride + 1
        remedy = f"use at most {fitting}" if fitting > 1 else "use a smaller stride"
    if rule:
        faults.append(Fault("num_ranks", ranks, rule, remedy))
    if faults:
        raise SpecError(faults)
    return ranks


def _candidate(
    found: Candidate, closed: Candidate, operation: str, size_bytes: float, seconds: float
) -> CollectiveCandidate:
    line = closed.line
    return CollectiveCandidate(
        algorithm=found.algorithm.name,
        protocol=found.protocol.name,
        automatic=operation in found.algorithm.automatic,
        seconds=float(seconds),
        closed_form_seconds=float(line.latency_seconds[0] + line.seconds_per_byte[0] * size_bytes),
        steps=round(float(line.steps[0])),
        wire_bytes_per_rank=float(line.wire_share[0]) * size_bytes,
        summary=found.algorithm.summary,
    )


def _named(
    algorithm: str, operation: str, ranked: tuple[CollectiveCandidate, ...]
) -> CollectiveCandidate:
    plain = algorithm.lower().replace("-", "").replace("_", "").replace(" ", "")
    name = _ALGORITHM_SPELLINGS.get(plain)
    usable = f"use {' or '.join(c.algorithm for c in ranked)}, or leave it out"
    if name is None:
        raise fault("algorithm", algorithm, "no such algorithm", usable)
    row = next(row for row in ALGORITHMS if row.name == name)
    if operation not in row.operations:
        raise fault("algorithm", algorithm, f"does not do {operation}", usable)
    for found in ranked:
        if found.algorithm == name:
            return found
    raise fault("algorithm", algorithm, f"needs {row.needs}", usable)


def _where(place: Placement, cluster: ClusterSpec) -> str:
    """Which levels the group crosses, with how many members side by side."""
    parts = []
    for index, level in enumerate(cluster.fabric):
        if place.crossed[index][0]:
            members = int(place.fewest[index][0])
            rate = level.bandwidth_bytes_per_second / level.oversubscription / 1e9
            through = f"{members} x {rate:g} GB/s" if members > 1 else f"{rate:g} GB/s"
            joined = f"{int(place.extent[index][0])} {'units' if index else 'GPUs'} on {level.name}"
            parts.append(
                f"{joined} ({level.topology}) at {through}, {level.latency_seconds * 1e6:g} us a "
                "step"
            )
    uneven = "" if place.even[0] else " (the group straddles a boundary: its smallest part decides)"
    return f"{int(place.degree[0])} ranks: {', '.join(parts)}{uneven}."


def _why(
    cluster: ClusterSpec,
    place: Placement,
    best: CollectiveCandidate,
    ranked: tuple[CollectiveCandidate, ...],
    calibrated: list[Candidate],
) -> str:
    """The choice in plain sentences: the runner-up, the parts of the time, the group's place."""
    names = best.algorithm, best.protocol
    line = next(c.line for c in calibrated if (c.algorithm.name, c.protocol.name) == names)
    latency = float(line.latency_seconds[0])
    others = [c for c in ranked if c.automatic and c.algorithm != best.algorithm]
    versus = "nothing else runs here"
    if others:
        ratio = others[0].seconds / best.seconds
        versus = f"{others[0].algorithm} would take {ratio:.2f} times as long"
    share = (
        f"{latency / best.seconds:.0%} of the time is latency, the rest "
        f"{format_bytes(best.wire_bytes_per_rank)} a rank on the wire"
    )
    return (
        f"{best.algorithm} ({best.protocol}): {best.summary}; {versus}. {share}. "
        f"{_where(place, cluster)}"
    )
