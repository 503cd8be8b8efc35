"""Stacked bars of memory and time: colours where there are colours, else letters."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from planner.specs import estimate_parts
from planner.specs.estimate import Estimate
from planner.units import format_bytes, format_seconds

COLOURS = (
    "green", "cyan", "blue", "magenta", "yellow", "red", "bright_blue", "bright_magenta", "white",
    "bright_black",
)  # fmt: skip
FREE = "·"
GAP = "   "


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of a bar. letter: shown where there are no colours. shown: its size as text."""

    name: str
    letter: str
    size: float
    shown: str


def stacked_bar(parts: Sequence[BarPart], whole: float, width: int, *, letters: bool) -> Text:
    """`parts` side by side on a bar of `width` columns for `whole`; the rest is dots.

    Where the parts exceed `whole`, a "|" marks its end.
    """
    total = sum(part.size for part in parts)
    scale = max(whole, total) or 1.0
    bar = Text(no_wrap=True)
    ends = _ends([part.size for part in parts], scale, width)
    begin = 0
    for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
        bar.append(
            (part.letter if letters else "█") * (end - begin),
            style="" if letters else COLOURS[index % len(COLOURS)],
        )
        begin = end
    bar.append(("." if letters else FREE) * (width - begin), style="dim")
    if total > whole * 1.0001:
        limit = min(width - 1, int(width * whole / scale))
        bar = Text.assemble(bar[:limit], ("|", "bold red"), bar[limit + 1 :], no_wrap=True)
    return bar


def _ends(sizes: Sequence[float], scale: float, width: int) -> list[int]:
    """Column at which each part ends: cumulative sums rounded, so rounding errors do not add up."""
    ends, so_far = [], 0.0
    for size in sizes:
        so_far += max(0.0, size)
        ends.append(min(width, round(width * so_far / scale)))
    return ends


def legend(parts: Sequence[BarPart], width: int, *, letters: bool) -> Text:
    """Name and size of every part, in the order of the bar; lines break between parts only."""
    text, column = Text(no_wrap=True), 0
    for index, part in enumerate(parts):
        words = f" {part.name} {part.shown}"
        if index and column + len(GAP) + 1 + len(words) > width:
            text.append("\n")
            column = 0
        elif index:
            text.append(GAP)
            column += len(GAP)
        text.append(
            part.letter if letters else "■",
            style="bold" if letters else COLOURS[index % len(COLOURS)],
        )
        text.append(words)
        column += 1 + len(words)
    return text


def memory_parts(estimate: Estimate) -> list[BarPart]:
    """Parts of the worst pipeline rank's device memory, in bytes; they sum to device_bytes."""
    letters = {part.name: part.letter for part in estimate_parts.MEMORY_PARTS}
    return [
        BarPart(name, letters[name], size, format_bytes(size))
        for name, size in estimate_parts.memory_parts(estimate)
    ]


def time_parts(estimate: Estimate) -> list[BarPart]:
    """Parts of one step on the critical path, in seconds; they sum to step_seconds."""
    letters = {part.name: part.letter for part in estimate_parts.TIME_PARTS}
    total = estimate.step_seconds or 1.0
    return [
        BarPart(name, letters[name], size, f"{format_seconds(size)} ({size / total:.0%})")
        for name, size in estimate_parts.time_parts(estimate)
    ]
