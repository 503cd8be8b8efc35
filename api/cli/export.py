"""`planner-cli export`: a ranked layout of a stored plan in a trainer's own words."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.files import write_folder
from planner.api.cli.flags import PlanId
from planner.api.cli.output import note, say, show_json
from planner.api.cli.typed import Json
from planner.api.input.names import plan_id_of
from planner.api.service import export_rank
from planner.api.wiring import wire
from planner.export import FORMATS

Format = Annotated[
    str | None, typer.Option(help=f"{', '.join(FORMATS)}; the plan's trainer unless given.")
]


def command(
    plan_id: PlanId,
    rank: int = 1,
    format: Format = None,
    trainer_version: str | None = None,
    save_dir: Path | None = None,
    json: Json = False,
) -> None:
    """Write the configuration and command that run a layout.

    rank: Which of its layouts.
    trainer_version: Version of the trainer that will run it.
    save_dir: Write the files here instead of printing them.
    """
    wiring = wire()
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    exported = export_rank(plan, rank, to=format, version=trainer_version)
    if save_dir is not None:
        save_dir = save_dir.expanduser()
        write_folder(save_dir, exported.files)
    if json:
        show_json(exported.as_dict())
        return
    for line in exported.notes:
        note(f"note: {line}")
    if save_dir is not None:
        say(f"cd {shlex.quote(str(save_dir))} && {shlex.join(exported.command)}")
        return
    for name, text in exported.files.items():
        say(f"# ---- {name}\n{text.rstrip()}\n")
    say(f"# ---- run in the folder of these files\n{shlex.join(exported.command)}")
