"""Today's layout beside number 1: its figures, what changes, the difference in the user's file."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.api.render.estimate import NARROW, bullets, heading, indented, violation_line
from planner.api.render.figures import NONE, percent, rate, seconds, size
from planner.intake.trainer_files.statement import LABELS
from planner.specs.layout import in_runs
from planner.specs.plan import Plan, RankedLayout
from planner.specs.plan_comparisons import VersusCurrent
from planner.trainers.registry import layout_line
from planner.units import counted, times_as_fast


def current_section(plan: Plan, width: int, *, saved: str | None) -> list[RenderableType]:
    """The section of the plan's screen; nothing for a job without `current`.

    saved: folder in which the new files lie already.
    """
    versus = plan.versus_current
    if versus is None:
        return []
    source = versus.source
    trainer = (plan.job.get("training") or {}).get("trainer", "torchtitan")
    title = "What you run today"
    if source is not None:
        title += f": {source['name']} ({LABELS.get(source['format'], source['format'])})"
    sections: list[RenderableType] = [
        "",
        heading(title),
        indented(Text(layout_line(versus.layout, trainer))),
        indented(figures(versus, plan.ranked[0], width)),
        *(indented(Text(line, style="bold")) for line in verdict(versus)),
    ]
    notes = [*(violation_line(one) for one in versus.violations), *versus.notes]
    if notes:
        sections.append(indented(bullets(notes, "!", "yellow")))
    if versus.changed and not versus.keep:
        sections.append(indented(changes(versus)))
    sections += _difference(versus, saved)
    return sections


def figures(versus: VersusCurrent, winner: RankedLayout, width: int) -> Table:
    """Today and number 1 side by side; measured figures of a log in a row of their own."""
    table = Table.grid(padding=(0, 2))
    names = ("", "tok/s/GPU", "step", "memory", "MFU")[: 5 if width >= NARROW else 4]
    table.add_row(*(Text(name, style="dim", justify="right") for name in names))
    rows = []
    for name, one in (("today", versus.estimate), ("number 1", winner.estimate)):
        speed, memory = rate(one.tokens_per_second_per_gpu), size(one.device_bytes)
        step = seconds(one.step_seconds)
        rows.append((f"{name}, predicted", speed, step, memory, percent(one.mfu)))
    if versus.measured is not None:
        found = versus.measured.get
        speed, step = rate(found("tokens_per_second_per_gpu")), seconds(found("step_seconds"))
        memory = f"{size(found('peak_reserved_bytes'))}*" if found("peak_reserved_bytes") else NONE
        rows.append(("today, measured", speed, step, memory, ""))
    for name, *cells in rows:
        numbers = (Text(cell, justify="right") for cell in cells[: len(names) - 1])
        table.add_row(Text(name, style="dim"), *numbers)
    return table


def verdict(versus: VersusCurrent) -> list[str]:
    """One or two sentences: how many times as fast number 1 is, or why today's cannot run."""
    is_file = versus.source is not None and not versus.source["format"].endswith("-log")
    name, found = "your file" if is_file else "it", versus.measured or {}
    estimate, lines = versus.estimate, []
    if estimate.step_seconds and found.get("step_seconds"):
        ratio = estimate.step_seconds / found["step_seconds"]
        measured = rate(found["tokens_per_second_per_gpu"])
        lines.append(f"Measured at {measured} tokens/s/GPU; predicted / measured step {ratio:.2f}.")
    if estimate.peak_reserved_bytes and found.get("peak_reserved_bytes"):
        predicted = size(estimate.peak_reserved_bytes)
        lines.append(f"* reserved by the allocator; predicted {predicted}.")
    if not estimate.valid or (versus.violations and versus.times_as_fast is None):
        return [*lines, f"Its trainer would refuse {name}."]
    if versus.violations:
        lines.append(f"Its trainer would refuse {name}.")
    missing, runs_out = size(versus.missing_bytes), f"{name.capitalize()} would run out of memory"
    if versus.missing_bytes is not None and versus.measured is None:
        lines.append(f"{runs_out} by {missing}.")
    elif versus.missing_bytes is not None:
        lines.append(f"By our count it is short of memory by {missing}; its log says that it ran.")
    elif estimate.fits is False:
        lines.append(f"{runs_out} with probability {percent(estimate.oom_probability)}.")
    return [*lines, *_advice(versus)]


def _advice(versus: VersusCurrent) -> list[str]:
    times, changed = versus.times_as_fast, len(versus.changed)
    if times is None:
        return []
    if not versus.changed:
        return ["It is number 1: keep it." if versus.keep else "It is the layout of number 1."]
    if versus.keep:
        told = "too close to tell"
        if versus.gain_sd is not None:
            told = f"within what the model can tell apart ({versus.gain_sd:.1%})"
        return [f"Keep it: number 1 is {times_as_fast(times)}, {told}."]
    fields = f"{counted(changed, 'field')} change{'s' * (changed == 1)}"
    return [f"Number 1 is {times_as_fast(times)}; {fields}."]


def changes(versus: VersusCurrent) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, (old, new) in versus.changed.items():
        table.add_row(Text(name, style="dim"), Text(f"{_shown(old)} -> {_shown(new)}"))
    return table


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return in_runs(value)
    words = {True: "on", False: "off", None: "its own"}
    return words[value] if isinstance(value, bool | None) else str(value)


def _difference(versus: VersusCurrent, saved: str | None) -> list[RenderableType]:
    if not versus.diff or versus.keep:
        return []
    ours = sorted(name for name in versus.files if name.endswith(".py"))
    also = f", with {', '.join(ours)} beside it" if ours else ""
    line = f"The difference of your file is at the end{also}."
    if saved is not None:
        line = f"The new files and their difference are in {saved}/current{also}"
    return [indented(Text(line, style="dim"))]


def difference_lines(plan: Plan) -> str:
    """The difference of the user's file, as patch takes it.

    Empty without a file, or where the file is best kept.
    """
    versus = plan.versus_current
    return "" if versus is None or versus.keep else versus.diff


def current_files(plan: Plan) -> dict[str, str]:
    """Files that --save-dir writes of it: the user's own anew, and the difference."""
    versus = plan.versus_current
    if versus is None or not versus.files:
        return {}
    return {
        **{f"current/{name}": text for name, text in versus.files.items()},
        "current/changes.diff": versus.diff,
    }
