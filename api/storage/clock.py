"""Times in the database, and its clock: leases, delays and daily limits are decided by it, in SQL.

Machines that share a database may disagree about the time; the database has one.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, TypeDecorator, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class UtcDateTime(TypeDecorator[datetime]):
    """A time in UTC. SQLite forgets time zones, so UTC is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC; refuses a time without a time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment needs its time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class database_time(FunctionElement[datetime]):
    """The database's time now, plus some seconds; not the time at which a transaction began."""

    type = UtcDateTime()
    inherit_cache = True

    def __init__(self, plus_seconds: float = 0.0) -> None:
        super().__init__(literal(float(plus_seconds)))


@compiles(database_time, "postgresql")
def _on_postgres(element: database_time, compiler: SQLCompiler, **given: Any) -> str:
    seconds = compiler.process(element.clauses, **given)
    return f"(clock_timestamp() + make_interval(secs => CAST({seconds} AS DOUBLE PRECISION)))"


@compiles(database_time, "sqlite")
def _on_sqlite(element: database_time, compiler: SQLCompiler, **given: Any) -> str:
    # text as SQLAlchemy stores times there, so that both compare
    seconds = compiler.process(element.clauses, **given)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('%+.3f seconds', {seconds}))"
