"""The closed loop: ask for a probe, measure, update, re-rank; stop when more measuring cannot pay.

    outcome = run(candidates, settings, measure, resumed=stored, on_event=show)

`measure` runs what is asked, and stores a measurement before it returns it. After a crash the same
call with those measurements as `resumed=` continues where the study stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import optuna

from planner.specs.layout import Layout
from planner.specs.measurement import Measurement
from planner.study.candidates import Candidates
from planner.study.evaluations import Proposal
from planner.study.ledger import Ledger, StudySettings
from planner.study.records import FULL_FIDELITY, Record
from planner.study.regret import ExpectedRegret
from planner.study.study import NOTHING_ASKED, AskedBefore, MicroResult, ProbeStudy
from planner.units import format_seconds

SHOWN = 20

Result = Measurement | MicroResult
Measure = Callable[[Proposal], Result | None]  # None: it was interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of the loop, for a progress bar or a stream.

    kind: `asked` (probe about to run), `told` (its result), `stopped`.
    best_seconds: step seconds of the best layout so far; None before the first. Measured if the
        layout itself ran (then it never rises), expected if only smaller runs stand for it
        (`best_fidelity` names them).
    ruled_out: how many candidates the result excluded.
    """

    kind: Literal["asked", "told", "stopped"]
    asked: Proposal | None
    best_seconds: float | None
    best_layout: Layout | None
    best_fidelity: str | None
    regret: ExpectedRegret | None
    spent: Ledger
    message: str
    ruled_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One candidate after the study.

    expected_seconds: step seconds, as measured if it ran itself, else from measurements
        and model together.
    record: its measurements, None if there are none.
    odd: measured over predicted seconds where that is not believed (`Knowledge.odd`).
    """

    row: int
    layout: Layout
    expected_seconds: float
    record: Record | None
    odd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Result of a study.

    ranked: the winner (the fastest that ran, else the fastest expected), then the rest
        by expected seconds.
    stopped: the reason, as a sentence with numbers.
    pruned: layouts ruled out without a probe, with the reason.
    ignored: ids of measurements whose layouts are not candidates.
    refused: how many candidates the probes' program cannot run, by reason.
    broken: what prevented every probe from running; None if they could run.
    learnt: whether the study knows anything that the model did not.
    """

    ranked: tuple[Ranked, ...]
    regret: ExpectedRegret
    stopped: str
    spent: Ledger
    pruned: tuple[tuple[Layout, str], ...]
    ignored: tuple[str, ...]
    study: optuna.Study
    refused: Mapping[str, int] = field(default_factory=dict)
    broken: str | None = None
    learnt: bool = True


def run(
    candidates: Candidates,
    settings: StudySettings,
    measure: Measure,
    *,
    known: Sequence[Measurement] = (),
    resumed: Sequence[Measurement] = (),
    asked_before: AskedBefore = NOTHING_ASKED,
    on_event: Callable[[Event], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> StudyResult:
    """Spends the budget on probes and returns the candidates re-ranked.

    known: earlier measurements of this job, which inform the posterior but cost nothing.
    resumed: measurements of this very study, which also count against its budget.
    should_stop: called between probes; if true, the best so far is returned.

    Exceptions of `measure` propagate. No result is lost, because `measure` stores it first.
    """
    study = ProbeStudy(candidates, settings)
    study.restore(known, spent=False)
    study.restore(resumed, spent=True, asked=asked_before)
    notify = on_event or (lambda _: None)
    while (stopped := _stopped(study, should_stop)) is None:
        asked = study.ask()
        if asked is None:
            stopped = "no candidate is left that may be probed"
            break
        notify(_event(study, "asked", asked.reason, asked=asked))
        result = measure(asked)
        if result is None:
            study.give_up()
            stopped = "the runner gave no result"
            break
        ruled_out = len(study.tell(asked, result))
        message = _result_message(result)
        notify(_event(study, "told", message, asked=asked, ruled_out=ruled_out))
    notify(_event(study, "stopped", stopped))
    return outcome(study, stopped)


def outcome(study: ProbeStudy, stopped: str) -> StudyResult:
    """The candidates as they now stand: measured ones and the SHOWN fastest expected.

    Candidates that are ruled out are left out.
    """
    knowledge = study.knowledge
    posterior = knowledge.posterior()
    open_rows = np.flatnonzero(~knowledge.barred)
    fastest = open_rows[np.argsort(posterior.log_seconds[open_rows], kind="stable")][:SHOWN]
    measured = [record.row for record in knowledge.timed() if not knowledge.barred[record.row]]
    rest = sorted(
        {*map(int, fastest), *measured, *knowledge.odd()} - {posterior.winner},
        key=lambda row: (posterior.expected_seconds(row), row),
    )
    rows, odd = [posterior.winner, *rest], knowledge.odd()
    ranked = tuple(
        Ranked(
            row=row,
            layout=study.candidates.batch.row(row),
            expected_seconds=posterior.expected_seconds(row),
            record=knowledge.records.get(row),
            odd=odd.get(row),
        )
        for row in rows
    )
    pruned = [
        (study.candidates.batch.row(row), reason)
        for row, reason in knowledge.excluded.items()
        if row not in knowledge.records
    ]
    return StudyResult(
        ranked=ranked,
        regret=study.regret(),
        stopped=stopped,
        spent=study.spent,
        pruned=tuple(pruned),
        ignored=tuple(study.ignored),
        study=study.optuna_study(),
        broken=study.broken,
        learnt=bool(knowledge.records or knowledge.times),
    )


def _stopped(study: ProbeStudy, should_stop: Callable[[], bool] | None) -> str | None:
    if should_stop is not None and should_stop():
        return "asked to stop"
    return study.finished()


def _result_message(result: Result) -> str:
    if isinstance(result, MicroResult):
        if not result.observed:
            return f"no kernel could be timed: {result.message}"
        return (
            ", ".join(
                f"{one.effect.name} {np.expm1(one.log_ratio):+.0%}" for one in result.observed
            )
            + " against the prediction"
        )
    measured = result.measured
    if measured.status == "ok" and measured.step_seconds:
        of = "" if measured.rung in FULL_FIDELITY else f" ({measured.rung})"
        return f"{format_seconds(measured.step_seconds)} a step{of}"
    return {"oom": "out of memory", "failed": f"failed: {measured.failure}"}.get(
        measured.status, "no step time"
    ) + (f" ({measured.message})" if measured.message else "")


def _event(
    study: ProbeStudy,
    kind: Literal["asked", "told", "stopped"],
    message: str,
    *,
    asked: Proposal | None = None,
    ruled_out: int = 0,
) -> Event:
    posterior = study.knowledge.posterior()
    record = study.knowledge.records.get(posterior.winner) if posterior.measured else None
    return Event(
        kind=kind,
        asked=asked,
        message=message,
        ruled_out=ruled_out,
        spent=copy(study.spent),
        best_seconds=posterior.expected_seconds(posterior.winner) if record else None,
        best_fidelity=record.fidelity if record else None,
        best_layout=study.candidates.batch.row(posterior.winner) if record else None,
        regret=study.regret() if kind != "asked" else None,
    )
