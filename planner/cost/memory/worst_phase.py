"""The phase of a step in which a pipeline rank needs most memory.

What lives in a phase is a sum of two: bytes of the rank's load (`cost.loads`), whatever schedule
runs it, and what the rank's place in the pipeline adds.
Letters: R ranks priced, N layouts, L loads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn

Bytes = FloatColumn | float


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

    copies: Bytes
    gradients: Bytes
    activations: Bytes
    logits: Bytes
    buffers: Bytes

    @property
    def moving(self) -> FloatColumn:
        return np.asarray(self.activations + self.logits + self.buffers)

    @property
    def total(self) -> FloatColumn:
        return self.moving + self.gradients + self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """Bytes of every phase of loads, and what a rank's index in its pipeline adds, (R, N).

    saved: activations, by phase. absent: gradients that are not there yet, by phase.
    received: buffers of receives, in all phases.
    """

    of_loads: Sequence[PhaseBytes]
    saved: Sequence[Bytes]
    absent: Sequence[Bytes]
    received: FloatColumn
    place: OnRanks

    def on_ranks(self) -> Iterator[PhaseBytes]:
        place = self.place
        for phase, saved, absent in zip(self.of_loads, self.saved, self.absent, strict=True):
            yield PhaseBytes(
                copies=place(phase.copies),
                gradients=place(phase.gradients) - absent,
                activations=place(phase.activations) + saved,
                logits=place(phase.logits),
                buffers=place(phase.buffers) + self.received,
            )

    def worst(self) -> tuple[IntColumn, FloatColumn, FloatColumn]:
        """(index of the worst phase, bytes in it, its share that comes and goes in a step), (R, N).

        Of equal ones it is the first.
        """
        totals = [phase.total for phase in self.of_loads]
        most = np.array(np.broadcast_arrays(*self._added(totals)))
        index = np.asarray(most.argmax(axis=0))
        moving = [
            self.place(phase.moving) + saved
            for phase, saved in zip(self.of_loads, self.saved, strict=True)
        ]
        return index, most.max(axis=0) + self.received, np.choose(index, moving) + self.received

    def most_of_compute(self, apart: Sequence[Bytes], holes: Bytes) -> FloatColumn:
        """The most that the stream of the compute holds in any phase, with holes, (R, N).

        apart: bytes of each phase, by load, that another stream allocated.
        holes: freed at the loss, which comes first, but smaller than what is asked for next.
        """
        own = [phase.total - other for phase, other in zip(self.of_loads, apart, strict=True)]
        own[0] = own[0] + holes
        return np.asarray(reduce(np.maximum, self._added(own)) + self.received)

    def _added(self, of_loads: Sequence[Bytes]) -> list[FloatColumn]:
        """Bytes of loads in each phase, and what the rank's index adds; receives left out."""
        return [
            np.asarray(self.place(one) + (saved - absent))
            for one, saved, absent in zip(of_loads, self.saved, self.absent, strict=True)
        ]
