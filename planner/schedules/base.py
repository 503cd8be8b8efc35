"""Pipeline schedules: an order of actions per rank, the rules it runs under, closed forms.

p: pipeline ranks (`pp`).
v: stages per rank (`virtual_stages`).
m: microbatches.
S = p v: stages.
N: layouts (columns).
f, i, w: seconds of one microbatch over all stages of one rank for the forward, the input gradient
    and the weight gradient; b = i + w.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.schedules.actions import ActionColumns, Order, RankOrder, as_columns

Runtime = Literal["torch", "megatron"]
RUNTIMES: tuple[Runtime, ...] = ("torch", "megatron")
Exposed = Literal["none", "receive", "send", "turn"]
"""What a runtime cannot hide of its sends (`planner.trainers.transports`)."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
IntLike = Ints | int
FloatLike = Floats | float

ZERO_BUBBLE_FORK = "sail-sg/zero-bubble-pipeline-parallelism"  # of Megatron-LM


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """One condition under which a runtime accepts a schedule, as a column and as a message.

    field: the layout's field to change.
    rule, remedy: texts in which {pp}, {v} and {m} stand for the layout's numbers.
    holds: vectorised over columns (N,) of pp, v, m.
    key: the reason under which a search counts it; "" for the schedule's name with `field`.
    runtimes: whose condition it is.
    """

    field: str
    rule: str
    remedy: str
    holds: Callable[[Ints, Ints, Ints], Bools]
    key: str = ""
    runtimes: tuple[Runtime, ...] = RUNTIMES

    def describe(self, pp: int, v: int, m: int) -> tuple[str, str]:
        """(rule, remedy) with this layout's numbers filled in."""
        numbers = {"pp": pp, "v": v, "m": m}
        return self.rule.format(**numbers), self.remedy.format(**numbers)


