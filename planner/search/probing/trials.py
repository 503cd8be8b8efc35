"""Optuna's side of a study: an in-memory study with one trial a candidate, written from our records and rebuilt from them at will.

Complete: ran; its value is the averaged step seconds. Pruned with a positive constraint: ran out of memory. Pruned without: given up
after a cheaper rung. Failed: gave no numbers, with its class. The constraint is memory over usable memory, less 1.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from planner.search.probing.knowledge import Record
from planner.search.probing.sampler import FiniteSampler

MEMORY_CONSTRAINT = "device_over_usable"
LEAST_MARGIN = 1e-6  # what ran out is infeasible even where its report does not say by how much


class Trials:
    """Asks Optuna for trials and closes them. said: why each candidate was asked and by which measurement it was answered."""

    def __init__(self, sampler: FiniteSampler) -> None:
        self.sampler = sampler
        self.study = self._empty()
        self.said: dict[int, dict[str, Any]] = {}

    def ask(self) -> optuna.Trial:
        """A trial whose parameters are the sampler's next candidate."""
        return self.study.ask(dict(self.sampler.space.distributions))

    def finish(self, trial: optuna.Trial, record: Record, attributes: dict[str, Any]) -> None:
        """Closes the trial with what its candidate's record says."""
        self.said[record.row] = {**self.said.get(record.row, {}), **attributes}
        constraint = _constraint(record)
        if constraint is not None:
            trial.set_constraint(MEMORY_CONSTRAINT, constraint)
        for name, value in {**self.said[record.row], **_attributes(record)}.items():
            trial.set_user_attr(name, value)
        if record.status == "ok":
            self.study.tell(trial, record.step_seconds)
        else:
            self.study.tell(trial, state=_state(record))

    def close(self, trial: optuna.Trial, state: TrialState, attributes: dict[str, Any]) -> None:
        """Closes a trial that brought no record."""
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, state=state)

    def rebuild(self, records: Iterable[Record]) -> None:
        """The study anew: repeats averaged into their candidate's one trial; what was given up after a cheaper rung stays as it is."""
        before = self.study.get_trials(deepcopy=False)
        looks = {trial.user_attrs["candidate"]: trial.intermediate_values for trial in before if "candidate" in trial.user_attrs}
        given_up = [trial for trial in before if trial.state == TrialState.PRUNED and "status" not in trial.user_attrs]
        self.study = self._empty()
        self.study.add_trials([*(self._frozen(record, looks.get(record.row, {})) for record in records), *given_up])

    def _empty(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            return optuna.create_study(sampler=self.sampler, direction="minimize")

    def _frozen(self, record: Record, looks: dict[int, float]) -> FrozenTrial:
        constraint = _constraint(record)
        return optuna.create_trial(
            state=_state(record), value=record.step_seconds, params=self.sampler.space.parameters(record.row),
            distributions=dict(self.sampler.space.distributions), user_attrs={**self.said.get(record.row, {}), **_attributes(record)},
            intermediate_values=looks, constraints=None if constraint is None else {MEMORY_CONSTRAINT: constraint},
        )  # fmt: skip


def _state(record: Record) -> TrialState:
    return {"ok": TrialState.COMPLETE, "oom": TrialState.PRUNED, "failed": TrialState.FAIL}[record.status]


def _constraint(record: Record) -> float | None:
    return max(record.margin or 0.0, LEAST_MARGIN) if record.status == "oom" else record.margin


def _attributes(record: Record) -> dict[str, Any]:
    said: dict[str, Any] = {"status": record.status, "candidate": record.row, "runs": record.runs}
    if record.variance is not None:
        said["log_seconds_sd"] = float(np.sqrt(record.variance))
    if record.message:
        said["message"] = record.message
    return said
