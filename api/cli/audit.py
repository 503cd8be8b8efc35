"""`planner-cli audit`: who asked for, ran, cancelled and imported what."""

from dataclasses import asdict
from typing import Annotated

import typer

from planner.api.cli.output import show_page
from planner.api.cli.typed import Cursor, Json, Limit
from planner.api.render.lists import audit_line
from planner.api.wiring import wire


def command(
    asked_by: Annotated[
        str | None, typer.Option("--asked-by", help="Only this key, or cli:USER.")
    ] = None,
    action: Annotated[str | None, typer.Option(help="Only this, such as probe.ended.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only what was done to this id.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    json: Json = False,
) -> None:
    page = wire().audit.list(cursor, limit, asked_by=asked_by, action=action, subject=subject)
    show_page(page, asdict, audit_line, "nothing of this is in the audit trail", json=json)
