"""Seconds of collectives on a fabric: the fastest line (algorithm x protocol) at each message size.

Letters: U groups, A lines. Payload is the whole buffer that is gathered, reduced or scattered; for
all-to-all what one rank sends.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.columns import FloatColumn, IntColumn
from planner.cost.network.algorithms import ALGORITHMS, Algorithm
from planner.cost.network.nccl import Protocol
from planner.cost.network.rings_and_trees import Line
from planner.cost.network.topology import Fabric, Links, Placement

Lines = tuple[FloatColumn, FloatColumn]  # latency and slope of A lines of U groups, (A, U) each

_STRIDES = 2.0**24  # (degree, stride) as one number; both are below 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One algorithm under one protocol, for U groups."""

    algorithm: Algorithm
    protocol: Protocol
    line: Line


def candidates(operation: str, place: Placement, *, automatic: bool = True) -> list[Candidate]:
    """Every algorithm for this operation under every protocol that carries it.

    automatic: only those that the library would choose.
    """
    found = []
    for row in ALGORITHMS:
        if operation not in (row.automatic if automatic else row.operations) or not row.possible(
            place.fabric
        ):
            continue
        found += [
            Candidate(
                algorithm=row,
                protocol=links.protocol,
                line=_started(row.cost(operation, place, links), place, links),
            )
            for links in place.fabric.links(row.protocols)
        ]
    return found


