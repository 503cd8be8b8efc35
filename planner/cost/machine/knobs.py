"""Calibration: every knob of the profile with its prior, and the posterior over all knobs.

A knob is a number of `Profile` (one value per trainer) or a factor on `KernelProfile` (one per GPU
family). Its shift is a shared part, which all trainers or families have in common, plus an own
part. A trainer or family that was never measured moves with the others, with more variance.
Letters: K knobs, P unknowns (shared and own shifts), D directions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from planner.columns import FloatColumn
from planner.cost.machine.profile import (
    KERNELS,
    AttentionCurve,
    KernelProfile,
    Profile,
    kernel_profile,
    software_profile,
)
from planner.cost.machine.stacks import STACK, UNIT, memory_class
from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import KERNEL_ROWS
from planner.trainers.registry import TRAINERS
from planner.units import GIB

Scope = Literal["trainer", "family"]
Key = tuple[str, str]  # knob, and trainer or family; "" for the shared part
OWN_SHARE = 1.0  # standard deviation of an own shift over that of the shared one; judgement
DIRECTIONS = 7
MOST_MEMORY_RATE = 0.97
LARGEST_RATES_SD = 0.3  # of a GPU family without kernel timings; judgement
# What a family without any timing adds to the variance, by how much measured families differ: in
# the share of the memory bandwidth (0.70 to 0.85), in float8 against bf16 (1.5 to 2.3 times), in
# the communication library inside a node (0.52 to 0.81).
UNKNOWN_FAMILY_SD: Mapping[str, float] = {
    "memory": 0.08,
    "low_precision_gemm": 0.20,
    "intra_node": 0.20,
}
RATES = frozenset({"gemm", "flash2", "vendor"})
# Generations of fused attention that the knob `vendor` moves: those that use what its GPU has over
# the one before (Hopper's asynchronous copies and matrix units). `flash2` moves the others.
VENDOR_ATTENTION = frozenset({"flash3", "cudnn", "cudnn-9.17", "ck"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One number that calibration may move.

    prior: its centre before any run was fitted.
    sd: standard deviation of the shared shift.
    share: the number is a share in (0, 1) and moves on the logit scale, otherwise on the logarithm.
    place_sd: standard deviation between clusters (hosts, networks) of one trainer and GPU;
        judgement.
    """

    name: str
    prior: float
    sd: float
    scope: Scope
    share: bool = False
    place_sd: float = 0.0

    def moved(self, shift: float) -> float:
        if not self.share:
            return float(self.prior * np.exp(shift))
        odds = self.prior / (1.0 - self.prior) * np.exp(shift)
        return float(odds / (1.0 + odds))

    def own(self, trainer: str, family: str) -> str:
        """The trainer or GPU family whose own part of the shift counts."""
        return trainer if self.scope == "trainer" else family

    def variance(self, scope: str) -> float:
        """Prior variance of the shared part (scope "") or of an own part.

        For a GPU family it includes the variance inflation of its kernels.
        """
        if not scope:
            return self.sd**2
        return (OWN_SHARE * self.sd) ** 2 + (rates_sd(scope) ** 2 if self.name in RATES else 0.0)


