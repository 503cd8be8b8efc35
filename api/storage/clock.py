"""The database's clock: leases, delays and daily limits are decided by it, in SQL.

Machines that share a database may disagree about the time; the database has one.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from api.storage.tables import UtcDateTime


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