def _started(line: Line, place: Placement, links: Links) -> Line:
    """The line with what a network takes until its channels are full."""
    if place.fabric.ordered.all():
        return line
    starts = (place.crossed * links.crossing_seconds[:, None]).max(axis=0)
    return replace(line, latency_seconds=line.latency_seconds + starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Lines of the groups met so far: sorted codes (G,), latency and slope (A, G)."""

    codes: FloatColumn
    latency: FloatColumn
    slope: FloatColumn


def collective_seconds(
    operation: str,
    payload_bytes: FloatColumn,
    degree: FloatColumn,
    stride: FloatColumn,
    fabric: Fabric,
    *,
    base_seconds: float,
    nvls_gain: float = 1.0,
) -> FloatColumn:
    """Seconds of one collective over groups of `degree` ranks `stride` apart; 0 for a group of one.

    t = base_seconds + min over algorithms and protocols of (latency + slope x P)

    payload_bytes (U,) or (..., U).
    degree, stride (U,).
    base_seconds: the trainer's own time around a collective (launch, skew).
    nvls_gain: speed of in-switch reduction over the library's curve.
    Lines are computed once per distinct group of a fabric. Assumes that the library chooses well:
    NCCL's tuner compares the same lines (src/graph/tuning.cc).
    """
    lines = fastest_lines(operation, degree, stride, fabric, nvls_gain)
    return seconds_along(lines, payload_bytes, degree, base_seconds)


def seconds_along(
    lines: Lines, payload_bytes: FloatColumn, degree: FloatColumn, base_seconds: float
) -> FloatColumn:
    """`collective_seconds` over groups whose lines are known."""
    latency, slope = lines
    seconds = latency[0] + slope[0] * payload_bytes
    for index in range(1, len(latency)):
        seconds = np.minimum(seconds, latency[index] + slope[index] * payload_bytes)
    return np.where(degree > 1.0, base_seconds + seconds, 0.0)


def fastest_lines(
    operation: str, degree: FloatColumn, stride: FloatColumn, fabric: Fabric, nvls_gain: float
) -> Lines:
    """(latency, slope), each (A, U), of the lines that are fastest at some size."""
    key = (operation, nvls_gain)
    codes = degree * _STRIDES + stride
    known: _Known | None = fabric.remembered.get(key)
    if known is not None:
        at = np.minimum(np.searchsorted(known.codes, codes), len(known.codes) - 1)
        if (known.codes[at] == codes).all():
            return known.latency[:, at], known.slope[:, at]
    every = np.unique(codes) if known is None else np.union1d(known.codes, codes)
    known = _envelope(operation, every, fabric, nvls_gain)
    fabric.remembered[key] = known
    at = np.searchsorted(known.codes, codes)
    return known.latency[:, at], known.slope[:, at]


def _placement(fabric: Fabric, codes: FloatColumn) -> Placement:
    """Where these groups lie; operations that ask for the same groups share the answer."""
    key = codes.tobytes()
    place: Placement | None = fabric.remembered.get(key)
    if place is None:
        degree, stride = np.floor(codes / _STRIDES), codes % _STRIDES
        place = fabric.remembered[key] = Placement.of(
            fabric, np.maximum(degree, 1.0), np.maximum(stride, 1.0)
        )
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Carriers of one collective of each of U groups.

    algorithm: names. wire_share: bytes that the busiest rank sends, over the payload.
    level: index of the outermost level of the fabric that the group crosses.
    """

    algorithm: NDArray[np.str_]
    wire_share: FloatColumn
    level: IntColumn


def chosen(
    operation: str,
    payload_bytes: FloatColumn,
    degree: FloatColumn,
    stride: FloatColumn,
    fabric: Fabric,
    nvls_gain: float,
) -> Chosen:
    """The algorithm whose line gives `collective_seconds`, (U,); see there."""
    place = _placement(fabric, degree * _STRIDES + stride)
    found = candidates(operation, place)
    seconds = np.array(
        [
            np.where(
                c.line.applies,
                c.line.latency_seconds
                + c.line.seconds_per_byte
                / (nvls_gain if c.algorithm.protocols == "in_switch" else 1.0)
                * payload_bytes,
                np.inf,
            )
            for c in found
        ]
    )
    best, columns = seconds.argmin(axis=0), np.arange(len(degree))
    shares = np.array([np.broadcast_to(c.line.wire_share, len(degree)) for c in found])
    levels = np.arange(len(place.crossed))[:, None]
    return Chosen(
        algorithm=np.array([c.algorithm.name for c in found])[best],
        wire_share=shares[best, columns],
        level=np.where(place.crossed, levels, 0).max(axis=0),
    )


def _envelope(operation: str, codes: FloatColumn, fabric: Fabric, nvls_gain: float) -> _Known:
    """Lower envelope of all lines of each group.

    Every group gets the same number A of lines: shorter envelopes repeat their first.
    """
    found = candidates(operation, _placement(fabric, codes), automatic=True)
    gain = [nvls_gain if c.algorithm.protocols == "in_switch" else 1.0 for c in found]
    usable = np.array([c.line.applies for c in found])
    latency = np.where(usable, [c.line.latency_seconds for c in found], np.inf)
    slope = np.where(
        usable, [c.line.seconds_per_byte / g for c, g in zip(found, gain, strict=True)], np.inf
    )
    order = np.lexsort((slope, latency), axis=0)
    latency, slope = (
        np.take_along_axis(latency, order, axis=0),
        np.take_along_axis(slope, order, axis=0),
    )
    # A line with more latency helps only if its slope is below those of all lines before it.
    flatter = np.vstack(
        [
            np.ones((1, len(codes)), dtype=np.bool_),
            slope[1:] < np.minimum.accumulate(slope, axis=0)[:-1],
        ]
    )
    width = max(int(flatter.sum(axis=0).max()), 1)
    packed = np.argsort(~flatter, axis=0, kind="stable")[:width]
    kept = np.take_along_axis(flatter, packed, axis=0)
    first = packed[:1]
    packed = np.where(kept, packed, first)
    alone = codes < 2.0 * _STRIDES
    return _Known(
        codes=codes,
        latency=np.where(alone, 0.0, np.take_along_axis(latency, packed, axis=0)),
        slope=np.where(alone, 0.0, np.take_along_axis(slope, packed, axis=0)),
    )


def send_seconds(
    payload_bytes: FloatColumn,
    stride: FloatColumn,
    fabric: Fabric,
    degree: FloatColumn | None = None,
) -> FloatColumn:
    """Seconds to send a buffer to the rank `stride` away, (U,).

    t = min over protocols of (P / B + latency)
    B and the latency are of the level that joins the two ranks, where the sender is the first in
    its unit.
    degree: ranks of the chain (pipeline stages). With it, the result is the mean of degree - 1
        hops, of which ceil(degree x stride / g) - 1 leave a unit of g GPUs.
    """
    inner = np.concatenate([[1.0], fabric.gpus[:-1]])
    if degree is None:
        if any(shape is not None for shape in fabric.shapes):
            latency, slope = fastest_lines("p2p", np.full_like(stride, 2.0), stride, fabric, 1.0)
        else:
            joined = np.minimum((fabric.gpus[:, None] <= stride).sum(axis=0), len(inner) - 1)
            latency, slope = (
                lines[:, joined]
                for lines in fastest_lines("p2p", np.full_like(inner, 2.0), inner, fabric, 1.0)
            )
        return np.asarray((latency + slope * payload_bytes).min(axis=0))
    hops = np.maximum(degree - 1.0, 1.0)
    leaving = np.vstack(
        [
            hops,
            np.maximum(np.ceil(degree * stride / fabric.gpus[:-1, None]) - 1.0, 0.0),
            np.zeros_like(hops),
        ]
    )
    total = np.zeros_like(hops)
    for level, below in enumerate(inner):
        apart = np.maximum(stride, below)
        latency, slope = fastest_lines("p2p", np.full_like(apart, 2.0), apart, fabric, 1.0)
        here = np.minimum(leaving[level], hops) - np.minimum(leaving[level + 1], hops)
        total = total + here * (latency + slope * payload_bytes).min(axis=0)
    return np.asarray(total / hops)


def choose(found: list[Candidate], payload_bytes: float) -> tuple[IntColumn, FloatColumn]:
    """(order of the candidates from fastest to slowest, their seconds) for one group.

    The order leaves out those that cannot run.
    """
    seconds = np.array(
        [
            c.line.latency_seconds[0] + c.line.seconds_per_byte[0] * payload_bytes
            if c.line.applies[0]
            else np.inf
            for c in found
        ]
    )
    order = np.argsort(seconds, kind="stable")
    return order[np.isfinite(seconds[order])], seconds


__all__ = [
    "Candidate", "Chosen", "Lines", "candidates", "choose", "chosen", "collective_seconds",
    "fastest_lines", "seconds_along", "send_seconds",
]  # fmt: skip