# Priors are judgements made before any run was evaluated, except where a source is named.
KNOBS: tuple[Knob, ...] = (
    Knob(name="compute", prior=0.80, sd=0.12, scope="trainer"),
    # Kernels of one recipe deviate from the curves by 7 to 11% (micro.csv), and its casts as much.
    Knob(name="low_precision", prior=1.0, sd=0.12, scope="trainer"),
    Knob(name="attention", prior=1.0, sd=0.15, scope="trainer"),
    Knob(name="elementwise", prior=1.0, sd=0.25, scope="trainer"),
    # Both are shares of what a mechanism could hide: chunks of 1 / n run below the rate of a whole
    # GEMM, and the copies take SMs or memory bandwidth from it. Judgement.
    Knob(name="tp_hidden", prior=0.65, sd=0.7, scope="trainer", share=True),
    Knob(name="async_tp_hidden", prior=0.65, sd=0.5, scope="trainer", share=True),
    # Only where `training.overlap.ep` is on: the exchange of one microbatch runs under another's
    # compute, of which launches and the pipeline's ends leave some exposed; judgement.
    Knob(name="ep_hidden", prior=0.70, sd=1.0, scope="trainer", share=True),
    Knob(name="cp_hidden", prior=0.60, sd=1.0, scope="trainer", share=True),
    Knob(name="dp_hidden", prior=0.80, sd=0.7, scope="trainer", share=True),
    Knob(name="overlap_slowdown", prior=0.12, sd=0.5, scope="trainer"),
    Knob(name="launch_seconds", prior=9e-6, sd=0.4, scope="trainer", place_sd=0.2),
    # A Transformer Engine module: Python, autograd function and several kernels. TransformerEngine
    # issue tracker: 30 to 100 us a call.
    Knob(name="fused_launch_seconds", prior=40e-6, sd=0.7, scope="trainer", place_sd=0.2),
    Knob(name="fixed_step_seconds", prior=0.02, sd=0.7, scope="trainer", place_sd=0.4),
    # 1% a doubling of GPUs over ln 2, see `cost.stragglers`; clusters differ by their worst hosts.
    Knob(name="straggler_delay", prior=0.0144, sd=0.5, scope="trainer", place_sd=0.4),
    Knob(name="inter_node", prior=0.95, sd=0.15, scope="trainer", place_sd=0.15),
    Knob(name="intra_node", prior=0.95, sd=0.10, scope="trainer", place_sd=0.05),
    Knob(name="gemm", prior=1.0, sd=0.06, scope="family"),
    Knob(name="gemm_half_depth", prior=1.0, sd=0.3, scope="family"),
    Knob(name="low_precision_gemm", prior=1.0, sd=0.10, scope="family"),
    # micro.csv: the half depth of fp8 and fp4 is known within a factor of 1.4
    Knob(name="low_precision_half_depth", prior=1.0, sd=0.3, scope="family"),
    # 0.36 on Blackwell, 0.46 on CDNA3, 0.53 on Ampere and Hopper (`gpu_families.SILICON`)
    Knob(name="power_exponent", prior=1.0, sd=0.2, scope="family"),
    Knob(name="memory", prior=1.0, sd=0.08, scope="family"),
    Knob(name="flash2", prior=1.0, sd=0.12, scope="family"),
    Knob(name="vendor", prior=1.0, sd=0.12, scope="family"),
    Knob(name="attention_backward", prior=1.0, sd=0.10, scope="family"),
)
PLACE: Mapping[str, int] = {knob.name: place for place, knob in enumerate(KNOBS)}
PLACE_SD = np.array([knob.place_sd for knob in KNOBS])


def profile_at(trainer: str, shifts: FloatColumn) -> Profile:
    values: dict[str, Any] = {
        knob.name: knob.moved(shifts[index])
        for index, knob in enumerate(KNOBS)
        if knob.scope == "trainer"
    }
    return replace(software_profile(TRAINERS[trainer]), **values)


def kernels_at(gpu: GpuSpec, shifts: FloatColumn) -> KernelProfile:
    base = kernel_profile(gpu)
    by = {
        knob.name: knob.moved(shifts[index])
        for index, knob in enumerate(KNOBS)
        if knob.scope == "family"
    }
    half = "gemm_bf16"
    return replace(
        base,
        gemm={
            key: share * by["gemm"] * (1.0 if key == half else by["low_precision_gemm"])
            for key, share in base.gemm.items()
        },
        gemm_half_depth={
            key: depth * by["gemm_half_depth" if key == half else "low_precision_half_depth"]
            for key, depth in base.gemm_half_depth.items()
        },
        memory=min(base.memory * by["memory"], MOST_MEMORY_RATE),
        attention={
            name: _scaled(
                curve,
                by["vendor" if name in VENDOR_ATTENTION else "flash2"],
                by["attention_backward"],
            )
            for name, curve in base.attention.items()
        },
        power_exponent=base.power_exponent * by["power_exponent"],
    )


def rates_sd(family: str) -> float:
    """Standard deviation of a GPU family's kernel rates.

    It holds as long as no training run on the family was measured.
    """
    return KERNELS[KERNEL_ROWS[family]].rates_sd if family in KERNEL_ROWS else LARGEST_RATES_SD


def place_sd(family: str) -> FloatColumn:
    """Standard deviation of each knob on a cluster never measured, (K,).

    It is that between clusters; for an unknown GPU family that between families is added.
    """
    if family in KERNEL_ROWS:
        return PLACE_SD
    return np.asarray(np.hypot(PLACE_SD, [UNKNOWN_FAMILY_SD.get(knob.name, 0.0) for knob in KNOBS]))


