"""The lines that start a layout of a plan."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from planner.api.render.estimate import INDENT, bullets, heading, indented
from planner.export import FORMATS
from planner.specs.plan import Plan, RankedLayout


def launch_lines(
    plan: Plan, entry: RankedLayout, width: int, saved: str | None
) -> list[RenderableType]:
    """The lines to paste: write the files of the layout, go there, start the run."""
    lines: list[RenderableType] = []
    for trainer, export in entry.export.items():
        lines.append(heading(f"Run it with {trainer} {export.get('version', '')}".rstrip()))
        lines += [
            indented(Text(line, no_wrap=True))
            for line in launch_commands(plan, entry, trainer, export, width - INDENT, saved)
        ]
        blockers = export.get("blockers", [])
        why = [f"{b['field']}={b['value']}: {b['rule']}; {b['remedy']}" for b in blockers]
        if why:
            lines.append(indented(bullets(why, "!", "yellow")))
        if export.get("notes"):
            lines.append(indented(bullets(list(export["notes"]))))
    return lines


def launch_commands(
    plan: Plan,
    entry: RankedLayout,
    trainer: str,
    export: Mapping[str, Any],
    width: int,
    saved: str | None,
) -> list[str]:
    """Shell commands, each on its own line, long ones continued with backslashes."""
    folder = f"{plan.id}-" if saved is None else f"{saved}/"
    folder += f"rank-{entry.rank:02d}"
    commands = [["cd", folder], list(export.get("command", []))]
    if saved is None:
        to = [] if trainer == FORMATS[0] else ["--format", trainer]
        ours = ["planner-cli", "export", plan.id, "--rank", str(entry.rank), *to]
        commands.insert(0, [*ours, "--save-dir", folder])
    quoted = ([shlex.quote(word) for word in words] for words in commands)
    return [line for words in quoted for line in continued(words, width)]


def continued(words: list[str], width: int) -> list[str]:
    """One command as lines of at most `width` columns where its words allow, ready to paste."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines
