"""`planner-cli audit`: the trail of requests, runs, cancellations and imports."""

from dataclasses import asdict

from planner.api.cli.output import show_page
from planner.api.cli.typed import Cursor, Json, Limit
from planner.api.render.lists import audit_line
from planner.api.wiring import wire


def command(
    asked_by: str | None = None,
    action: str | None = None,
    subject: str | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    json: Json = False,
) -> None:
    """Print who asked for, ran, cancelled and imported what, when, for how many GPU-seconds.

    asked_by: Only this key, or cli:USER.
    action: Only this, such as probe.ended.
    subject: Only what was done to this id.
    """
    page = wire().audit.list(cursor, limit, asked_by=asked_by, action=action, subject=subject)
    show_page(page, asdict, audit_line, "nothing of this is in the audit trail", json=json)
