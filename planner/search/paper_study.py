"""Optuna proposes points of the space beyond enumeration, which are priced on paper."""

import warnings

import optuna
from optuna.trial import TrialState

from planner.samplers import SAMPLERS
from planner.search.sampled import MEMORY_CONSTRAINT, Priced, Sampled, SampledTrial
from planner.search.variations.beyond import Beyond

BATCH = 16  # trials that are asked for and simulated together


def sample_beyond(
    beyond: Beyond, *, name: str, seed: int, num_trials: int, best_seconds: float
) -> Sampled:
    """Points of `beyond` by an Optuna sampler, which first gets the layouts they start from.

    name, seed: of the sampler.
    best_seconds: a step of the fastest layout that fits so far.

    The objective is simulated step seconds, with memory as a constraint. What breaks a rule, or
    cannot beat the best by a lower bound, is pruned. Trials are asked in batches, so that each
    batch is priced at once.
    """
    study = _study(name, seed)
    for origin in beyond.origins[:num_trials]:
        study.enqueue_trial(origin)
    priced = Priced(beyond=beyond, best_seconds=best_seconds)
    tried: list[SampledTrial] = []
    ranges = beyond.ranges
    while len(tried) < num_trials:
        asked = [study.ask() for _ in range(min(BATCH, num_trials - len(tried)))]
        points = [
            {key: trial.suggest_int(key, low, high) for key, (low, high) in ranges.items()}
            for trial in asked
        ]
        answers = priced.at(points)
        for trial, answer in zip(asked, answers, strict=True):
            _tell(study, trial, answer, beyond.pricer.cluster.usable_memory_bytes)
        tried += answers
    return Sampled(fastest=tuple(priced.fitting()), trials=tuple(tried))


def _study(name: str, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(
            sampler=SAMPLERS.find(name).optuna_sampler(seed), direction="minimize"
        )


def _tell(
    study: optuna.Study, trial: optuna.Trial, answer: SampledTrial, usable_bytes: float
) -> None:
    if answer.step_seconds is None or answer.device_bytes is None:
        trial.set_user_attr("reason", answer.refused)
        study.tell(trial, state=TrialState.PRUNED)
        return
    trial.set_constraint(MEMORY_CONSTRAINT, answer.device_bytes / usable_bytes - 1.0)
    study.tell(trial, answer.step_seconds)
