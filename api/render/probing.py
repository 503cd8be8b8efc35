"""Findings of a plan's probes beside their predictions."""

import math
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from planner.api.render.estimate import INDENT, heading, indented
from planner.api.render.figures import NONE, seconds
from planner.api.render.grid import Column, grid, number
from planner.specs.layout import Layout
from planner.specs.plan import LEAST_MOVED, Plan
from planner.units import counted, format_seconds

SHOWN_MEASURED = 20
SHOWN_LINES = 12  # of a kind: failures, say
REALLY = ("probed", "published")  # rungs on which the layout itself ran
# where it did not
STOOD_FOR = {"imitated": "smaller runs that stood for it", "emulated": "single ranks of it"}
HOW = {
    **dict.fromkeys(REALLY, "ran itself"),
    "imitated": "smaller runs",
    "emulated": "single ranks",
}


def probing_section(plan: Plan, width: int) -> Iterator[RenderableType]:
    """Every measured layout, what failed and why probing stopped; nothing for a plan on paper."""
    if plan.probing is None:
        return
    trials = plan.probing["trials"]
    measured = sorted(
        (trial for trial in trials if trial.get("value")), key=lambda trial: float(trial["value"])
    )
    yield heading("Measured")
    if measured:
        yield indented(_measured_table(plan, measured[:SHOWN_MEASURED], width - INDENT))
    more = len(measured) - SHOWN_MEASURED
    refused = [
        f"{counted(one['layouts'], 'layout')} cannot be run by the probe program: {one['reason']}"
        for one in plan.probing.get("refused", [])
    ]
    full = [one for one in trials if one.get("status") == "oom"]
    failed = [one for one in trials if one["state"] == "fail"]
    lines = [
        *([f"and {more:,} more"] if more > 0 else ()),
        *_faster_on_paper(plan),
        _sentence(plan.probing),
        *_first(refused),
        *_first([f"out of memory: {_layout(one).short()}" for one in full]),
        *_first([f"failed: {_layout(one).short()}: {_words(one)}" for one in failed]),
    ]
    yield from (indented(Text(line)) for line in lines)
    yield ""


def _faster_on_paper(plan: Plan) -> list[str]:
    """Layouts not measured that should beat the fastest measured one: the next to probe."""
    best = plan.ranked[0]
    if best.source != "probed" or not best.expected_step_seconds:
        return []
    rivals = [
        (entry.expected_step_seconds, entry)
        for entry in plan.ranked[1:]
        if entry.measurement is None and entry.expected_step_seconds
    ]
    step_seconds, entry = min(rivals, key=itemgetter(0), default=(math.inf, best))
    faster = best.expected_step_seconds / step_seconds
    if faster <= 1.0 + LEAST_MOVED:
        return []
    return [
        f"expected {faster:.2f} times as fast as number 1 and not measured, the next to probe: "
        f"{entry.layout.short()}"
    ]


MEASURED = (
    Column(name="layout", wraps=True, below=True),
    Column(name="how"),
    number("measured"),
    number("predicted", drop=0),
    number("ratio"),
)


def _measured_table(plan: Plan, trials: list[dict[str, Any]], width: int) -> Text:
    """Measured steps beside the predictions of those that are ranked; number 1 in bold."""
    ranked = {entry.layout: entry for entry in plan.ranked}
    rows = []
    for trial in trials:
        layout, rung, step = _layout(trial), trial.get("rung", ""), float(trial["value"])
        entry = ranked.get(layout)
        predicted = entry.estimate.step_seconds if entry is not None else None
        ratio = f"{step / predicted:.2f}" if predicted else NONE
        measured = _with_error(step, rung, trial.get("log_seconds_sd"))
        rows.append((layout.short(), HOW.get(rung, NONE), measured, seconds(predicted), ratio))
    return grid(
        MEASURED, rows, width, bold=[_layout(trial) == plan.ranked[0].layout for trial in trials]
    )


def measured_line(plan: Plan) -> Iterator[RenderableType]:
    """How the winner's speed is known, where probes were spent.

    The figures below it are of the same step.
    """
    winner = plan.ranked[0]
    found, expected = winner.measurement or {}, winner.expected_step_seconds
    step, rung, runs = found.get("step_seconds"), found.get("rung", ""), int(found.get("runs") or 1)
    if not expected:
        return
    if step and not found.get("believed", True):
        title = "Measured once, and not believed alone"
        said = f"{format_seconds(step)} a step; {format_seconds(expected)} expected"
    elif step and rung in REALLY:
        mean, over = found.get("mean_step_seconds") or step, "over 1 run"
        if runs > 1:
            over = f"the fastest of {counted(runs, 'run')} (mean {format_seconds(mean)})"
        title, said = "Measured", f"{format_seconds(step)} a step, {over}"
    elif step:
        title, shown = "Not run itself", _with_error(step, rung, found.get("relative_error"))
        said = f"{shown} a step by {STOOD_FOR[rung]}; {format_seconds(expected)} expected with all "
        said += "that was measured"
    else:
        title = "Not measured"
        said = f"{format_seconds(expected)} a step expected by what was measured of others"
    predicted = f"{said}; predicted {seconds(winner.estimate.step_seconds)}."
    yield indented(Text.assemble((f"{title}: ", "bold"), predicted))


def _sentence(probing: dict[str, Any]) -> str:
    regret = f"expected regret of number 1: {probing['expected_regret']:.1%}"
    if probing["num_ruled_out"]:
        ruled_out = counted(probing["num_ruled_out"], "layout")
        regret += f"; {ruled_out} ruled out by what ran out of memory"
    spent = counted(probing["probes"], "probe")
    if probing.get("looks"):
        spent += f" and {counted(probing['looks'], 'smaller run')}"
    used = f"{probing['gpu_seconds']:.0f} GPU-seconds"
    return f"{spent}, {used}; {regret}; stopped: {probing['stopped']}"


def _with_error(step_seconds: float, rung: str, error: float | None) -> str:
    """A measured step, with its relative standard error where the layout itself did not run."""
    own = "" if error is None or rung in REALLY else f" ± {error:.0%}"
    return f"{format_seconds(step_seconds)}{own}"


def _layout(trial: dict[str, Any]) -> Layout:
    return Layout.model_validate(trial["layout"])


def _first(lines: list[str]) -> list[str]:
    """The first of many lines of a kind, and how many there are besides."""
    more = len(lines) - SHOWN_LINES
    return [*lines[:SHOWN_LINES], f"and {more:,} more"] if more > 0 else lines


def _words(trial: dict[str, Any]) -> str:
    return str(trial.get("message") or trial.get("failure") or "no reason given")
