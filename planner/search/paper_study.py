"""Samples layer splits and memory budgets that the enumeration leaves out.

Optuna samples them, and they are priced on paper.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from planner.cost.price import Pricer
from planner.estimates import simulated_columns
from planner.rules import violations
from planner.samplers import SAMPLERS
from planner.search.bounds import OOM_LIMIT
from planner.search.sampled import Sampled, SampledTrial
from planner.search.variations.splits import MAX_SHIFT, shifted
from planner.specs.layout import Layout, parse_ac

MEMORY_CONSTRAINT = "device_over_usable"
BATCH = 16  # trials that are asked for and simulated together


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
    """Layer splits and memory budgets around the best enumerated layouts, by an Optuna sampler.

    name, seed: of the sampler.
    budgets, splits: what may be varied besides the choice of the seed layout.

    The objective is simulated step seconds, with memory as a constraint. Trials are asked in
    batches, so that each batch is priced at once.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            sampler=SAMPLERS.find(name).optuna_sampler(seed), direction="minimize"
        )
    found: dict[Layout, float] = {}
    tried: list[SampledTrial] = []
    for _ in range(max(1, num_trials // BATCH)):
        asked = [study.ask() for _ in range(BATCH)]
        layouts = [_propose(trial, pricer, seeds, budgets, splits) for trial in asked]
        broken = [
            violations(layout, pricer.model, pricer.cluster, pricer.training) for layout in layouts
        ]
        legal = [i for i, faults in enumerate(broken) if not faults]
        answers = (
            dict(zip(legal, simulated_columns(pricer, [layouts[i] for i in legal]), strict=True))
            if legal
            else {}
        )
        for index, trial in enumerate(asked):
            if index not in answers:
                first = broken[index][0]
                refused = f"{first.field}={first.value}: {first.rule}"
                tried.append(SampledTrial(layout=layouts[index], refused=refused))
                study.tell(trial, state=TrialState.PRUNED)
                continue
            step, oom, share = answers[index]
            tried.append(
                SampledTrial(
                    layout=layouts[index],
                    step_seconds=step,
                    oom_probability=oom,
                    device_bytes=(1.0 + share) * pricer.cluster.usable_memory_bytes,
                )
            )
            trial.set_constraint(MEMORY_CONSTRAINT, share)
            study.tell(trial, step)
            if oom <= OOM_LIMIT:
                found[layouts[index]] = step
    order = sorted(found, key=lambda layout: found[layout])
    return Sampled(layouts=tuple(order), trials=tuple(tried))


def _propose(
    trial: optuna.Trial, pricer: Pricer, seeds: Sequence[Layout], budgets: bool, splits: bool
) -> Layout:
    layout = seeds[trial.suggest_int("seed_layout", 0, len(seeds) - 1)]
    update: dict[str, Any] = {}
    if budgets and layout.compile and parse_ac(layout.ac)[0] != "none":
        budget = trial.suggest_float("memory_budget", 0.0, 1.0, step=0.01)
        update["ac"] = f"memory-budget-{round(budget, 2):g}"
    if splits and layout.pp > 1:
        first, last = (
            trial.suggest_int(f"layers_off_{end}", -MAX_SHIFT, MAX_SHIFT)
            for end in ("first", "last")
        )
        sizes = shifted(pricer, layout, first, last)
        if (first or last) and min(sizes) >= 1:
            update["layers_per_stage"] = sizes
    return layout.model_copy(update=update)