class Schedule(ABC):
    """A pipeline schedule, without any state beyond these properties.

    name: as in the contract.
    single_stage: one stage per rank (v = 1); otherwise two or more.
    splits_backward: emits I and W as two actions.
    runtimes: pipeline runtimes that have it. A trainer runs the schedules of its own runtime.
    search_order: the search tries schedules in this order, lowest first.
    conditions: demands of its runtimes.
    fork: repository of the fork that adds it to a runtime; "" where the runtime itself has it.
    v_shaped: stage s and stage 2p - 1 - s share a rank, else stage s is on rank s mod p.
    synchronous_end: the optimizer step waits for the slowest rank (gradient clipping across
        stages). False: the fork validates afterwards, a rank starts its next step when its own work
        is done, and a step lasts as long as the longest rank's span.
    """

    name: str
    single_stage: bool
    splits_backward: bool
    runtimes: frozenset[Runtime]
    search_order: int
    conditions: tuple[ScheduleRule, ...]
    fork: str = ""
    v_shaped: bool = False
    synchronous_end: bool = True

    @abstractmethod
    def rank_order(self, rank: int, pp: int, v: int, m: int) -> RankOrder | ActionColumns:
        """The actions of one rank, first to last. Call only with a layout that `legal` accepts.

        One by one, or as columns, which a long order builds many times faster.
        """

    def rules(self, runtime: Runtime = "torch") -> tuple[ScheduleRule, ...]:
        """Demands of this runtime on the schedule."""
        return tuple(rule for rule in self.conditions if runtime in rule.runtimes)

    def bubble_seconds(
        self, pp: IntLike, v: IntLike, m: IntLike, f: FloatLike, i: FloatLike, w: FloatLike
    ) -> Floats:
        """Idle seconds of a rank, (N,), for equal stages and free sends.

        They are the step minus m (f + i + w). With whole backwards, exact:

            ((p - 1) + (v - 1) max(0, p - m)) (f + b) / v

        The second term is the wait for a microbatch to come round when fewer than p keep the loop
        busy.
        Source: Huang et al. 2018, section 2.3 (GPipe); Narayanan et al. 2021, sections 2.2.1 and
            2.2.2 (1F1B, interleaved for m a multiple of p); Lamy-Poirier 2023, section 4
            (LoopedBFS); the second term by counting stages.
        """
        waits = (pp - 1) + (v - 1) * np.maximum(0, pp - m)
        return np.asarray(waits * (f + i + w) / v, dtype=np.float64)

    @abstractmethod
    def in_flight(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Peak number of microbatches between F and I (or B) on this rank: chunks / v. (N,)."""

    def weight_grad_held(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Microbatches (chunks / v) between I and W at the `in_flight` peak. (N,).

        0 where W follows I.
        """
        return np.asarray(rank * 0.0 + pp * 0.0 + m * 0.0, dtype=np.float64)

    def peak_candidates(
        self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike
    ) -> tuple[tuple[Floats, Floats], ...]:
        """(microbatches between F and I or B, microbatches between I and W), each (N,).

        One pair for each point of the order at which a rank may hold most: after its last warm-up
        forward and, where W is an action of its own, after the first I behind it. A rank's memory
        is the largest of whole x saved bytes + half x bytes held from I until W.
        """
        whole, half = (of(rank, pp, v, m) for of in (self.in_flight, self.weight_grad_held))
        if not self.splits_backward:
            return ((whole, half),)
        return ((whole, half), (whole - 1.0 / v, half + 1.0 / v))

    def split_share(self, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Share of microbatches whose I and W are two actions, (N,), the mean over ranks."""
        return np.asarray(float(self.splits_backward) + pp * 0.0 + m * 0.0, dtype=np.float64)

    @abstractmethod
    def sends_on_critical_path(
        self, pp: IntLike, v: IntLike, m: IntLike, exposed: Exposed = "none"
    ) -> Floats:
        """Hops that lengthen the step: d(step) / d(send seconds), to first order, (N,).

        For short sends and equal stages.
        exposed: what the runtime cannot hide (`planner.trainers.transports`).
        """

    def overlapped_pairs(self, rank: IntLike, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Forwards that this rank runs together with a backward (`OverlappedPair`). (N,)."""
        return np.asarray(rank * 0.0 + pp * 0.0 + m * 0.0, dtype=np.float64)

    def pairs_on_critical_path(self, pp: IntLike, v: IntLike, m: IntLike) -> Floats:
        """Pairs that shorten the step: -d(step) / d(seconds saved by a pair), (N,).

        For equal stages.
        """
        return np.asarray(pp * 0.0 + m * 0.0, dtype=np.float64)

    def repeats_after(self, pp: int, v: int, m: int) -> int:
        """Microbatches after which the steady order repeats.

        More microbatches, in multiples of it, lengthen only the middle of a step.
        """
        return 1

    def actions(self, pp: int, v: int, m: int) -> Order:
        """One order of actions per pipeline rank. Call only with a layout that `legal` accepts."""
        return tuple(rank.items() for rank in self.columns(pp, v, m))

    def columns(self, pp: int, v: int, m: int) -> tuple[ActionColumns, ...]:
        return as_columns(self.rank_order(rank, pp, v, m) for rank in range(pp))

    def stage_rank(self, stage: IntLike, pp: IntLike, v: IntLike) -> Ints:
        """Pipeline rank that holds a stage.

        Looped: stage mod p.
        V-shaped: odd passes run backwards, 0 1 .. p-1 p-1 .. 1 0.
        Source: torch.distributed.pipelining generate_stage_to_rank_mapping, styles "loop" and "v".
        """
        index = np.asarray(stage, dtype=np.int64) % pp
        if not self.v_shaped:
            return index
        return np.where((np.asarray(stage) // pp) % 2 == 0, index, pp - 1 - index)

    def legal(self, pp: Ints, v: Ints, m: Ints, runtime: Runtime = "torch") -> Bools:
        result = np.ones(np.broadcast(pp, v, m).shape, dtype=np.bool_)
        for rule in self.rules(runtime):
            result &= rule.holds(pp, v, m)
        return result

    def violation(self, pp: int, v: int, m: int, runtime: Runtime = "torch") -> str | None:
        """The first broken rule with its remedy, None for a legal layout."""
        columns = (np.array([pp]), np.array([v]), np.array([m]))
        for rule in self.rules(runtime):
            if not rule.holds(*columns)[0]:
                return "; ".join(rule.describe(pp, v, m))
        return None


def one_stage_per_rank(name: str) -> ScheduleRule:
    """Rule of the single-stage schedules: v = 1."""
    return ScheduleRule(
        field="virtual_stages",
        rule=f"{name} runs one stage per rank, not {{v}}",
        remedy="set virtual_stages to 1, or use Interleaved1F1B",
        holds=lambda pp, v, m: v == 1,
    )


def several_stages_per_rank(name: str) -> ScheduleRule:
    """Rule of the looped schedules: v >= 2.

    TorchTitan's pipeline_parallel.py refuses a multi-stage schedule with one stage.
    """
    return ScheduleRule(
        field="virtual_stages",
        rule=f"{name} needs at least 2 stages per rank, not {{v}}",
        remedy="set virtual_stages to 2 or more, or use 1F1B",
        holds=lambda pp, v, m: v >= 2,
    )


def two_stages_per_rank(name: str) -> ScheduleRule:
    """Rule of the V-shaped schedules: v = 2.

    torch schedules.py: "requires exactly 2 stages per rank".
    """
    return ScheduleRule(
        field="virtual_stages",
        rule=f"{name} needs exactly 2 stages per rank, not {{v}}",
        remedy="set virtual_stages to 2",
        holds=lambda pp, v, m: v == 2,
    )
