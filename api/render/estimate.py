"""One estimate on one screen; the bars are shared with the plan."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.api.render.bars import legend, memory_parts, stacked_bar, time_parts
from planner.api.render.figures import (
    interval_of,
    parameters,
    percent,
    rate,
    rate_interval,
    risk,
    seconds,
    size,
)
from planner.api.render.simulations import communication_section
from planner.specs.estimate import OOM_LIMIT, Estimate, Violation
from planner.specs.estimate_parts import bottleneck
from planner.specs.job import Job
from planner.specs.mixers import MIXER_KINDS
from planner.trainers.registry import layout_line
from planner.units import counted

INDENT = 2
TOLD = 0.01  # of the memory: what the allocator gives back is said from there on
NARROW = 76  # columns below which tables show less


def heading(text: str) -> Text:
    return Text(text, style="bold")


def indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, INDENT))


def bullets(lines: list[str], mark: str = "-", style: str = "") -> Table:
    """A list whose long items wrap under themselves."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=len(mark), style=style)
    table.add_column()
    for line in lines:
        table.add_row(mark, line)
    return table


def violation_line(violation: Violation) -> str:
    """One reason why a layout cannot run; a flag has no value."""
    value = "" if violation.value is None else f"={violation.value}"
    return f"{violation.field}{value}: {violation.rule}; {violation.remedy}"


def memory_section(estimate: Estimate, width: int, *, letters: bool) -> list[RenderableType]:
    """The memory bar of the worst pipeline rank against what may be used."""
    if estimate.memory is None or estimate.device_bytes is None or estimate.usable_bytes is None:
        return []
    title, stages = "Memory of the fullest GPU", len(estimate.memory.stages)
    if stages > 1:
        title += f", pipeline rank {estimate.memory.worst_stage} of {stages}"
    usable = f"{size(estimate.device_bytes)} of {size(estimate.usable_bytes)} usable"
    parts = memory_parts(estimate)
    bar = stacked_bar(parts, estimate.usable_bytes, width - INDENT, letters=letters)
    return [
        heading(f"{title}: {usable}"),
        indented(bar),
        indented(legend(parts, width - INDENT, letters=letters)),
    ]


def time_section(
    estimate: Estimate, width: int, *, letters: bool, overhead: bool = True, beside: str = ""
) -> list[RenderableType]:
    """The bar of one step. overhead: whether to name the largest cost beside compute.
    beside: words behind its heading.
    """
    if estimate.time is None or estimate.step_seconds is None:
        return []
    parts = time_parts(estimate)
    bar = stacked_bar(parts, estimate.step_seconds, width - INDENT, letters=letters)
    return [
        heading(f"Time of one step: {seconds(estimate.step_seconds)}{beside}"),
        indented(bar),
        indented(legend(parts, width - INDENT, letters=letters)),
        *([indented(Text(bottleneck(estimate)))] if overhead else ()),
    ]


Row = tuple[str, str, str]


def key_figures(
    estimate: Estimate,
    width: int,
    *,
    step_seconds: float | None = None,
    more_rows: Sequence[Row] = (),
) -> Table:
    """The figures of the headline: name, value, and a note, which narrow terminals show below it.

    step_seconds: of a step where it was measured; the prediction is then shown beside it.
    """
    interval = estimate.interval
    peak = interval_of(interval.peak_reserved_bytes if interval else None, size)
    used = f"{size(estimate.device_bytes)} of {size(estimate.usable_bytes)}"
    rows = (
        *_speed_rows(estimate, step_seconds),
        ("memory", used, f"reserved {size(estimate.peak_reserved_bytes)} ({peak})"),
        ("runs out of memory", risk(estimate.oom_probability), "; ".join(_risks(estimate))),
        *more_rows,
    )
    return figures_table(rows, narrow=width < NARROW)


def figures_table(rows: Iterable[Row], *, narrow: bool = False) -> Table:
    """Name, value and note of each figure. narrow: the note stands below its value."""
    table = Table.grid(padding=(0, 2))
    for name, value, more in rows:
        cells = [Text(value, style="bold"), Text(more, style="dim")]
        if narrow:
            cells = [Text("\n" if more else "").join(cells)]
        table.add_row(Text(name, style="dim"), *cells)
    return table


def verdict(estimate: Estimate) -> Text:
    """Whether it fits; what only the share of the card that plans keep free makes too risky."""
    if estimate.fits:
        return Text("It fits.", style="bold green")
    whole = estimate.oom_probability_full_card
    if whole is not None and whole <= OOM_LIMIT:
        words = "It fits the card, but not with the share of it that a plan keeps free."
        return Text(words, style="bold yellow")
    return Text("It does not fit.", style="bold red")


