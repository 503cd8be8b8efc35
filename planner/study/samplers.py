"""Optuna samplers over the finite set of legal candidates: our own, and Optuna's.

What Optuna's samplers propose is mapped to the nearest legal layout not yet tried. The trial's
parameters are always the fields of a legal candidate. Letters: N candidates, D fields.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from planner.columns import CODES, BoolColumn, Column, FloatColumn, LayoutBatch
from planner.samplers import SAMPLERS, STARTUP_TRIALS
from planner.search.choice import pareto
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import FLAGS, SHARES, Layout
from planner.study import normal
from planner.study.knowledge import Knowledge
from planner.study.posterior import StudyPosterior
from planner.study.records import RUN_SD

TRAINER_WORD = "trainer"  # of a split of layers that the trainer makes
WORDS = ("ac", "layers_per_stage", *CODES, *sorted(FLAGS), *SHARES)
Space = dict[str, BaseDistribution]
# Judgement: a probe repeats a measured layout only if that is expected to gain this much, so that
# ties within noise end the study instead.
LEAST_REPEAT_GAIN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Choice of a sampler, and the reason as a sentence."""

    row: int
    reason: str
    repeat: bool = False


class FieldSpace:
    """Candidates as points of Optuna's space: one parameter per field of the layout.

    Degrees are integers; the rest are categories.
    """

    def __init__(self, batch: LayoutBatch) -> None:
        self.batch = batch
        self.words = {name: _words(batch, name) for name in WORDS}
        self.distributions: Space = {name: self._distribution(name) for name in Layout.model_fields}
        self._numbers = {
            name: np.log2(np.maximum(getattr(batch, name), 1))
            for name in Layout.model_fields
            if name not in self.words
        }
        self._numbers["zero_stage"] = np.asarray(batch.zero_stage, dtype=np.float64)

    def parameters(self, row: int) -> dict[str, Any]:
        return fields_of(self.batch.row(row))

    def nearest(self, parameters: Mapping[str, Any], allowed: BoolColumn) -> int:
        """The allowed candidate with the smallest distance.

        Distance counts octaves of a number, ZeRO stages, and 1 for every category that differs.
        """
        distance = np.zeros(len(self.batch))
        for name, value in parameters.items():
            if name in self.words:
                codes, words = self.words[name]
                distance += codes != words.index(value)
            else:
                wanted = float(value) if name == "zero_stage" else float(np.log2(max(value, 1)))
                distance += np.abs(self._numbers[name] - wanted)
        rows = np.flatnonzero(allowed)
        return int(rows[np.argmin(distance[rows])])

    def _distribution(self, name: str) -> BaseDistribution:
        if name in self.words:
            return CategoricalDistribution(self.words[name][1])
        column = getattr(self.batch, name)
        low, high = int(column.min()), int(column.max())
        return IntDistribution(low, high, log=name != "zero_stage" and 0 < low < high)


def fields_of(layout: Layout) -> dict[str, Any]:
    """The layout's fields as Optuna's storages take them: splits of layers are text."""
    split = layout.layers_per_stage
    return {
        **layout.model_dump(),
        "layers_per_stage": TRAINER_WORD if split is None else ",".join(map(str, split)),
    }


def layout_of(parameters: Mapping[str, Any]) -> Layout:
    split = parameters["layers_per_stage"]
    layers = None if split == TRAINER_WORD else tuple(map(int, split.split(",")))
    return Layout(**{**parameters, "layers_per_stage": layers})


def _words(batch: LayoutBatch, name: str) -> tuple[Column, tuple[Any, ...]]:
    """Codes (N,) and the names that they stand for, spelled as in `Layout`."""
    if name == "ac":
        column = np.stack([batch.ac_kind, batch.ac_value], axis=1)
    else:
        column = batch.split if name == "layers_per_stage" else getattr(batch, name)
    axis = 0 if column.ndim > 1 else None
    _, first, codes = np.unique(column, axis=axis, return_index=True, return_inverse=True)
    return codes.ravel(), tuple(fields_of(one)[name] for one in batch.take(first).layouts())


