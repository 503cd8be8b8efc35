"""Seconds of a pipeline's sends, by the trainer's transport and by where its ranks lie.

Letters: N layouts, R pipeline ranks.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.columns.table import Table
from planner.cost.layer.trainer_kernels import fused_kernels
from planner.cost.network.collectives import send_seconds
from planner.cost.prepared_job import PreparedJob
from planner.schedules import SCHEDULES
from planner.specs.training import TrainingSpec
from planner.trainers.registry import TRAINERS
from planner.trainers.transports import Transport


def transport_of(training: TrainingSpec, schedule: str) -> Transport:
    """Transport of this schedule's sends in this run."""
    return TRAINERS[training.trainer].framework.transport(
        schedule, training.trainer_version, overlap=training.overlap.pp
    )


def alike_sends(training: TrainingSpec, codes: IntColumn) -> list[list[int]]:
    """The schedules of these codes, those together whose sends take the same time."""
    alike: dict[tuple[bool, bool], list[int]] = {}
    for code in codes.tolist():
        transport = transport_of(training, SCHEDULES.of_code(code).name)
        alike.setdefault((transport.splits, transport.synchronises), []).append(code)
    return list(alike.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends(Table):
    """Columns on which the sends of N layouts depend.

    payload_bytes (N,): activation that one rank holds at a stage boundary.
    """

    job: PreparedJob
    batch: LayoutBatch
    payload_bytes: FloatColumn

    def mean_seconds(self) -> FloatColumn:
        """Seconds of one hop to the next rank, (N,), the mean over the pipeline's p - 1.

        0 without a pipeline.
        """
        shared = send_seconds(
            self.on_wire(), self._stride(), self.job.fabric, degree=self.batch.pp.astype(np.float64)
        )
        return np.where(self.batch.pp > 1, shared + self._around(), 0.0)

    def hop_seconds(self, num_ranks: int) -> tuple[FloatColumn, FloatColumn]:
        """(seconds, seconds while the rank sends another transfer too) of every hop, (N, R) each.

        A hop leads from each rank to the next, from the last to the first. Two transfers of a rank
        that leave by the same level of the fabric share its port and take twice as long. Call it
        only for layouts with pp = num_ranks.
        """
        level = self.levels(num_ranks)
        stride, wire = self._stride(), self.on_wire()
        below = np.concatenate([[1.0], self.job.fabric.gpus[:-1]])
        by_level = np.array(
            [send_seconds(wire, np.maximum(stride, inner), self.job.fabric) for inner in below]
        )
        alone = np.take_along_axis(by_level.T, level, axis=1)
        shares = (level == np.roll(level, 1, axis=1)) | (level == np.roll(level, -1, axis=1))
        return alone + self._around()[:, None], alone * np.where(shares, 2.0, 1.0) + self._around()[
            :, None
        ]

    def levels(self, num_ranks: int) -> IntColumn:
        """Innermost level that joins each rank with the next, (N, R).

        It is the first level whose unit holds both, for the pipeline that begins at rank 0.
        """
        place = self._stride()[:, None] * np.arange(num_ranks)
        after = np.roll(place, -1, axis=1)
        apart = [
            np.floor(place / gpus) != np.floor(after / gpus) for gpus in self.job.fabric.gpus[:-1]
        ]
        return (
            np.sum(apart, axis=0, dtype=np.int64)
            if apart
            else np.zeros(place.shape, dtype=np.int64)
        )

    def _stride(self) -> FloatColumn:
        return self.job.group("pp", self.batch)[1]

    def _by_schedule(self, field: str) -> BoolColumn:
        codes = self.batch.pp_schedule
        named = np.zeros(len(SCHEDULES), dtype=np.bool_)
        for code in np.flatnonzero(np.bincount(codes)):
            schedule = SCHEDULES.of_code(int(code)).name
            named[code] = getattr(transport_of(self.job.training, schedule), field)
        return named[codes]

    def _splits(self) -> BoolColumn:
        """Whether the ranks of a TP group each send a share of the activation that all hold."""
        return self._by_schedule("splits") & (self.batch.tp > 1) & ~self.batch.sequence_parallel

    def on_wire(self) -> FloatColumn:
        """Bytes that one rank sends over a stage boundary, (N,)."""
        splits = self._splits()
        return (
            np.where(splits, self.payload_bytes / self.batch.tp, self.payload_bytes)
            if splits.any()
            else self.payload_bytes
        )

    def _around(self) -> FloatColumn:
        """Seconds of each hop besides the wire, (N,).

        The trainer's own, gathering what was split, and launching anew after a synchronisation.
        """
        profile = self.job.profile
        seconds = np.full(len(self.batch), profile.collective_seconds)
        splits, synchronises = self._splits(), self._by_schedule("synchronises")
        if splits.any():
            group = self.job.group("tp", self.batch)
            gathered = self.job.collective_seconds("all-gather", self.payload_bytes, group)
            seconds += np.where(splits, gathered, 0.0)
        if synchronises.any():  # kernels that are fused take longer to launch
            fused = fused_kernels(self.batch, self.job.rules)
            seconds += np.where(
                synchronises,
                np.where(fused, profile.fused_launch_seconds, profile.launch_seconds),
                0.0,
            )
        return seconds