def _scaled(curve: AttentionCurve, factor: float, backward: float) -> AttentionCurve:
    return replace(
        curve, forward=curve.forward * factor, backward=curve.backward * factor * backward
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRuns:
    """Runs of one's own that are left out, because step times have changed since.

    runs: how many. since: ISO 8601, of the first run after the change. statement: what changed.
    """

    runs: int
    since: str
    statement: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A posterior over the knobs.

    keys (P): order of shifts (P,) and covariance (P, P).
    sensitivity (K, K): mean of g g' over the fitted runs; g is the derivative of log seconds by
        each knob.
    run_sd, stack_sd, unit_sd: scales of log seconds, estimated from the runs: of a run around the
        model, of what all runs of one stack have in common, and of what those of one of its units
        have besides (`stacks`). All are scales of a Student t (`calibration.student`).
    own_run_sd: scale of what the runs of one stack scatter by among each other, where all of them
        count fully: the noise of a run of one's own about its stack's offset.
    own_runs: runs of one's own that it has seen, by unit.
    memory_sd, memory_sd_bytes: of measured over predicted bytes, see `Profile`.
    seen: (trainer, GPU family, feature) that were measured.
    fitted: fingerprints of the runs.
    place: share of `Knob.place_sd` that is still unknown, 1 for a cluster never measured.
    stale: runs of one's own that it leaves out.
    interval_factors: on the width of 90% intervals, by `calibration.classes` and `memory_class`.
    waiting: measured over predicted seconds of the furthest layout of one's own that it does not
        believe before a second one is as far off, by stack.
    """

    id: str
    keys: tuple[Key, ...]
    shifts: FloatColumn
    covariance: FloatColumn
    sensitivity: FloatColumn
    run_sd: float
    stack_sd: float
    unit_sd: float
    own_run_sd: float
    memory_sd: float
    memory_sd_bytes: float
    seen: frozenset[tuple[str, str, str]]
    fitted: frozenset[str]
    place: float = 1.0
    own_runs: Mapping[str, int] = field(default_factory=dict)
    stale: StaleRuns | None = None
    waiting: Mapping[str, float] = field(default_factory=dict)
    interval_factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def prior(cls) -> "Calibration":
        return cls(
            id="prior",
            keys=(),
            shifts=np.zeros(0),
            covariance=np.zeros((0, 0)),
            sensitivity=np.eye(len(KNOBS)) / len(KNOBS),
            run_sd=0.05,
            stack_sd=0.10,
            unit_sd=0.10,
            own_run_sd=0.035,
            memory_sd=0.05,
            memory_sd_bytes=0.5 * GIB,
            seen=frozenset(),
            fitted=frozenset(),
        )

    @cached_property
    def _at(self) -> Mapping[Key, int]:
        return {key: index for index, key in enumerate(self.keys)}

    def shift(self, trainer: str, family: str) -> FloatColumn:
        """Shared plus own shifts of this trainer and GPU family, (K,)."""
        return self._effective(trainer, family)[0]

    def effective_covariance(self, trainer: str, family: str) -> FloatColumn:
        """Covariance (K, K) of the shifts on one cluster, the variance between clusters included.

        Knobs without data have the variance of their prior.
        """
        return self._effective(trainer, family)[1]

    def _pick(self, trainer: str, family: str) -> FloatColumn:
        """Which keys' shifts each knob sums, (K, P)."""
        pick = np.zeros((len(KNOBS), len(self.keys)))
        for index, knob in enumerate(KNOBS):
            for scope in ("", knob.own(trainer, family)):
                at = self._at.get((knob.name, scope))
                if at is not None:
                    pick[index, at] = 1.0
        return pick

    def _effective(self, trainer: str, family: str) -> tuple[FloatColumn, FloatColumn]:
        pick = self._pick(trainer, family)
        unseen = (self.place * place_sd(family)) ** 2
        for index, knob in enumerate(KNOBS):
            for scope in ("", knob.own(trainer, family)):
                if (knob.name, scope) not in self._at:
                    unseen[index] += knob.variance(scope)
        return np.asarray(pick @ self.shifts), np.asarray(
            pick @ self.covariance @ pick.T + np.diag(unseen)
        )

    def at_one_place(self, scopes: Collection[tuple[str, str]]) -> "Calibration":
        """Posterior for one cluster.

        Its keys have every shift of these (trainer, GPU family). The variance between clusters
        becomes part of the shifts.
        """
        wanted = dict.fromkeys(
            (knob, scope)
            for trainer, family in scopes
            for knob in KNOBS
            for scope in ("", knob.own(trainer, family))
        )
        fresh = [(knob, scope) for knob, scope in wanted if (knob.name, scope) not in self._at]
        keys = (*self.keys, *((knob.name, scope) for knob, scope in fresh))
        known, count = len(self.keys), len(keys)
        covariance = np.zeros((count, count))
        covariance[:known, :known] = self.covariance
        covariance[range(known, count), range(known, count)] = [
            knob.variance(scope) for knob, scope in fresh
        ]
        place = {key: at for at, key in enumerate(keys)}
        widest = np.max([place_sd(family) for _, family in scopes], axis=0)
        for knob, scope in wanted:
            if scope:
                covariance[place[knob.name, scope], place[knob.name, scope]] += (
                    self.place * widest[PLACE[knob.name]]
                ) ** 2
        shifts = np.concatenate([self.shifts, np.zeros(count - known)])
        return replace(self, keys=keys, shifts=shifts, covariance=covariance, place=0.0)

    def directions(self, trainer: str, family: str) -> tuple[FloatColumn, float]:
        """(shifts (D, K) that move predictions most, variance of log seconds that they leave out).

        Each shift is one standard deviation. They are the principal axes of the predictions'
        spread: eigenvectors of S M S, where S is the root of the covariance and M the sensitivity.
        Each lowers the knob that it moves most: processors decide differently which end of an
        eigenvector is its front, and a prediction moves a little differently either way.
        """
        values, vectors = np.linalg.eigh(self.effective_covariance(trainer, family))
        root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        spread, axes = np.linalg.eigh(root @ self.sensitivity @ root)
        directions = np.asarray((root @ axes[:, -DIRECTIONS:]).T)
        largest = np.abs(directions).argmax(axis=1)
        directions *= -np.sign(directions[np.arange(len(directions)), largest])[:, None]
        return directions, float(np.maximum(spread[:-DIRECTIONS], 0.0).sum())

    def profile(self, trainer: str, gpu: GpuSpec, *, experts: bool) -> Profile:
        """Constants of a trainer on a GPU, and how far the memory of its models deviates."""
        name = memory_class(trainer, gpu.vendor, experts=experts)
        factor = self.interval_factors.get(name, 1.0)
        return replace(
            profile_at(trainer, self.shift(trainer, gpu.family)),
            memory_sd=factor * self.memory_sd,
            memory_sd_bytes=factor * self.memory_sd_bytes,
        )

    def offsets(self, trainer: str, family: str, stack: str, units: Sequence[str]) -> "Offsets":
        """Offsets that units of a stack have in common beyond the knobs."""
        centre = np.zeros((len(units), len(self.keys)))
        same = np.array([[float(one == two) for two in units] for one in units])
        unseen = self.unit_sd**2 * same
        if (STACK, stack) in self._at:
            centre[:, self._at[STACK, stack]] = 1.0
        else:
            unseen = unseen + self.stack_sd**2
        for place, unit in enumerate(units):
            at = self._at.get((UNIT, unit))
            if at is not None:
                centre[place, at] = 1.0
                unseen[place, place] -= self.unit_sd**2
        if not centre.any():
            return Offsets(np.zeros(len(units)), unseen, np.zeros((len(units), len(KNOBS))))
        pick = self._pick(trainer, family)
        together = centre @ self.covariance @ pick.T
        knobs = self.effective_covariance(trainer, family)
        slopes = np.linalg.solve(knobs, together.T).T
        covariance = centre @ self.covariance @ centre.T + unseen - slopes @ together.T
        return Offsets(
            np.asarray(centre @ self.shifts), 0.5 * (covariance + covariance.T), np.asarray(slopes)
        )


@dataclass(frozen=True, slots=True)
class Offsets:
    """Log seconds that runs of U units of one stack have on top of the model.

    mean (U,): 0 unless a run of one's own was seen.
    covariance (U, U): given the knobs.
    slopes (U, K): by how much an offset moves with each knob's shift, because a run that was seen
        leaves little doubt of their sum.
    """

    mean: FloatColumn
    covariance: FloatColumn
    slopes: FloatColumn