def _risks(estimate: Estimate) -> Iterator[str]:
    """Lines on the risk: why it does not fit, and how all of the card compares."""
    if not estimate.fits:
        yield "too risky: more than 5%"
    device, given = estimate.device_bytes or 0.0, estimate.reclaimable_bytes or 0.0
    if given > TOLD * device > 0.0:
        yield f"of {size(device)} the allocator gives {size(given)} back when memory runs short"
    whole = risk(estimate.oom_probability_full_card)
    if whole != risk(estimate.oom_probability):
        yield f"with all of the card {whole}"


def _speed_rows(estimate: Estimate, step_seconds: float | None) -> tuple[Row, ...]:
    """Throughput, step and utilisation: one value each, the measured one where there is one."""
    tokens, mfu, step = estimate.tokens_per_second_per_gpu, estimate.mfu, estimate.step_seconds
    if step_seconds is None or step is None:
        interval = estimate.interval.step_seconds if estimate.interval else None
        learned = f", {estimate.learned.statement}" if estimate.learned else ""
        # windows and causal attention do less work than is counted, eight bits more than the peak
        over = ", over the bf16 peak" if max(mfu or 0.0, estimate.hfu or 0.0) > 1 else ""
        count = f"full attention, as TorchTitan counts{over}; HFU {percent(estimate.hfu)} counts "
        count += "what runs"
        return (
            ("throughput", f"{rate(tokens)} tokens/s/GPU", rate_interval(estimate)),
            ("step", seconds(step), f"{interval_of(interval, seconds)}{learned}"),
            ("MFU", percent(mfu), count),
        )
    faster = step / step_seconds
    measured = rate(None if tokens is None else tokens * faster)
    return (
        ("throughput", f"{measured} tokens/s/GPU", f"predicted {rate(tokens)}"),
        ("step", seconds(step_seconds), f"predicted {seconds(step)}"),
        ("MFU", percent(None if mfu is None else mfu * faster), f"predicted {percent(mfu)}"),
    )


def basis_line(estimate: Estimate) -> Text:
    """The basis of the figures: how many mechanisms runs show best, and the others by name."""
    names: dict[str, list[str]] = {}
    for name, kind in (estimate.basis or {}).items():
        mixer = MIXER_KINDS.get(name)
        names.setdefault(kind, []).append(mixer.words if mixer else name)
    shown = [
        f"{counted(len(found), 'mechanism') if kind == 'calibrated' else ', '.join(found)} {kind}"
        for kind, found in sorted(names.items())
    ]
    return Text(
        f"Based on: {'; '.join(shown)}. Model {estimate.model_version}, calibration "
        f"{_taught(estimate.calibration_id)}.",
        style="dim",
    )


def _taught(calibration_id: str) -> str:
    """The calibration, and what it learned from in this database.

    `planner.calibration.update` has the form of an id.
    """
    count, _, _ = calibration_id.partition("+")[2].partition("-")
    if not count:
        return calibration_id
    what = {"0": "kernels timed", "1": "1 layout measured"}.get(count, f"{count} layouts measured")
    return f"{calibration_id}, taught by {what} in this database"


def question_line(job: Job) -> str:
    counts = job.cluster.num_gpus_choices
    size_of_model = parameters(job.model.total_parameters(), job.model.active_parameters())
    num_gpus = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return (
        f"{job.model.name}{size_of_model} on {num_gpus} x {job.cluster.gpu.name}, "
        f"{counted(job.training.seq_len, 'token')} x "
        f"{counted(job.training.global_batch_size, 'sequence')}, {job.training.trainer}"
    )


def estimate_view(
    estimate: Estimate, job: Job, width: int, *, letters: bool, kept_id: str
) -> RenderableType:
    layout = layout_line(job.layout, job.training.trainer) if job.layout is not None else ""
    question = Text(question_line(job), style="dim")
    top: list[RenderableType] = [question, Text(layout, style="bold"), ""]
    if estimate.unsupported:
        lacking = [f"{v.rule}; {v.remedy}" for v in estimate.unsupported]
        words = "Nothing can run this as it stands; the figures are what the hardware could do:"
        top = [top[0], Text(words, style="bold red"), indented(bullets(lacking)), *top[1:]]
    if not estimate.valid:
        faults = [violation_line(one) for one in estimate.violations]
        return Group(
            *top,
            Text("This layout cannot run:", style="bold red"),
            indented(bullets(faults)),
            indented(bullets(estimate.warnings, "!", "yellow")),
        )
    sections = [*top, verdict(estimate), indented(key_figures(estimate, width)), ""]
    sections += [*memory_section(estimate, width, letters=letters), ""]
    sections += [*time_section(estimate, width, letters=letters), ""]
    if estimate.communication:
        sections += [*communication_section(estimate.communication, width), ""]
    if estimate.warnings:
        warnings = indented(bullets(estimate.warnings, "!", "yellow"))
        sections += [Text("Warnings", style="bold yellow"), warnings, ""]
    return Group(*sections, basis_line(estimate), Text(f"Kept as {kept_id}", style="dim"))
