"""Engines: one URL in, a SQLAlchemy engine with the habits of its database out."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from api.errors import fault
from planner.errors import StoreError, how_to_install

BUSY_TIMEOUT_SECONDS = 30.0
POSTGRES = "postgresql+psycopg"
POSTGRES_CONNECT_SECONDS = 10
MEMORY_NAMES = (None, "", ":memory:")
_DRIVERS = {
    "postgresql": POSTGRES,
    "postgres": POSTGRES,
    POSTGRES: POSTGRES,
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
}


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
        raise fault(
            "PLANNER_DATABASE_URL",
            url.render_as_string(),
            f"{url.drivername} is not supported",
            remedy,
        )
    return url.set(drivername=_DRIVERS[url.drivername])


def is_memory(url: URL) -> bool:
    """Whether this is a SQLite database that lives in this process alone."""
    return url.get_backend_name() == "sqlite" and url.database in MEMORY_NAMES


def make_engine(url: URL) -> Engine:
    """An engine that has not connected yet; the folder of a SQLite file is created.

    Raises StoreError.
    """
    dumps = partial(json.dumps, allow_nan=False, separators=(",", ":"))
    if url.get_backend_name() == "sqlite":
        options: dict[str, Any] = {
            "connect_args": {"timeout": BUSY_TIMEOUT_SECONDS, "check_same_thread": False}
        }
        if is_memory(url):
            options["poolclass"] = StaticPool
        else:
            _make_folder(Path(str(url.database)))
        engine = create_engine(url, json_serializer=dumps, **options)
        _set_up_sqlite(engine)
        return engine
    try:
        return create_engine(
            url,
            json_serializer=dumps,
            pool_pre_ping=True,
            connect_args={"connect_timeout": POSTGRES_CONNECT_SECONDS},
        )
    except (NoSuchModuleError, ModuleNotFoundError):
        raise StoreError(
            f"PostgreSQL needs the psycopg driver; {how_to_install('postgres')}"
        ) from None


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"cannot create the folder of database {path} ({error.strerror}); set "
            "PLANNER_DATABASE_URL to another place"
        ) from None


def _set_up_sqlite(engine: Engine) -> None:
    """Turns foreign keys on, and begins transactions when SQLAlchemy says so.

    Where `planner_writes` is set they begin as writers (BEGIN IMMEDIATE).
    """

    def on_connect(dbapi_connection: Any, _: object) -> None:
        dbapi_connection.isolation_level = None
        dbapi_connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_SECONDS * 1000)}")
        dbapi_connection.execute("PRAGMA foreign_keys = ON")
        dbapi_connection.execute("PRAGMA synchronous = NORMAL")

    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("planner_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


def shown(engine: Engine) -> str:
    """The engine's URL as it may be shown: without its password."""
    return engine.url.render_as_string(hide_password=True)


@contextmanager
def store_errors(engine: Engine) -> Iterator[None]:
    """Turns the database's own errors into StoreError, which says where and what, in one line."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise StoreError(
            f"database {shown(engine)}: {first}; check PLANNER_DATABASE_URL, or run `planner-cli "
            "doctor`"
        ) from error
    except ModuleNotFoundError as error:
        raise StoreError(
            f"database {shown(engine)}: driver {error.name} is not installed; "
            f"{how_to_install('postgres')}"
        ) from None
