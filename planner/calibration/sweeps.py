"""Sweeps: runs of one job under several layouts, and how good a pick among them is.

A sweep has one source, model, cluster, training and number format. Repeats of a layout are
averaged. Regret is how much slower than the best layout measured a pick is. A pick is made by what
is known before a run, among the layouts whose memory estimate fits, where any does: by predicted
step time, or by a rule of thumb. Layouts that ran out of memory are counted elsewhere
(`accuracy.Summary`).

Repeats are runs of one job and layout, by other releases of its trainer or in other reports. A
prediction that does not know the software cannot be closer to all of them than they are.
Letters: L layouts, K keys of the rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.calibration.similarity import redone
from planner.columns import BoolColumn, FloatColumn, LayoutBatch

if TYPE_CHECKING:
    from planner.calibration.comparison import Compared

FEWEST = 3  # layouts of a sweep
FEWEST_AGAINST_RULE = 4
# What a difference of regrets means nothing below: published repeats of one dense layout have a
# standard deviation of 1.5%, and a difference of two means over some sweeps has less.
NOISE = 0.01
# fields of `training` and `layout` that a release decides where a published row does not
SOFTWARE = ("trainer_version", "attention_kernel", "cuda_graphs", "overlap", "moe_dispatcher")


def rule_of_thumb(batch: LayoutBatch) -> FloatColumn:
    """Order in which one tries layouts without a model of their speed, as keys (N, K).

    Smaller is tried earlier, and a key counts where all before it tie: nothing offloaded to the
    host, fewest TP ranks, fewest PP, fewest CP, least recomputation, largest microbatch. Layouts
    that tie in all of these (ZeRO stage, schedule, EP, compile) are one to the rule: its pick is
    any of them, each as likely, and the regret of it is their mean.
    """
    return np.column_stack(
        [
            batch.cpu_offload | (batch.activation_offload_layers > 0),
            batch.tp,
            batch.pp,
            batch.cp,
            redone(batch),
            -batch.micro_batch_size,
        ]
    ).astype(np.float64)


def first_by(keys: FloatColumn) -> BoolColumn:
    """Rows of keys (N, K) that come before all others in their order, which may tie, (N,)."""
    return np.asarray((keys == keys[np.lexsort(keys.T[::-1])[0]]).all(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Layouts of one job that ran, (L,) each.

    label: class of the job, one of `accuracy.LABELS["class"]`.
    rule (L, K): `rule_of_thumb`.
    """

    label: str
    predicted_seconds: FloatColumn
    measured_seconds: FloatColumn
    fits: BoolColumn
    rule: FloatColumn

    @classmethod
    def of(cls, rows: Sequence["Compared"]) -> "Sweep":
        by_layout: dict[str, list[Compared]] = {}
        for row in rows:
            by_layout.setdefault(row.layout, []).append(row)
        alike = list(by_layout.values())
        measured = [np.log([row.measured_seconds or np.inf for row in runs]) for runs in alike]
        return cls(
            label=rows[0].label("class"),
            predicted_seconds=np.array([runs[0].predicted_seconds for runs in alike], dtype=float),
            measured_seconds=np.exp([logs.mean() for logs in measured]),
            fits=np.array([runs[0].fits for runs in alike]),
            rule=np.array([runs[0].rule for runs in alike]),
        )

    def __len__(self) -> int:
        return len(self.measured_seconds)

    @property
    def _candidates(self) -> BoolColumn:
        return self.fits if self.fits.any() else np.ones(len(self), dtype=np.bool_)

    def regret(self, first: int = 1) -> float:
        """Regret of the best measured of the `first` layouts predicted fastest."""
        rows = np.flatnonzero(self._candidates)
        picked = rows[np.argsort(self.predicted_seconds[rows], kind="stable")[:first]]
        return float(self.measured_seconds[picked].min() / self.measured_seconds.min() - 1.0)

    def regret_of_rule(self) -> float:
        rows = np.flatnonzero(self._candidates)
        picked = rows[first_by(self.rule[rows])]
        return float(self.measured_seconds[picked].mean() / self.measured_seconds.min() - 1.0)

    def rank_correlation(self) -> float:
        """Spearman correlation of predicted and measured step times; ties share a rank."""
        return rank_correlation(self.predicted_seconds, self.measured_seconds)


def sweeps(rows: Sequence["Compared"], fewest: int = FEWEST) -> list[Sweep]:
    """Sweeps of at least this many layouts that ran."""
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        if row.measured_seconds and row.predicted_seconds:
            groups.setdefault(row.sweep, []).append(row)
    return [one for one in map(Sweep.of, groups.values()) if len(one) >= fewest]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstRule:
    """Mean regret over sweeps of at least FEWEST_AGAINST_RULE layouts, of one class or of all.

    behind: sweeps in which number one is slower than the rule of thumb's pick by more than NOISE.
    """

    name: str
    sweeps: int
    number_one: float
    rule_of_thumb: float
    behind: int

    @classmethod
    def of(cls, found: Sequence[Sweep], name: str) -> "AgainstRule":
        ours, rule = np.array([(one.regret(), one.regret_of_rule()) for one in found]).T
        return cls(
            name=name,
            sweeps=len(found),
            number_one=float(ours.mean()),
            rule_of_thumb=float(rule.mean()),
            behind=int((ours > rule + NOISE).sum()),
        )


def against_rule(rows: Sequence["Compared"]) -> list[AgainstRule]:
    """Number one against the rule of thumb over all sweeps, then by class in their order."""
    found = sweeps(rows, FEWEST_AGAINST_RULE)
    names = sorted({one.label for one in found})
    groups = [(name, [one for one in found if one.label == name]) for name in names]
    return [AgainstRule.of(alike, name) for name, alike in [("all", found), *groups] if alike]


def rank_correlation(first: FloatColumn, second: FloatColumn) -> float:
    """Spearman's; 0 where all of one are equal. Ties share a rank."""
    ranks = _ranks(first), _ranks(second)
    if min(one.std() for one in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: FloatColumn) -> FloatColumn:
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
    for value in np.unique(values):
        order[values == value] = order[values == value].mean()
    return np.asarray(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Jobs of one class, or of all, that were measured at least twice.

    off: mean of |measured / geometric mean of its job - 1|.
    """

    name: str
    jobs: int
    rows: int
    off: float

    @classmethod
    def of(cls, jobs: Sequence[Sequence["Compared"]], name: str) -> "Repeats":
        logs = [np.log([row.measured_seconds or np.nan for row in one]) for one in jobs]
        off = np.concatenate([np.abs(np.expm1(one - one.mean())) for one in logs])
        return cls(name=name, jobs=len(jobs), rows=len(off), off=float(off.mean()))


def repeats(rows: Sequence["Compared"]) -> list[Repeats]:
    """All rows, then each class in alphabetical order; empty where no job was measured twice."""
    jobs: dict[str, list[Compared]] = {}
    for row in rows:
        if row.measured_seconds:
            jobs.setdefault(row.question, []).append(row)
    again = [one for one in jobs.values() if len(one) > 1]
    labels = [one[0].label("class") for one in again]
    groups = {name: [again[n] for n, label in enumerate(labels) if label == name]
              for name in sorted(set(labels))}  # fmt: skip
    return [Repeats.of(alike, name) for name, alike in {"all": again, **groups}.items() if alike]
