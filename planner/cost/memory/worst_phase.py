"""The phase of a step in which a pipeline rank needs most memory.

What lives in a phase is a sum of two: bytes of the rank's load (`cost.loads`), whatever schedule
runs it, and what the rank's place in the pipeline adds, which is the same in each two phases.
Letters: R ranks priced, N layouts, L loads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from planner.columns import BoolColumn, Column, FloatColumn, IntColumn


@dataclass(frozen=True, slots=True)
class OnRanks:
    """Reads columns of loads (L,) on ranks (R, N).

    at (R, N): the load of each rank; None where columns of loads are those of ranks.
    """

    at: IntColumn | None

    def __call__(self, column: Column | float) -> Column:
        """The column on ranks; a number is one everywhere."""
        if self.at is None or np.ndim(column) == 0:
            return np.asarray(column)
        return np.asarray(column).take(self.at)


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes alive in one phase, besides optimizer state and resident parameters.

    copies: gathered parameters that stay from forward to backward.
    gradients: shards, and whole gradients that wait.
    activations: saved for backward, and what the running backward needs.
    logits: at the loss.
    buffers: of gathers, reductions and a pipeline's receives.
    """

    copies: FloatColumn | float
    gradients: FloatColumn | float
    activations: FloatColumn | float
    logits: FloatColumn | float
    buffers: FloatColumn | float

    @property
    def moving(self) -> FloatColumn:
        return np.asarray(self.activations + self.logits + self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceBytes:
    """Bytes that a rank's index in its pipeline adds, (R, N), in each two phases in turn.

    activations: saved.
    total: the same less gradients that are not there yet.
    received: buffers of receives, in all phases.
    """

    activations: tuple[FloatColumn | float, ...]
    total: tuple[FloatColumn | float, ...]
    received: FloatColumn

    def added(self, phases: Sequence[PhaseBytes], place: OnRanks) -> Iterator[PhaseBytes]:
        """The phases of loads as those of ranks."""
        for index, phase in enumerate(phases):
            saved, total = self.activations[index // 2], self.total[index // 2]
            yield PhaseBytes(
                copies=place(phase.copies),
                gradients=place(phase.gradients) + (total - saved),
                activations=place(phase.activations) + saved,
                logits=place(phase.logits),
                buffers=place(phase.buffers) + self.received,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The worst phase of every rank, (R, N).

    bytes: in it. moving: of them, what comes and goes within a step.
    pair: which two phases it is one of. seconds: for each two, whether the second is worse, (L,).
    own: the most that the stream of the compute holds in any phase, with holes; `bytes` where
        streams are not told apart.
    """

    bytes: FloatColumn
    moving: FloatColumn
    pair: IntColumn
    seconds: list[BoolColumn]
    own: FloatColumn


@dataclass(frozen=True, slots=True)
class Streams:
    """Bytes of each phase, by load, allocated by another stream, and holes (0 or more).

    holes: freed by then, but smaller than what is asked for next; at the loss.
    """

    apart: Sequence[FloatColumn | float]
    holes: FloatColumn | float

    @property
    def most_apart(self) -> FloatColumn:
        return np.asarray(reduce(np.maximum, self.apart))


def worst_phase(
    phases: Sequence[PhaseBytes], by_place: PlaceBytes, streams: Streams | None, place: OnRanks
) -> Worst:
    """The worst of an even number of phases; of equal ones the first.

    streams: None if `own` is not asked for.
    """
    moving, seconds = [], []
    most = own = saved = np.zeros(0)
    pair = np.zeros(0, dtype=np.int64)
    for index in range(len(phases) // 2):
        two = phases[2 * index : 2 * index + 2]
        here = [phase.moving for phase in two]
        totals = [now + p.gradients + p.copies for now, p in zip(here, two, strict=True)]
        later = totals[1] > totals[0]
        moving.append(np.where(later, here[1], here[0]))
        seconds.append(later)
        added = by_place.total[index]
        total = place(np.maximum(*totals)) + added
        if index:
            worse = total > most
            np.copyto(most, total, where=worse)
            np.copyto(pair, index, where=worse)
            np.copyto(saved, by_place.activations[index], where=worse)
        else:
            most, pair = np.array(total), np.zeros(np.shape(total), dtype=np.int64)
            saved = np.broadcast_to(by_place.activations[0], most.shape).copy()
        if streams is not None:
            ours = [
                total - other
                for total, other in zip(totals, streams.apart[2 * index :][:2], strict=True)
            ]
            if not index:
                ours[0] = ours[0] + streams.holes
            held = place(np.maximum(*ours)) + added
            own = np.maximum(own, held, out=own) if index else np.array(held)
    received = by_place.received
    if received.any():
        most, saved = most + received, saved + received
        own = own + received if streams is not None else own
    return Worst(
        bytes=most,
        moving=saved + chosen(pair, moving, place),
        pair=pair,
        seconds=seconds,
        own=most if streams is None else own,
    )


def chosen(pair: IntColumn, columns: Sequence[Column], place: OnRanks) -> Column:
    """On each rank the column of its pair of phases: (R, N), (L,) each -> (R, N)."""
    if place.at is None:
        return np.asarray(np.choose(pair, [np.broadcast_to(x, pair.shape) for x in columns]))
    table = np.concatenate(columns)
    return table.take(pair * len(columns[0]) + place.at)
