"""The search as an Optuna study: simulated layouts as finished trials, the rest of the space
sampled where it cannot be enumerated.

Parameters are the contract's fields; memory is a constraint (device_bytes / usable_bytes - 1 <= 0);
layouts that were priced but not pursued are pruned trials with their reason. The planner's database
is the authority; a study is rebuilt at will.
"""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from planner.cost.price import Pricer
from planner.errors import Fault, SpecError
from planner.estimates import simulated_columns
from planner.rules import violations
from planner.search.variations.splits import MAX_SHIFT, shifted
from planner.specs.layout import Layout, parse_ac
from planner.specs.plan import Plan

MEMORY_CONSTRAINT = "device_over_usable"
BATCH = 16  # trials asked at once and simulated together
OOM_LIMIT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One layout as a trial. step_seconds None: pruned, with the reason."""

    layout: Layout
    step_seconds: float | None
    memory_share: float
    reason: str


def sampler(name: str, seed: int) -> BaseSampler:
    """The Optuna sampler of this name for paper search; `cost-model` enumerates what it can and
    uses TPE for the rest.
    """
    if name in ("cost-model", "tpe"):
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    if name == "gp":
        missing = [
            module for module in ("torch", "scipy") if importlib.util.find_spec(module) is None
        ]
        if missing:
            rule = f"Optuna's GP sampler needs {' and '.join(missing)}, not installed here"
            raise SpecError(
                Fault(
                    "search.sampler",
                    name,
                    rule,
                    f"pip install {' '.join(missing)}, or use cost-model or tpe",
                )
            )
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=8)
    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=8)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    raise SpecError(
        Fault(
            "search.sampler",
            name,
            "no sampler of this name",
            "use cost-model, tpe, gp, nsga2 or random",
        )
    )


def record(trials: Sequence[Trial], study_name: str, storage: Any = None) -> optuna.Study:
    """A study of these trials, in memory unless a storage is given."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = _distributions([trial.layout for trial in trials])
    study = optuna.create_study(study_name=study_name, direction="minimize", storage=storage)
    study.add_trials([_frozen(trial, distributions) for trial in trials])
    return study


def from_plan(plan: Plan, storage: Any = None) -> optuna.Study:
    """The study of a stored plan: its ranked layouts as finished trials, its Pareto points as the
    rest.
    """
    trials = []
    for entry in plan.ranked:
        estimate = entry.estimate
        share = (estimate.device_bytes or 0.0) / (estimate.usable_bytes or 1.0) - 1.0
        trials.append(
            Trial(
                layout=entry.layout,
                step_seconds=estimate.step_seconds,
                memory_share=share,
                reason="ranked",
            )
        )
    return record(trials, plan.id, storage)


def _parameters(layout: Layout) -> dict[str, Any]:
    values = layout.model_dump()
    values["layers_per_stage"] = (
        "trainer"
        if layout.layers_per_stage is None
        else ",".join(map(str, layout.layers_per_stage))
    )
    return values


def _distributions(layouts: Sequence[Layout]) -> Mapping[str, BaseDistribution]:
    seen: dict[str, dict[Any, None]] = {}
    for layout in layouts:
        for name, value in _parameters(layout).items():
            seen.setdefault(name, {})[value] = None
    return {name: CategoricalDistribution(tuple(values)) for name, values in seen.items()}


def _frozen(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    state = TrialState.PRUNED if trial.step_seconds is None else TrialState.COMPLETE
    return optuna.create_trial(
        state=state,
        value=trial.step_seconds,
        params=_parameters(trial.layout),
        distributions=dict(distributions),
        user_attrs={"reason": trial.reason},
        constraints={MEMORY_CONSTRAINT: trial.memory_share},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What sampling beyond the enumeration found: layouts with their simulated step and memory, and
    how many were tried.
    """

    layouts: tuple[Layout, ...]
    num_trials: int


def sample_beyond(
    pricer: Pricer,
    seeds: Sequence[Layout],
    *,
    name: str,
    seed: int,
    num_trials: int,
    budgets: bool,
    splits: bool,
) -> Sampled:
    """Layer splits and memory budgets around the best enumerated layouts, chosen by an Optuna
    sampler, priced on paper.

    Parameters: which seed layout, layers moved off its first and last stage, and the activation
        memory budget.
    Objective: simulated step seconds; memory is a constraint. Trials are asked in batches so that
        each batch is priced at once.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=sampler(name, seed), direction="minimize")
    found: dict[Layout, float] = {}
    for _ in range(max(1, num_trials // BATCH)):
        asked = [study.ask() for _ in range(BATCH)]
        layouts = [_propose(trial, pricer, seeds, budgets, splits) for trial in asked]
        legal = [
            i
            for i, layout in enumerate(layouts)
            if not violations(layout, pricer.model, pricer.cluster, pricer.training)
        ]
        answers = (
            dict(zip(legal, simulated_columns(pricer, [layouts[i] for i in legal]), strict=True))
            if legal
            else {}
        )
        for index, trial in enumerate(asked):
            if index not in answers:
                study.tell(trial, state=TrialState.PRUNED)
                continue
            step, oom, share = answers[index]
            trial.set_constraint(MEMORY_CONSTRAINT, share)
            study.tell(trial, step)
            if oom <= OOM_LIMIT:
                found[layouts[index]] = step
    order = sorted(found, key=lambda layout: found[layout])
    return Sampled(layouts=tuple(order), num_trials=len(study.trials))


def _propose(
    trial: optuna.Trial, pricer: Pricer, seeds: Sequence[Layout], budgets: bool, splits: bool
) -> Layout:
    layout = seeds[trial.suggest_int("seed_layout", 0, len(seeds) - 1)]
    update: dict[str, Any] = {}
    if budgets and layout.compile and parse_ac(layout.ac)[0] != "none":
        update["ac"] = f"memory-budget-{round(trial.suggest_float('memory_budget', 0.0, 1.0), 2):g}"
    if splits and layout.pp > 1:
        first, last = (
            trial.suggest_int(f"layers_off_{end}", -MAX_SHIFT, MAX_SHIFT)
            for end in ("first", "last")
        )
        sizes = shifted(pricer, layout, first, last)
        if (first or last) and min(sizes) >= 1:
            update["layers_per_stage"] = sizes
    return layout.model_copy(update=update)
