"""What a plan's probes found, beside what was predicted."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from api.render.estimate import heading, indented
from planner.specs.plan import Plan
from planner.units import counted, format_seconds

SHOWN_TRIALS = 12
LOOKED = {"imitated": "imitated by smaller layouts", "emulated": "single ranks of it"}  # rungs on which the layout itself did not run
SAME = 0.01  # a measured step is taken for what it is where all that is known expects the same within this


def probing_section(plan: Plan) -> Iterator[RenderableType]:
    """The measured layouts and why probing stopped; nothing for a plan on paper."""
    if plan.probing is None:
        return
    yield heading("Measured")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("layout")
    for name in ("measured", "predicted", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in plan.ranked:
        found = entry.measurement or {}
        measured, predicted = found.get("step_seconds"), entry.estimate.step_seconds
        if measured and predicted:
            looked = LOOKED.get(found.get("rung", ""))
            name = f"{entry.layout.short()} ({looked})" if looked else entry.layout.short()
            table.add_row(name, format_seconds(measured), format_seconds(predicted), f"{measured / predicted:.2f}")
    if table.row_count:
        yield indented(table)
    failed = [trial for trial in plan.probing["trials"] if trial["state"] == "fail"]
    lines = [_sentence(plan.probing), *(f"failed: {_words(trial)}" for trial in failed[:SHOWN_TRIALS])]
    yield from (indented(Text(line)) for line in lines)
    yield ""


def measured_line(plan: Plan) -> Iterator[RenderableType]:
    """The winner's speed where it was measured, and what is expected of it now; the figures below it are the cost model's."""
    winner = plan.ranked[0]
    step, predicted, expected = (winner.measurement or {}).get("step_seconds"), winner.estimate.step_seconds, winner.expected_step_seconds
    tokens = winner.estimate.tokens_per_second_per_gpu
    if step and predicted and tokens:
        speed = f"{tokens * predicted / step:,.0f} tokens/s/GPU"
        noisy = expected is not None and abs(expected / step - 1.0) > SAME
        weighed = f"; {format_seconds(expected or step)} expected, as such a measurement is noisy and others differ" if noisy else ""
        how = ", ".join(["Measured", *filter(None, [LOOKED.get((winner.measurement or {}).get("rung", ""))])])
        said = f"{format_seconds(step)} a step, {speed}{weighed}. The cost model on paper:"
        yield indented(Text.assemble((f"{how}: ", "bold"), said))


def _sentence(probing: dict[str, Any]) -> str:
    regret = f"expected regret of number 1: {probing['expected_regret']:.1%}"
    ruled_out = f"; {counted(probing['num_ruled_out'], 'layout')} ruled out by what ran out of memory" if probing["num_ruled_out"] else ""
    looks = f" and {counted(probing['looks'], 'cheaper look')}" if probing.get("looks") else ""
    spent = f"{counted(probing['probes'], 'probe')}{looks}, {probing['gpu_seconds']:.0f} GPU-seconds"
    return f"{spent}; {regret}{ruled_out}; stopped: {probing['stopped']}"


def _words(trial: dict[str, Any]) -> str:
    return str(trial.get("message") or trial.get("failure") or "no reason given")