class FiniteSampler(BaseSampler):
    """A sampler whose every trial is one candidate.

    picks: what it chose, by trial number.
    next_pick: used once instead of choosing.
    risk_limit: candidates likelier than this to run out of memory wait until nothing else is left.
    """

    def __init__(self, knowledge: Knowledge, *, risk_limit: float = OOM_LIMIT) -> None:
        self.knowledge = knowledge
        self.space = FieldSpace(knowledge.candidates.batch)
        self.risk_limit = risk_limit
        self.picks: dict[int, Pick] = {}
        self.next_pick: Pick | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        """All fields: a candidate is chosen whole."""
        return self.space.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Space
    ) -> dict[str, Any]:
        """The fields of the candidate chosen."""
        pick = self.next_pick or self.choose(study, trial)
        self.next_pick = None
        self.picks[trial.number] = pick
        return self.space.parameters(pick.row)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Raises ValueError: there is no parameter besides the layout's fields."""
        raise ValueError(
            f"{param_name!r} is no field of a layout; ask for the distributions of `FieldSpace`"
        )

    def choose(self, study: Study, trial: FrozenTrial) -> Pick:
        raise NotImplementedError

    def has_more(self) -> bool:
        return bool(self.free().any())

    def free(self) -> BoolColumn:
        return self.knowledge.untried()

    def allowed(self, posterior: StudyPosterior) -> BoolColumn:
        """Candidates within the risk; if there are none, those that are likeliest to fit."""
        free = self.free()
        if self.risk_limit >= 1.0 or not free.any():
            return free
        rows = np.flatnonzero(free)
        risk = posterior.risk[rows]
        safe = np.zeros_like(free)
        safe[rows[risk <= max(self.risk_limit, float(risk.min()))]] = True
        return safe


class CostModelSampler(FiniteSampler):
    """Expected improvement x P(fits) under the posterior of a study.

    The posterior is the cost model's with a Gaussian process on its error. The first trial is the
    model's best that fits. A measured layout is probed again when noise, not lack of measurements,
    is what hides the winner.
    """

    def choose(self, study: Study, trial: FrozenTrial) -> Pick:
        posterior = self.knowledge.posterior()
        free = self.knowledge.untried()
        first = self.knowledge.first
        if first is not None and not posterior.measured and free[first]:
            said = self.knowledge.first_measures
            also = f", which {said}" if said else ""
            reason = f"number 1 on paper{also}: {_predicted(posterior, first)}"
            return Pick(row=first, reason=reason)
        if not posterior.measured and free[posterior.leader]:
            reason = f"the model's first: {_predicted(posterior, posterior.leader)}"
            return Pick(row=posterior.leader, reason=reason)
        best = posterior.promising(free, 1, risk_limit=self.risk_limit) if free.any() else []
        if not best and free.any():
            row = int(np.argmin(np.where(free, posterior.risk, np.inf)))
            reason = f"the likeliest to fit of what is left: {_predicted(posterior, row)}"
            return Pick(row=row, reason=reason)
        worth = posterior.improvement * (1.0 - posterior.risk)
        gain = float(worth[best[0]]) if best else 0.0
        again = self._repeat(posterior, max(gain, LEAST_REPEAT_GAIN))
        if again is not None:
            return again
        if not best:
            row = self.knowledge.repeatable()[0].row
            return Pick(row=row, repeat=True, reason="again: every candidate has been tried")
        return Pick(
            row=best[0],
            reason=f"expected improvement {gain:.2%} over {_seconds(posterior.best)}: "
            f"{_predicted(posterior, best[0])}",
        )

    def has_more(self) -> bool:
        """Also true if only a second run is left."""
        return super().has_more() or bool(self.knowledge.repeatable())

    def _repeat(self, posterior: StudyPosterior, least: float) -> Pick | None:
        """The measured layout that may be the fastest when it runs once more.

        None if that is worth no more than `least`. The worth of a layout d behind the fastest, with
        its own variance v and noise t, is E[max(0, s Z - d)], s = v / sqrt(v + t).
        """
        timed = self.knowledge.repeatable()
        best = self.knowledge.records[posterior.winner].log_seconds if timed else None
        if best is None:
            return None
        gap = np.array([record.log_seconds or 0.0 for record in timed]) - best
        variance = np.array([record.variance or 0.0 for record in timed])
        worth = normal.expected_excess(gap, variance / np.sqrt(variance + RUN_SD**2))
        place = int(np.argmax(worth))
        if worth[place] <= least:
            return None
        record = timed[place]
        return Pick(
            row=record.row,
            repeat=True,
            reason=f"again, to tell it from its rival: {record.runs} so far, gain "
            f"{worth[place]:.2%}",
        )


