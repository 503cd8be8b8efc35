"""Engines: one URL in, a SQLAlchemy engine with the habits of its database out."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import StaticPool

from planner.api.errors import UnavailableError
from planner.errors import StoreError, fault, how_to_install

_PASSING = (  # primary codes of SQLite
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip
RETRY_AFTER_SECONDS = 5.0
MIGRATION_SECONDS = 30.0  # that a migration of SQLite waits for others
POSTGRES = "postgresql+psycopg"
MEMORY_NAMES = (None, "", ":memory:")
_DRIVERS = {
    **dict.fromkeys(("postgresql", "postgres", POSTGRES), POSTGRES),
    **dict.fromkeys(("sqlite", "sqlite+pysqlite"), "sqlite"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one process waits for the database, and how many connections it holds at most.

    seconds: for one statement, for a lock, for a free connection.
    """

    seconds: float = 10.0
    connections: int = 20

    @property
    def pool(self) -> dict[str, Any]:
        kept = min(self.connections, 5)
        more = {"max_overflow": self.connections - kept, "pool_timeout": self.seconds}
        return {"pool_size": kept, **more}


def normalise_url(text: str) -> URL:
    """The URL with the driver that is tested: postgresql:// and postgres:// mean psycopg 3.

    Raises SpecError.
    """
    remedy = "use sqlite:////absolute/path.db or postgresql://user:password@host/database"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise fault("PLANNER_DATABASE_URL", "***", "is no database URL", remedy) from None
    if url.drivername not in _DRIVERS:
        rule = f"{url.drivername} is not supported"
        raise fault("PLANNER_DATABASE_URL", url.render_as_string(), rule, remedy)
    return url.set(drivername=_DRIVERS[url.drivername])


def is_memory(url: URL) -> bool:
    """Whether this is a SQLite database that lives in this process alone."""
    return url.get_backend_name() == "sqlite" and url.database in MEMORY_NAMES


USUAL_LIMITS = Limits()


def make_engine(url: URL, limits: Limits = USUAL_LIMITS) -> Engine:
    """An engine that has not connected yet; the folder of a SQLite file is created.

    Raises StoreError.
    """
    dumps = partial(json.dumps, allow_nan=False, separators=(",", ":"))
    if url.get_backend_name() == "sqlite":
        options: dict[str, Any] = {
            "connect_args": {"timeout": limits.seconds, "check_same_thread": False},
            "json_deserializer": _json_or_text,
        }
        if is_memory(url):
            options["poolclass"] = StaticPool
        else:
            _make_folder(Path(str(url.database)))
            options |= limits.pool
        engine = create_engine(url, json_serializer=dumps, **options)
        _set_up_sqlite(engine, limits)
        if not is_memory(url):
            _mind_the_file(engine, Path(str(url.database)))
        return engine
    try:
        engine = create_engine(
            url,
            json_serializer=dumps,
            pool_pre_ping=True,
            connect_args={"connect_timeout": max(2, min(10, round(limits.seconds)))},
            **limits.pool,
        )
        _bound_postgres(engine, limits)
        return engine
    except (NoSuchModuleError, ModuleNotFoundError):
        needed = f"PostgreSQL needs the psycopg driver; {how_to_install('postgres')}"
        raise StoreError(needed) from None


def _json_or_text(stored: str) -> Any:
    """A JSON column; text that is not JSON is read as that text, so that a reader can name it."""
    try:
        return json.loads(stored)
    except ValueError:
        return stored


def make_private(path: Path) -> None:
    """Makes an empty file that only we may read, if it is not there; SQLite's logs follow it."""
    with suppress(OSError):  # SQLite says so in its own words
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"cannot create the folder of database {path} ({error.strerror}); set "
            "PLANNER_DATABASE_URL to another place"
        ) from None


def _bound_postgres(engine: Engine, limits: Limits) -> None:
    """Makes its connections `planner.api.storage.postgres.BoundedConnection`s."""

    def connect(_: object, __: object, args: list[Any], named: dict[str, Any]) -> Any:
        from planner.api.storage.postgres import connect

        return connect(limits.seconds, *args, **named)

    event.listen(engine, "do_connect", connect)


def _mind_the_file(engine: Engine, path: Path) -> None:
    """Notices that the file of a database was moved, deleted or put back under open connections.

    Else what is written would go to a file that nobody finds, or a new empty one would be made.
    """
    known: list[tuple[int, int]] = []  # device and inode of the file that we have used

    def on_connect(dbapi_connection: Any, record: Any) -> None:
        record.info["file"] = _identity(path)
        known[:] = [record.info["file"] or (0, 0)]

    def before_connect(_: object, __: object, ___: object, named: dict[str, Any]) -> Any:
        if known and _identity(path) is None:
            raise sqlite3.OperationalError(f"the file {path} is gone; put it back")
        if _identity(path) is None:
            make_private(path)
        elif not _may_write(path):
            return sqlite3.connect(to_read(path), uri=True, **named)
        return None

    def on_checkout(_: object, record: Any, __: object) -> None:
        if record.info.get("file") != _identity(path):
            raise DisconnectionError

    event.listen(engine, "do_connect", before_connect)
    event.listen(engine, "connect", on_connect)
    event.listen(engine, "checkout", on_checkout)


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)


def to_read(path: Path) -> str:
    """The URI that reads a file, also one that we may not write and nobody else has open."""
    sealed = not _may_write(path) and not Path(f"{path}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if sealed else ''}"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _set_up_sqlite(engine: Engine, limits: Limits) -> None:
    """Turns foreign keys on, and begins transactions when SQLAlchemy says so.

    Where `planner_writes` is set they begin as writers (BEGIN IMMEDIATE).
    """

    def on_connect(dbapi_connection: Any, _: object) -> None:
        dbapi_connection.isolation_level = None
        dbapi_connection.execute(f"PRAGMA busy_timeout = {int(limits.seconds * 1000)}")
        dbapi_connection.execute("PRAGMA foreign_keys = ON")
        dbapi_connection.execute("PRAGMA synchronous = NORMAL")

    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("planner_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


def shown(engine: Engine) -> str:
    """The engine's URL as it may be shown: without its password, which may stand in its query."""
    return engine.url.set(query={}).render_as_string(hide_password=True)


def _may_pass(error: SQLAlchemyError, cause: BaseException) -> bool:
    """Whether the same statement may succeed later: nobody answered, or not in time."""
    if isinstance(cause, sqlite3.OperationalError):
        code = getattr(cause, "sqlite_errorcode", None)  # none of our own
        return code is None or code & 0xFF in _PASSING
    passing = OperationalError | InterfaceError | PoolTimeout | DisconnectionError
    return isinstance(error, passing)


@contextmanager
def store_errors(engine: Engine) -> Iterator[None]:
    """Turns the database's own errors into StoreError, which says where and what, in one line."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        if _may_pass(error, cause):
            raise UnavailableError(
                f"database {shown(engine)} did not answer: {first}; ask again in a few seconds; if "
                "it lasts, check PLANNER_DATABASE_URL, or run `planner-cli doctor`",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from error
        raise StoreError(
            f"database {shown(engine)}: {first}; check PLANNER_DATABASE_URL, or run `planner-cli "
            "doctor`"
        ) from error
    except ModuleNotFoundError as error:
        raise StoreError(
            f"database {shown(engine)}: driver {error.name} is not installed; "
            f"{how_to_install('postgres')}"
        ) from None
