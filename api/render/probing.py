"""What a plan's probes found, beside what was predicted."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from api.render.estimate import NARROW, heading, indented
from api.render.figures import NONE, seconds
from planner.specs.layout import Layout
from planner.specs.plan import Plan
from planner.units import counted, format_seconds

SHOWN_MEASURED = 20
SHOWN_LINES = 12  # of a kind: failures, say
REALLY = ("probed", "published")  # rungs on which the layout itself ran
LOOKED = {"imitated": "imitated by smaller layouts", "emulated": "single ranks of it"}  # the rungs on which it did not
HOW = {**dict.fromkeys(REALLY, "ran itself"), "imitated": "imitated", "emulated": "single ranks"}
SAME = 0.01  # a measured step is taken for what it is where all that is known expects the same within this


def probing_section(plan: Plan, width: int) -> Iterator[RenderableType]:
    """Every measured layout, what failed and why probing stopped; nothing for a plan on paper."""
    if plan.probing is None:
        return
    trials = plan.probing["trials"]
    measured = sorted((trial for trial in trials if trial.get("value")), key=lambda trial: float(trial["value"]))
    yield heading("Measured")
    if measured:
        yield indented(_measured_table(plan, measured[:SHOWN_MEASURED], width))
    more = [f"and {len(measured) - SHOWN_MEASURED:,} more"] if len(measured) > SHOWN_MEASURED else []
    reasons = plan.probing.get("refused", [])
    refused = [f"{counted(one['layouts'], 'layout')} cannot be run by the probe program: {one['reason']}" for one in reasons]
    full = [f"out of memory: {_layout(trial).short()}" for trial in trials if trial.get("status") == "oom"]
    failed = [f"failed: {_layout(trial).short()}: {_words(trial)}" for trial in trials if trial["state"] == "fail"]
    lines = [*more, _sentence(plan.probing), *_first(refused), *_first(full), *_first(failed)]
    yield from (indented(Text(line)) for line in lines)
    yield ""


def _measured_table(plan: Plan, trials: list[dict[str, Any]], width: int) -> Table:
    """Measured steps in this order, beside the predictions of those that are ranked; number 1 in bold. Narrow: the ratio alone."""
    ranked = {entry.layout: entry for entry in plan.ranked}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("layout", overflow="fold")
    table.add_column("how", no_wrap=True)
    beside = ("predicted", "ratio") if width >= NARROW else ("ratio",)
    for name in ("measured", *beside):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in trials:
        layout, rung, step = _layout(trial), trial.get("rung", ""), float(trial["value"])
        entry = ranked.get(layout)
        predicted = entry.estimate.step_seconds if entry is not None else None
        compared = {"predicted": seconds(predicted), "ratio": f"{step / predicted:.2f}" if predicted else NONE}
        row = (layout.short(), HOW.get(rung, NONE), _with_error(step, rung, trial.get("log_seconds_sd")))
        table.add_row(*row, *(compared[name] for name in beside), style="bold" if layout == plan.ranked[0].layout else "")
    return table


def measured_line(plan: Plan) -> Iterator[RenderableType]:
    """The winner's speed where it was measured, and what is expected of it now; the figures below it are the cost model's."""
    winner = plan.ranked[0]
    found, predicted, expected = winner.measurement or {}, winner.estimate.step_seconds, winner.expected_step_seconds
    step, rung = found.get("step_seconds"), found.get("rung", "")
    tokens = winner.estimate.tokens_per_second_per_gpu
    if step and predicted and tokens:
        speed = f"{tokens * predicted / step:,.0f} tokens/s/GPU"
        noisy = expected is not None and abs(expected / step - 1.0) > SAME
        weighed = f"; {format_seconds(expected or step)} expected, as such a measurement is noisy and others differ" if noisy else ""
        how = ", ".join(["Measured", *filter(None, [LOOKED.get(rung)])])
        said = f"{_with_error(step, rung, found.get('relative_error'))} a step, {speed}{weighed}. The cost model on paper:"
        yield indented(Text.assemble((f"{how}: ", "bold"), said))


def _sentence(probing: dict[str, Any]) -> str:
    regret = f"expected regret of number 1: {probing['expected_regret']:.1%}"
    ruled_out = f"; {counted(probing['num_ruled_out'], 'layout')} ruled out by what ran out of memory" if probing["num_ruled_out"] else ""
    looks = f" and {counted(probing['looks'], 'cheaper look')}" if probing.get("looks") else ""
    spent = f"{counted(probing['probes'], 'probe')}{looks}, {probing['gpu_seconds']:.0f} GPU-seconds"
    return f"{spent}; {regret}{ruled_out}; stopped: {probing['stopped']}"


def _with_error(step_seconds: float, rung: str, error: float | None) -> str:
    """A measured step, with its relative standard error where the layout itself did not run."""
    own = "" if error is None or rung in REALLY else f" ± {error:.0%}"
    return f"{format_seconds(step_seconds)}{own}"


def _layout(trial: dict[str, Any]) -> Layout:
    return Layout.model_validate(trial["layout"])


def _first(lines: list[str]) -> list[str]:
    """The first of many lines of a kind, and how many there are besides."""
    return lines if len(lines) <= SHOWN_LINES else [*lines[:SHOWN_LINES], f"and {len(lines) - SHOWN_LINES:,} more"]


def _words(trial: dict[str, Any]) -> str:
    return str(trial.get("message") or trial.get("failure") or "no reason given")