class SnappedSampler(FiniteSampler):
    """One of Optuna's samplers; each sample becomes the nearest candidate not yet tried.

    first: rows to ask before it samples (a warm start).
    """

    def __init__(
        self,
        inner: BaseSampler,
        name: str,
        knowledge: Knowledge,
        *,
        first: Sequence[int] = (),
        risk_limit: float = OOM_LIMIT,
    ) -> None:
        super().__init__(knowledge, risk_limit=risk_limit)
        self.inner, self.name, self.first = inner, name, tuple(first)

    def choose(self, study: Study, trial: FrozenTrial) -> Pick:
        posterior = self.knowledge.posterior()
        allowed = self.allowed(posterior)
        for index, row in enumerate(self.first, start=1):
            if allowed[row]:
                return Pick(
                    row=row,
                    reason=f"warm start {index} of {len(self.first)}: {_predicted(posterior, row)}",
                )
        relative = self.inner.infer_relative_search_space(study, trial)
        sampled = dict(self.inner.sample_relative(study, trial, relative))
        fields, so_far = list(self.space.distributions), copy(trial)
        for place, (name, distribution) in enumerate(self.space.distributions.items()):
            if distribution.single():
                sampled[name] = _only(distribution)
            elif name not in sampled:
                # what was chosen before it, as in a trial that asks for one after the other
                so_far.params = {one: sampled[one] for one in fields[:place] if one in sampled}
                sampled[name] = self.inner.sample_independent(study, so_far, name, distribution)
        row = self.space.nearest(sampled, allowed)
        return Pick(
            row=row,
            reason=f"{self.name}'s choice, as the nearest legal layout: "
            f"{_predicted(posterior, row)}",
        )

    def free(self) -> BoolColumn:
        """Candidates without any evaluation.

        This sampler does not decide whether to run one again.
        """
        free = self.knowledge.untried()
        free[list(self.knowledge.records)] = False
        return free

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.inner.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self.inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self.inner.reseed_rng()


def make_sampler(name: str, knowledge: Knowledge, *, seed: int) -> FiniteSampler:
    """The sampler of this name over the candidates of a study.

    Raises UnknownNameError for an unknown name, SpecError for a sampler whose modules are missing.
    """
    declared = SAMPLERS.find(name)
    if declared.by_posterior:
        return CostModelSampler(knowledge)
    return SnappedSampler(
        declared.optuna_sampler(seed, declared.warm_starts or STARTUP_TRIALS),
        name,
        knowledge,
        first=model_picks(knowledge, declared.warm_starts) if declared.warm_starts else (),
    )


def model_picks(knowledge: Knowledge, count: int) -> list[int]:
    """The fastest predicted candidates that fit, fastest first.

    They differ in a field that matters.
    """
    candidates = knowledge.candidates
    fits = np.flatnonzero(candidates.prior.oom_probability <= OOM_LIMIT)
    if not len(fits):
        return []
    memory: FloatColumn = next(iter(candidates.memory.values()))
    chosen = pareto.different(
        candidates.batch.take(fits),
        np.exp(candidates.prior.log_seconds[fits]),
        memory[fits],
        np.arange(len(fits)),
        min(count, len(fits)),
    )
    return [int(fits[place]) for place in chosen]


def _only(distribution: BaseDistribution) -> Any:
    """The one value of a distribution that has no other."""
    return (
        distribution.low
        if isinstance(distribution, IntDistribution)
        else distribution.to_external_repr(0.0)
    )


def _seconds(log_seconds: float) -> str:
    return f"{np.exp(log_seconds):.4g} s"


def _predicted(posterior: StudyPosterior, row: int) -> str:
    sd = float(np.sqrt(posterior.time.variance[row]))
    fits = 1.0 - float(posterior.risk[row])
    return (
        f"{_seconds(float(posterior.log_seconds[row]))} expected, give or take {sd:.0%}, fits with "
        f"probability {fits:.2f}"
    )
