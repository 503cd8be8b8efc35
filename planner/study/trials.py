"""Optuna's side of a study: an in-memory study with one trial a candidate, written from our records
and rebuilt from them at will.

Complete: ran, or was looked at by a cheaper `rung`; its value is the step seconds of its fastest
    run.
Pruned with a positive constraint: ran out of memory. Pruned without: no rung could look at it.
Failed: gave no numbers, with its class. The constraint is memory over usable memory, less 1.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from planner.study.posterior import Record
from planner.study.samplers import FiniteSampler, Pick

MEMORY_CONSTRAINT = "device_over_usable"
LEAST_MARGIN = 1e-6  # what ran out is infeasible even where its report does not say by how much


class Trials:
    """Asks Optuna for trials and closes them. attributes: why each candidate was asked and by which
    measurement it was answered.
    """

    def __init__(self, sampler: FiniteSampler) -> None:
        self.sampler = sampler
        self.study = self._empty()
        self.notes: dict[int, dict[str, Any]] = {}

    def ask(self, pick: Pick | None = None) -> optuna.Trial:
        """A trial whose parameters are the sampler's next candidate, or this one."""
        self.sampler.next_pick = pick
        return self.study.ask(dict(self.sampler.space.distributions))

    def finish(self, trial: optuna.Trial, record: Record, attributes: dict[str, Any]) -> None:
        """Closes the trial with what its candidate's record says."""
        self.notes[record.row] = {**self.notes.get(record.row, {}), **attributes}
        constraint = _constraint(record)
        if constraint is not None:
            trial.set_constraint(MEMORY_CONSTRAINT, constraint)
        for name, value in {**self.notes[record.row], **_attributes(record)}.items():
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

    def note(self, row: int, attributes: dict[str, Any]) -> None:
        """A trial that left nothing to know of its candidate, from before."""
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.FAIL,
                params=self.sampler.space.parameters(row),
                distributions=dict(self.sampler.space.distributions),
                user_attrs=attributes,
            )
        )

    def rebuild(self, records: Iterable[Record]) -> None:
        """The study anew: all that was measured of a candidate is its one trial; trials that left
        nothing to know of theirs stay.
        """
        before = self.study.get_trials(deepcopy=False)
        records = list(records)
        known = [self.sampler.space.parameters(record.row) for record in records]
        finished = [
            trial
            for trial in before
            if trial.state.is_finished() and not {"status", "failure"} & trial.user_attrs.keys()
        ]
        nothing: list[FrozenTrial] = []
        for trial in finished:
            if trial.params not in known:
                known.append(trial.params)
                nothing.append(trial)
        self.study = self._empty()
        self.study.add_trials([*(self._frozen(record) for record in records), *nothing])

    def _empty(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            return optuna.create_study(sampler=self.sampler, direction="minimize")

    def _frozen(self, record: Record) -> FrozenTrial:
        constraint = _constraint(record)
        return optuna.create_trial(
            state=_state(record),
            value=record.step_seconds,
            params=self.sampler.space.parameters(record.row),
            distributions=dict(self.sampler.space.distributions),
            user_attrs={**self.notes.get(record.row, {}), **_attributes(record)},
            constraints=None if constraint is None else {MEMORY_CONSTRAINT: constraint},
        )


def _state(record: Record) -> TrialState:
    return {"ok": TrialState.COMPLETE, "oom": TrialState.PRUNED, "failed": TrialState.FAIL}[
        record.status
    ]


def _constraint(record: Record) -> float | None:
    return max(record.margin or 0.0, LEAST_MARGIN) if record.status == "oom" else record.margin


def _attributes(record: Record) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "status": record.status,
        "candidate": record.row,
        "runs": record.runs,
        "rung": record.fidelity,
    }
    if record.variance is not None:
        attributes["log_seconds_sd"] = float(np.sqrt(record.variance))
    if record.message:
        attributes["message"] = record.message
    return attributes
