"""A plan on one screen: what wins, by how much, why, and what to paste."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.api.render.current import current_section
from planner.api.render.estimate import (
    INDENT,
    NARROW,
    Row,
    basis_line,
    bullets,
    figures_table,
    heading,
    indented,
    key_figures,
    memory_section,
    time_section,
)
from planner.api.render.figures import parameters, percent, rate, seconds, size, too_risky
from planner.api.render.grid import Column, Columns, grid, listed, number
from planner.api.render.launch import launch_lines
from planner.api.render.probing import measured_line, probing_section
from planner.catalog.clusters import gpu_aliases
from planner.specs.layout import Layout
from planner.specs.plan import SOURCES, Plan
from planner.specs.plan_comparisons import SizeOption
from planner.specs.run import RunEstimate
from planner.trainers.registry import layout_line
from planner.units import (
    HOUR,
    KILO,
    MEGA,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    three_digits,
)

SHOWN_RANKS = 10
UNMEASURED = "*"  # after the rank of a layout that rests on what nobody measured


def plan_view(plan: Plan, width: int, *, letters: bool, saved: str | None = None) -> RenderableType:
    """The whole screen of `recommend`. saved: folder that holds the files of every rank."""
    winner = plan.ranked[0]
    # the bar shows the predicted step, where another one stands in the headline
    beside = " as predicted" if winner.expected_step_seconds else ""
    figures = key_figures(
        winner.estimate,
        width,
        step_seconds=winner.expected_step_seconds,
        more_rows=list(_other_routing(plan)),
    )
    sections: list[RenderableType] = [
        Text(question(plan), style="dim"),
        Text.assemble(("Best: ", "bold green"), (_line(plan, winner.layout), "bold")),
        *_resting(plan),
        *_on_paper(plan),
        *measured_line(plan),
        indented(figures),
        *current_section(plan, width, saved=saved),
        "",
        ranked_table(plan, width),
        *sources_line(plan, width),
        "",
        *probing_section(plan, width),
        *memory_section(winner.estimate, width, letters=letters),
        "",
        # The first of the reasons says what costs most.
        *time_section(winner.estimate, width, letters=letters, overhead=False, beside=beside),
        "",
    ]
    if winner.run is not None:
        sections += [*run_section(winner.run, winner.num_gpus), ""]
    if len(plan.sizes) > 1:
        sections += [heading("How many GPUs"), indented(sizes_table(plan, width - INDENT)), ""]
    for title, lines in _reasons(plan):
        if lines:
            sections += [heading(title), indented(bullets(lines)), ""]
    if plan.warnings:
        warnings = indented(bullets(plan.warnings, "!", "yellow"))
        sections += [Text("Warnings", style="bold yellow"), warnings, ""]
    sections += [
        *launch_lines(plan, winner, width, saved),
        "",
        searched_line(plan),
        basis_line(winner.estimate),
        _kept(plan),
    ]
    return Group(*sections)


def _line(plan: Plan, layout: Layout) -> str:
    training: Mapping[str, Any] = plan.job.get("training") or {}
    return layout_line(layout, training.get("trainer", "torchtitan"))


def _resting(plan: Plan) -> list[RenderableType]:
    """Features of number 1 that nobody measured, and the best layout that does without."""
    if plan.rests_on is None:
        return []
    lines, other = [Text(f"{plan.rests_on}.", style="yellow")], plan.best_measured
    if other is not None:
        lines.append(Text.assemble((f"Number {other.rank}: ", "dim"), _line(plan, other.layout)))
    return [indented(line) for line in lines]


def _on_paper(plan: Plan) -> list[RenderableType]:
    """The fastest prediction, where a simpler layout stands before it, and what it would gain."""
    other = plan.fastest_on_paper
    if other is None:
        return []
    where = f" (number {other.rank})" if other.rank is not None else ""
    return [
        Text.assemble((f"Fastest on paper{where}: ", "dim"), _line(plan, other.layout)),
        indented(Text(f"{other.statement}.", style="dim")),
    ]


def _other_routing(plan: Plan) -> Iterator[Row]:
    """Speed and memory of number 1 under another load of the busiest expert rank.

    Published runs force routers to balance; one that learns may send the busiest rank twice the
    mean (marin issue 7668: MFU 32.4% balanced, 14.7% learnt).
    """
    loads = [step for step in plan.sensitivity if step.field == "training.moe_imbalance"]
    step = max(loads, key=lambda step: abs(math.log(step.step_ratio or 1.0)), default=None)
    now = plan.ranked[0].estimate
    if step is None or not (step.step_ratio and now.step_seconds and step.device_bytes):
        return
    busiest = float(str(step.new))
    close = step.device_bytes <= (now.usable_bytes or 0.0)
    reason = f" ({'too close to be safe' if close else 'does not fit'})"
    yield (
        "balanced routing" if busiest == 1.0 else "learnt routing",
        f"{rate((now.tokens_per_second_per_gpu or 0.0) / step.step_ratio)} tokens/s/GPU",
        f"{seconds(now.step_seconds * step.step_ratio)} a step, {size(step.device_bytes)}"
        f"{'' if step.fits else reason} where the busiest expert rank takes "
        f"{busiest:g} times the mean load",
    )


def question(plan: Plan) -> str:
    """The job in one line, from what was asked."""
    job = plan.job
    training: Mapping[str, Any] = job.get("training") or {}
    model, cluster = job.get("model"), job.get("cluster")
    given = {"name": short_path(model)} if isinstance(model, str) else model or {}
    name = given.get("name") or given.get("base") or "the model"
    machine = cluster if isinstance(cluster, str) else (cluster or {}).get("gpu")
    machine = machine if isinstance(machine, str) else (machine or {}).get("name", "GPUs")
    machine = gpu_aliases().get(machine.lower(), machine)  # "a100" leaves open which
    trainer = training.get("trainer", "torchtitan")
    tokens = counted(training.get("seq_len", 0), "token")
    tokens += f" x {counted(training.get('global_batch_size', 0), 'sequence')}"
    name += parameters(plan.num_parameters, plan.num_active_parameters)
    return f"{name} on {counted(plan.ranked[0].num_gpus, 'GPU')} ({machine}), {tokens}, {trainer}"


def short_path(model: str) -> str:
    """A file's own name, or its folder's for a config.json; any other name as it is."""
    path = Path(model)
    if path.suffix == ".json":
        return path.parent.name or path.stem if path.name == "config.json" else path.stem
    return path.name if path.is_absolute() else model


RANKED = (
    number("#"),
    Column(name="layout", wraps=True, below=True),
    number("tok/s/GPU"),
    number("MFU", drop=2),
    number("step"),
    number("memory", drop=1),
    Column(name="source", drop=0),
)
# What is minimised where that is not the step: the name of its column, and the figure of a layout.
MINIMISED: Mapping[str, tuple[str, Callable[[RunEstimate], str]]] = {
    "cost": ("price", lambda run: money(run.cost)),
    "energy": ("J/token", lambda run: f"{run.joules_per_token:.3g}"),
}


def ranked_table(plan: Plan, width: int) -> Text:
    """The ranked layouts, best first; on narrow terminals fewer figures beside each."""
    sizes = {entry.num_gpus for entry in plan.ranked}
    shown = [one for one in plan.ranked if one.rank <= SHOWN_RANKS or one.source == "probed"]
    search = plan.job.get("search") or {}
    beside = MINIMISED.get(search.get("objective", "")) if all(one.run for one in shown) else None
    rows = []
    for entry in shown:
        figures, layout = entry.shown, _line(plan, entry.layout)
        if len(sizes) > 1:
            layout = f"{counted(entry.num_gpus, 'GPU')}: {layout}"
        rows.append(
            (
                f"{entry.rank}{UNMEASURED if entry.unmeasured else ''}",
                layout,
                rate(figures.tokens_per_second_per_gpu),
                percent(figures.mfu),
                seconds(figures.step_seconds),
                size(figures.device_bytes),
                *([beside[1](entry.run)] if beside and entry.run else ()),
                entry.source if entry.moved is None else f"{entry.source} x{entry.moved:.2f}",
            )
        )
    columns = [*RANKED[:-1], *([number(beside[0])] if beside else []), RANKED[-1]]
    return grid(columns, rows, width, bold=[entry.rank == 1 for entry in shown])


def sources_line(plan: Plan, width: int) -> list[RenderableType]:
    """The meaning of the column `source` where it is shown, and of the mark of the unmeasured."""
    shown = {entry.source for entry in plan.ranked} if width >= NARROW else set()
    said = "; ".join(f"{name}: {means}" for name, means in SOURCES.items() if name in shown)
    if said and any(entry.moved is not None for entry in plan.ranked):
        said += "; x: of its predicted step, moved by what was measured"
    lines = [said] if said else []
    words = dict.fromkeys(word for entry in plan.ranked for word in entry.unmeasured)
    if words:
        lines.append(f"{UNMEASURED} no run behind the calibration used {', '.join(words)}")
    return [indented(Text(line, style="dim")) for line in (*lines, *too_risky(plan))]


def run_section(run: RunEstimate, num_gpus: int) -> list[RenderableType]:
    """Time, price and energy of all tokens, and what checkpoints and failures cost."""
    saves = run.checkpoint
    lost = f"{run.saving_share:.2%} saving, {run.lost_share:.2%} redone, "
    lost += f"{run.restarting_share:.2%} restarting"
    blocks = seconds(saves.blocking_seconds + saves.delay_seconds)
    saving = f"{seconds(saves.interval_seconds)} apart; {size(saves.saved_bytes)} a save: blocks "
    saving += blocks
    if saves.upload_seconds:
        saving += f", uploads {seconds(saves.upload_seconds)}"
    if saves.host_memory_bytes:
        saving += f", {format_bytes(saves.host_memory_bytes)} of host memory a node"
    speed = f"{rate(run.tokens_per_second)} tokens/s on {counted(num_gpus, 'GPU')}"
    hours = f"{format_count(run.gpu_hours)} GPU-hours at {money(run.cost / run.gpu_hours)}"
    watts = f"{run.joules_per_token:.3g} J a token, {run.mean_watts_per_gpu:,.0f} W a GPU with its "
    watts += f"share of the data centre; {mass(run.co2_grams)} CO2"
    failures = f"about {run.expected_failures:,.1f} in the run"
    rows = (
        ("time to train", seconds(run.time_to_train_seconds), speed),
        ("goodput", f"{run.goodput:.2%}", lost),
        ("price", money(run.cost), hours),
        ("energy", energy(run.energy_joules), watts),
        ("checkpoints", f"{saves.mode}, every {counted(saves.interval_steps, 'step')}", saving),
        ("interruptions", f"every {seconds(run.mtbf_seconds)}", failures),
    )
    assumed = Text(f"{'; '.join(run.assumptions)}.", style="dim")
    title = f"The whole run: {format_count(run.tokens)} tokens"
    given = "" if run.total_tokens else ", an example; training.total_tokens sets yours"
    return [heading(title + given), indented(figures_table(rows)), indented(assumed)]


def sizes_table(plan: Plan, width: int) -> Text:
    """The best layout of every number of GPUs.

    A star marks the front of time against price, bold the chosen size.
    """
    columns: Columns[SizeOption] = (
        (number("GPUs"), lambda one: f"{one.num_gpus:,}"),
        (number("tok/s"), lambda one: rate(one.tokens_per_second)),
        (number("time"), lambda one: seconds(one.time_to_train_seconds)),
        (number("price"), lambda one: money(one.cost)),
        (number("energy", drop=1), lambda one: energy(one.energy_joules)),
        (number("CO2", drop=0), lambda one: mass(one.co2_grams)),
        (Column(name=""), lambda one: "*" if one.on_front else ""),
        (Column(name="layout", wraps=True, below=True), lambda one: _line(plan, one.layout)),
    )
    bold = [option.num_gpus == plan.ranked[0].num_gpus for option in plan.sizes]
    note = Text("* no other size is both sooner done and cheaper", style="dim")
    return Text("\n").join([listed(columns, plan.sizes, width, bold=bold), note])


def money(dollars: float) -> str:
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"


def energy(joules: float) -> str:
    """kWh, or MWh from a thousand on."""
    kwh = joules / (KILO * HOUR)
    return f"{three_digits(kwh / KILO)} MWh" if kwh >= KILO else f"{kwh:.3g} kWh"


def mass(grams: float) -> str:
    """kg, or tonnes from a thousand on."""
    return f"{three_digits(grams / MEGA)} t" if grams >= MEGA else f"{grams / KILO:.3g} kg"


def _reasons(plan: Plan) -> list[tuple[str, list[str]]]:
    sections = [("Why this one", plan.ranked[0].reasons)]
    probed = plan.probing is not None  # then the measured table decides, and says the regret
    if len(plan.ranked) > 1:
        on_paper = ", on paper" if probed else ""
        sections.append((f"Number 2 against number 1{on_paper}", plan.headline[1:]))
    if plan.regret is not None and not probed:
        sections.append(("How sure", [plan.regret.statement]))
    return sections


def searched_line(plan: Plan) -> Text:
    s = plan.searched
    return Text(
        f"Looked at {counted(s.layouts, 'legal layout')}: {s.priced:,} priced (the others cannot "
        f"win), {s.fitting:,} fit; {s.simulated:,} simulated, the best of these and variants of "
        "them (memory budgets, splits of layers), in "
        f"{format_seconds(s.seconds)}.{_sampled(s.study)}",
        style="dim",
    )


def _sampled(study: Mapping[str, Any] | None) -> str:
    """The result of sampling beside enumeration, or why it did not run."""
    if study is None:
        return ""
    if not study["trials"] and "reason" in study:
        return f" Nothing was sampled beyond these: {study['reason']}."
    gain = float(study.get("gain", 0.0))
    found = f"a layout {gain:.1%} faster" if gain >= 0.0005 else "nothing faster"
    tried = counted(study["trials"], "variant")
    return (
        f" Sampler {study['sampler']} proposed {tried} with what enumeration leaves out and found "
        f"{found}."
    )


def _kept(plan: Plan) -> Text:
    question = f"planner-cli explain {plan.id} --rank 2 --versus 1"
    return Text.assemble(("Kept as ", "dim"), plan.id, ("; ask ", "dim"), question)
