"""Optuna's side of a study: an in-memory study with one trial per candidate.

It is written from our records and can be rebuilt from them at any time. States of a trial:
- complete: it ran, or was emulated; its value is the step seconds of
    its fastest run;
- pruned with a positive constraint: it ran out of memory;
- pruned without a constraint: the pool could not emulate it;
- failed: it gave no numbers; the failure class is an attribute.

The constraint is memory over usable memory, less 1.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from planner.search.left_out import MEMORY_CONSTRAINT
from planner.study.records import Record
from planner.study.samplers import FiniteSampler, Pick

STATES = {"ok": TrialState.COMPLETE, "oom": TrialState.PRUNED, "failed": TrialState.FAIL}
LEAST_MARGIN = 1e-6  # out of memory is infeasible even if the report names no excess


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from telling about its own work."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        yield


class Trials:
    """Asks Optuna for trials and closes them.

    notes: by candidate, why it was asked and which measurement answered.
    about: what was predicted of a candidate and spent on it, as attributes.
    stale: whether a candidate may have several trials.
    """

    def __init__(
        self, sampler: FiniteSampler, about: Callable[[int], Mapping[str, Any]] = lambda _: {}
    ) -> None:
        self.sampler = sampler
        self.about = about
        self.study = self._empty()
        self.notes: dict[int, dict[str, Any]] = {}
        self.stale = False

    def ask(self, pick: Pick | None = None) -> optuna.Trial:
        """A trial whose parameters are those of `pick`, or of the sampler's next candidate."""
        self.sampler.next_pick = pick
        return self.study.ask(dict(self.sampler.space.distributions))

    def finish(self, trial: optuna.Trial, record: Record, attributes: dict[str, Any]) -> None:
        """Closes the trial with its candidate's record."""
        self.notes[record.row] = {**self.notes.get(record.row, {}), **attributes}
        constraint = _constraint(record)
        if constraint is not None:
            trial.set_constraint(MEMORY_CONSTRAINT, constraint)
        for name, value in self._shown(record).items():
            trial.set_user_attr(name, value)
        if record.status == "ok":
            self.study.tell(trial, record.step_seconds)
        else:
            self.study.tell(trial, state=STATES[record.status])

    def close(self, trial: optuna.Trial, state: TrialState, attributes: dict[str, Any]) -> None:
        """Closes a trial that gave no record."""
        about = self.about(self.sampler.picks[trial.number].row)
        for name, value in {**about, **attributes}.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, state=state)

    def note(self, row: int, attributes: dict[str, Any]) -> None:
        """Adds an earlier trial that gave no information about its candidate."""
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.FAIL,
                params=self.sampler.space.parameters(row),
                distributions=dict(self.sampler.space.distributions),
                user_attrs={**self.about(row), **attributes},
            )
        )

    def settle(self, records: Iterable[Record]) -> None:
        """Merges repeats into one trial a candidate, where no trial is under way."""
        if self.stale:
            self.rebuild(records)
            self.stale = False

    def rebuild(self, records: Iterable[Record]) -> None:
        """Builds the study anew, with one trial for all measurements of a candidate.

        Trials that gave no information about their candidate are copied.
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
        with quiet():
            return optuna.create_study(sampler=self.sampler, direction="minimize")

    def _frozen(self, record: Record) -> FrozenTrial:
        constraint = _constraint(record)
        return optuna.create_trial(
            state=STATES[record.status],
            value=record.step_seconds,
            params=self.sampler.space.parameters(record.row),
            distributions=dict(self.sampler.space.distributions),
            user_attrs=self._shown(record),
            constraints=None if constraint is None else {MEMORY_CONSTRAINT: constraint},
        )

    def _shown(self, record: Record) -> dict[str, Any]:
        notes = self.notes.get(record.row, {})
        return {**self.about(record.row), **notes, **_attributes(record)}


def _constraint(record: Record) -> float | None:
    return max(record.margin or 0.0, LEAST_MARGIN) if record.status == "oom" else record.margin


def _attributes(record: Record) -> dict[str, Any]:
    return without_none(
        {
            "status": record.status,
            "candidate": record.row,
            "runs": record.runs,
            "rung": record.fidelity,
            "measured_step_seconds": record.step_seconds,
            "memory_over_usable": _constraint(record),
            "log_seconds_sd": record.variance and float(np.sqrt(record.variance)),
            "message": record.message or None,
        }
    )


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
