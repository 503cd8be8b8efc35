"""The order that 1F1B and its interleaved and zero-bubble variants share.

Warm up, then one forward one backward, then drain.
A rank counts its work in chunks (one microbatch on one of its stages), n = v m of each kind.
Forward chunks go round by round: `per_round` microbatches on the first local stage, the same on the
second, and so on. Backward chunks mirror it.
Source: Narayanan et al. 2021 (PipeDream-Flush, interleaved); Qi et al. 2023 (W split off, delayed);
torch 2.13 pipelining/schedules.py gives the same orders (tests/unit/test_schedules_torch.py).
"""

from abc import abstractmethod
from functools import lru_cache

import numpy as np

from planner.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, ActionColumns
from planner.schedules.base import Floats, IntLike, Ints, Schedule, ScheduleRule


class DepthFirst(Schedule):
    """1F1B and its variants, which differ in their warm-up and in how late W is.

    All counts of microbatches are exact.
    """

    @abstractmethod
    def warmup(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> IntLike:
        """Forward chunks of a rank before its first backward, where there are as many."""

    def delay(self, rank: IntLike) -> IntLike:
        """Chunks by which W follows I, where they are two actions."""
        return rank

    def rank_order(self, rank: int, pp: int, v: int, m: int) -> ActionColumns:
        """Warm-up, then F and backward in turn, then the other backwards.

        With a W of its own, each I is followed by the W of `delay` chunks earlier, and the
        remaining W come at the end.
        """
        warmup = min(int(self.warmup(rank, pp, v, m)), v * m)
        delay = int(self.delay(rank)) if self.splits_backward else None
        return _order(rank, pp, v, m, warmup, delay)

    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(v m, warm-up + 1) / v."""
        warmup = self.warmup(rank, pp, v, m)
        return np.asarray(np.minimum(v * m, warmup + 1) / v, dtype=np.float64)

    def weight_grad_held(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """min(delay, v m - warm-up - 1) / v, not below 0, when `in_flight` last peaks."""
        if not self.splits_backward:
            return super().weight_grad_held(rank, pp, v, m)
        room = np.maximum(0, v * m - self.warmup(rank, pp, v, m) - 1)
        return np.asarray(np.minimum(self.delay(rank), room) / v, dtype=np.float64)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """The peak in flight, and right after an I when most chunks wait for W.

        These are min(delay + 1, v m).
        """
        whole, half = (of(rank, pp, v, m) for of in (self.in_flight, self.weight_grad_held))
        if not self.splits_backward:
            return ((whole, half),)
        late = np.minimum(np.asarray(self.delay(rank)) + 1, v * m) / v
        others = np.clip(m - late, 0.0, whole - 1.0 / v)
        return (whole, half), (np.asarray(others), np.asarray(late, dtype=np.float64))

    def repeats_after(self, pp: int, v: int, m: int) -> int:
        """One round of several stages a rank."""
        return int(microbatches_per_round(pp, m)) if v > 1 else 1


def _order(
    rank: int, pp: int, v: int, m: int, warmup: int, weight_delay: int | None
) -> ActionColumns:
    """Actions of one rank; weight_delay: None for full backwards (B).

    Turn t is forward chunk t + warmup, backward chunk t and the weight gradient of chunk t - d.
    Warm-up forwards have turns below 0.
    """
    chunks = v * m
    chunk_k, local_k, microbatch_k = _chunks(int(microbatches_per_round(pp, m)), v, chunks)
    first_k, last_k = local_k * pp + rank, (v - 1 - local_k) * pp + rank
    parts = [(FORWARD, first_k, 3 * (chunk_k - warmup))]
    if weight_delay is None:
        parts.append((BACKWARD, last_k, 3 * chunk_k + 1))
    else:
        parts.append((INPUT_GRAD, last_k, 3 * chunk_k + 1))
        parts.append((WEIGHT_GRAD, last_k, 3 * (chunk_k + weight_delay) + 2))
    order = np.argsort(np.concatenate([turn_k for _, _, turn_k in parts]), kind="stable")
    return ActionColumns(
        np.concatenate([stage_k for _, stage_k, _ in parts])[order],
        np.repeat([kind for kind, _, _ in parts], chunks)[order],
        np.tile(microbatch_k, len(parts))[order],
    )


@lru_cache(maxsize=64)
def _chunks(per_round: int, v: int, chunks: int) -> tuple[Ints, Ints, Ints]:
    """(number, local stage, microbatch) of each forward chunk, (k,)."""
    chunk_k = np.arange(chunks)
    local_k = chunk_k // per_round % v
    return (chunk_k, local_k, chunk_k // (per_round * v) * per_round + chunk_k % per_round)


def microbatches_per_round(pp: IntLike, m: IntLike) -> Ints:
    """Size k of a round: m / max(1, m // p).

    It is p where p divides m, a little more for the other counts that torch accepts, and m below p.
    """
    count = np.asarray(m, dtype=np.int64)
    return np.asarray(count // np.maximum(1, count // pp), dtype=np.int64)


def exchanges(pp: IntLike, m: IntLike) -> Floats:
    """Sends on the critical path of 1F1B where neighbours wait for each other's sends.

    2 m + 2 p - 5, for two ranks m + 1.
    """
    count = m
    return np.asarray(
        np.where(np.asarray(pp) > 2, 2.0 * count + 2.0 * pp - 5.0, count + 1.0), dtype=np.float64
    )


def whole_rounds(name: str) -> ScheduleRule:
    """Rule on m of the interleaved schedules: m is a multiple of max(1, m // p).

    torch: ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble raise ValueError otherwise.
    Megatron: microbatch_group_size_per_vp_stage may be set to the size of a round, so that equal
    rounds suffice. Five microbatches over four ranks were run (public row mci-small-050).
    """
    return ScheduleRule(
        field="micro_batch_size",
        rule=f"{name} needs microbatches in equal rounds: {{m}} is no multiple of {{m}} // "
        "pp={pp}",
        remedy="choose micro_batch_size, dp and global_batch_size so that pp divides the "
        "microbatches",
        holds=lambda pp, v, m: m % np.maximum(1, m // pp) == 0,
    )
