"""`planner-cli db`: the database."""

from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.output import error_line, tell
from planner.api.cli.typed import Json
from planner.api.errors import EXIT_BACKEND
from planner.api.storage.backup import back_up, faults_in
from planner.api.storage.engine import shown
from planner.api.storage.migrate import current_revision
from planner.api.storage.migrate import upgrade as migrate
from planner.api.wiring import wire
from planner.units import MEGA

app = typer.Typer(rich_markup_mode=None)


@app.command("upgrade")
def upgrade(json: Json = False) -> None:
    """Create the database or migrate it. Safe to run at any time, by several at once."""
    engine = wire().engine
    before = current_revision(engine)
    after = migrate(engine)
    body = {"database": shown(engine), "before": before, "after": after}
    since = " already" if before == after else f", was {before or 'empty'}"
    tell(body, [f"{shown(engine)}: revision {after}{since}"], json=json, indent=None)


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")], json: Json = False
) -> None:
    """Copy a SQLite database while it is in use. Of PostgreSQL: say how pg_dump does it."""
    engine = wire().engine
    size = back_up(engine, file)
    body = {"database": shown(engine), "file": str(file), "bytes": size}
    line = f"{file}: {size / MEGA:,.1f} MB, whole; to restore it, stop everything and put it back"
    tell(body, [line], json=json, indent=None)


@app.command("check")
def check(json: Json = False) -> None:
    """Say whether the database is consistent: its file, references, states, leases."""
    engine = wire().store.engine
    faults = faults_in(engine)
    sound = [] if faults else [f"{shown(engine)}: consistent"]
    tell({"database": shown(engine), "faults": faults}, sound, json=json, indent=None)
    for fault in faults if not json else ():
        error_line(fault)
    if faults:
        raise typer.Exit(EXIT_BACKEND)
