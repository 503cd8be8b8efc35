"""Helpers of all stores: new rows, look-ups by id, pages, and text that both databases hold."""

import base64
import binascii
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from typing import Any, ClassVar, Generic, TypeVar, cast

from sqlalchemy import Engine, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, load_only

from planner.api.errors import UnreadableError
from planner.api.storage.records import Page
from planner.api.storage.transactions import reading
from planner.errors import ConflictError, NotFoundError, SpecError, fault

SHOWN_CHARACTERS = 200
Record = TypeVar("Record")
log = logging.getLogger("planner.storage")
MAX_PAGE = 200
Item = TypeVar("Item")


def flush_new(session: Session, what: str) -> None:
    """Sends new rows. Raises ConflictError when one of their ids is taken."""
    try:
        session.flush()
    except IntegrityError:
        raise ConflictError(f"{what} exists already") from None


def is_id(text: str) -> bool:
    """Ours are printable ASCII; PostgreSQL refuses to look for anything with a NUL in it."""
    return text.isascii() and text.isprintable()


def record_of(kind: Callable[..., Record], row: Any, /, **own: Any) -> Record:
    """The record of a row: a dataclass whose fields have the names of columns, but for `own`."""
    names = (field.name for field in fields(cast(Any, kind)) if field.name not in own)
    return kind(**own, **{name: getattr(row, name) for name in names})


def told(record: Any, *names: str) -> dict[str, Any]:
    """These fields of a record, or all, JSON-safe: moments in ISO 8601."""
    found = {}
    for name in names or [field.name for field in fields(record)]:
        value = getattr(record, name)
        value = value.isoformat() if isinstance(value, datetime) else value
        found[name] = dict(value) if isinstance(value, Mapping) else value
    return found


@contextmanager
def readable(what: str, row_id: str) -> Iterator[None]:
    """Raises UnreadableError where a stored row is not what this version stores."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, SpecError) as error:
        why = " ".join(str(error).split())[:SHOWN_CHARACTERS]
        raise UnreadableError(
            f"{what} {row_id} was stored in a form that this version cannot read ({why}); use the "
            "version that stored it, or make it again"
        ) from error


def all_readable(rows: Iterable[Any], item_of: Callable[[Any], Item]) -> Iterator[Item]:
    """Each row as `item_of` makes it; one that cannot be read is left out, and the log says so."""
    for row in rows:
        try:
            with readable(type(row).__tablename__, row.id):
                item = item_of(row)
        except UnreadableError as error:
            log.warning("left out of a list: %s", error)
        else:
            yield item


def plain_text(value: str, longest: int = SHOWN_CHARACTERS) -> str:
    """Text that both databases can hold: no NUL, no half of a surrogate pair."""
    return value.replace("\0", "").encode("utf-8", "replace").decode("utf-8")[:longest]


def unknown(what: str, row_id: str, remedy: str) -> NotFoundError:
    """The error for an id that nothing has."""
    return NotFoundError(f"no {what} of id {row_id[:SHOWN_CHARACTERS]!r}; {remedy}")


class Store:
    """The part of every store: its database. All methods raise StoreError where that fails."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine


class TableStore(Store, Generic[Item]):
    """The items of one table, newest first.

    what: name of an item in messages. where: how a user lists them.
    order: columns by which lists go.
    columns: names of those that a list loads; all where none is given.
    """

    table: ClassVar[Any]
    what: ClassVar[str]
    where: ClassVar[str]
    order: ClassVar[tuple[str, ...]] = ("created_at", "id")
    columns: ClassVar[tuple[str, ...]] = ()

    def item(self, row: Any) -> Item:
        """The item of a row: the row itself, unless a store has another form of it."""
        found: Item = row
        return found

    def row(self, session: Session, row_id: str, *, lock: bool = False) -> Any:
        """The row of this id. Raises NotFoundError."""
        row = session.get(self.table, row_id, with_for_update=lock) if is_id(row_id) else None
        if row is None:
            raise unknown(self.what, row_id, self.where)
        return row

    def get(self, row_id: str) -> Item:
        """The item as it stands. Raises NotFoundError."""
        with reading(self.engine) as session:
            return self.item(self.row(session, row_id))

    def asked_by(self, row_id: str) -> str | None:
        """Owner of an item, also of one that cannot be read. Raises NotFoundError."""
        with reading(self.engine) as session:
            owner: str | None = self.row(session, row_id).asked_by
        return owner

    def list(
        self, cursor: str | None = None, limit: int = 50, **wanted: str | tuple[str, ...] | None
    ) -> Page[Item]:
        """At most `limit` items after the cursor, but for those that this version cannot read.

        wanted: columns and the value or values of each; None is any. Raises SpecError.
        """
        check_limit(limit)
        table = self.table
        order = [getattr(table, name) for name in self.order]
        query = select(table).order_by(*(column.desc() for column in order))
        if self.columns:
            query = query.options(load_only(*(getattr(table, name) for name in self.columns)))
        for name, value in wanted.items():
            if value is not None:
                values = (value,) if isinstance(value, str) else value
                query = query.where(getattr(table, name).in_([*map(plain_text, values)]))
        if cursor is not None:
            query = query.where(tuple_(*order) < tuple_(*self.values_at(cursor)))
        with reading(self.engine) as session:
            rows = session.scalars(query.limit(limit + 1)).all()
            last = rows[limit - 1] if len(rows) > limit else None
            return Page(
                items=[*all_readable(rows[:limit], self.item)],
                next_cursor=last and cursor_of(*(getattr(last, name) for name in self.order)),
            )

    def all(self, **wanted: str | tuple[str, ...] | None) -> Iterator[Item]:
        """All items that `list` gives, page after page."""
        cursor = None
        while True:
            page = self.list(cursor, MAX_PAGE, **wanted)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def ids_starting(self, beginning: str, limit: int) -> Sequence[str]:
        """At most `limit` ids that begin so, newest first."""
        column = self.table.id
        query = select(column).where(column.startswith(beginning, autoescape=True))
        with reading(self.engine) as session:
            return session.scalars(query.order_by(column.desc()).limit(limit)).all()

    def values_at(self, cursor: str) -> tuple[Any, ...]:
        """Values of `order` in the row before the page. Raises SpecError."""
        return read_cursor(cursor)


def check_limit(limit: int) -> None:
    """Raises SpecError for a page that is empty or too long."""
    if not 1 <= limit <= MAX_PAGE:
        raise fault("limit", limit, f"must be 1 to {MAX_PAGE}", "ask for more pages instead")


def cursor_of(*values: object) -> str:
    """The cursor of the page that starts after the row with these values."""
    return encoded(
        "|".join(one.isoformat() if isinstance(one, datetime) else str(one) for one in values)
    )


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """(created_at, id) of the row before the page. Raises SpecError."""
    moment, _, row_id = decoded(cursor).partition("|")
    try:
        created_at = datetime.fromisoformat(moment)
    except ValueError:
        raise unknown_cursor(cursor) from None
    if created_at.tzinfo is None or not row_id or not is_id(row_id):
        raise unknown_cursor(cursor)
    return created_at, row_id


def encoded(place: str) -> str:
    """A place in a list as a cursor, which a URL can hold."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decoded(cursor: str) -> str:
    """The place that a cursor names. Raises SpecError."""
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (ValueError, binascii.Error):
        raise unknown_cursor(cursor) from None


def unknown_cursor(cursor: str) -> Exception:
    """The error for a cursor that names no place in the list."""
    rule, remedy = "is not a cursor that this service gave", "leave it out to start at the first"
    return fault("cursor", cursor, rule, remedy)
