"""What all tables share: new rows, ids, text that both databases hold, and cursors of pages."""

import base64
import binascii
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.errors import fault
from planner.errors import ConflictError

MAX_PAGE = 200
SHOWN_CHARACTERS = 200


def flush_new(session: Session, what: str) -> None:
    """Sends new rows. Raises ConflictError when one of their ids is taken."""
    try:
        session.flush()
    except IntegrityError:
        raise ConflictError(f"{what} exists already") from None


def is_id(text: str) -> bool:
    """Ours are printable ASCII; PostgreSQL refuses to look for anything with a NUL in it."""
    return text.isascii() and text.isprintable()


def ids_starting(engine: Engine, table: Any, beginning: str, limit: int) -> list[str]:
    """At most `limit` ids of a table that begin so, newest first."""
    from api.storage.engine import store_errors

    query = (
        select(table.id)
        .where(table.id.startswith(beginning, autoescape=True))
        .order_by(table.id.desc())
        .limit(limit)
    )
    with store_errors(engine), Session(engine) as session:
        return list(session.scalars(query))


def plain_text(value: str, longest: int = SHOWN_CHARACTERS) -> str:
    """Text that both databases can hold: no NUL, no half of a surrogate pair."""
    return value.replace("\0", "").encode("utf-8", "replace").decode("utf-8")[:longest]


def check_limit(limit: int) -> None:
    """Raises SpecError for a page that is empty or too long."""
    if not 1 <= limit <= MAX_PAGE:
        raise fault("limit", limit, f"must be 1 to {MAX_PAGE}", "ask for more pages instead")


def cursor_of(created_at: datetime, row_id: str) -> str:
    """Where the page after this row starts."""
    return (
        base64.urlsafe_b64encode(f"{created_at.isoformat()}|{row_id}".encode()).decode().rstrip("=")
    )


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """(created_at, id) of the row before the page. Raises SpecError."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        moment, _, row_id = text.partition("|")
        created_at = datetime.fromisoformat(moment)
    except (ValueError, binascii.Error):
        created_at, row_id = datetime.min, ""
    if created_at.tzinfo is None or not row_id or not is_id(row_id):
        raise fault(
            "cursor",
            cursor,
            "is not a cursor that this service gave",
            "leave it out to start at the newest",
        )
    return created_at, row_id
