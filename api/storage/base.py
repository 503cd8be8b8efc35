"""Base of the tables. Change them with a migration in `alembic/versions/`; a test compares."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Float, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from planner.api.storage.clock import UtcDateTime

NAMING = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
ID_LENGTH = 64
HASH_LENGTH = 64


class Base(MappedAsDataclass, DeclarativeBase, kw_only=True):
    """Common metadata; constraints are named so that migrations can find them on both databases.

    A row that a session has given, or taken, is detached from it at its end: a value like others.
    """

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012  (SQLAlchemy's own form)
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[Any]: JSON,
        str: Text,
        float: Float,
    }


class Listed(Base, kw_only=True):
    """A table whose rows have ids, and are listed by the time at which they were made."""

    __abstract__ = True

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    created_at: Mapped[datetime]
