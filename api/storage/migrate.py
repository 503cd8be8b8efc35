"""Brings a database to the revision that this version needs, once, however many processes ask.

A database that is current is recognised with one SELECT; alembic is imported only when there is
something to migrate.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import OperationalError

from planner.api.errors import NotReadyError
from planner.api.storage.engine import MIGRATION_SECONDS, is_memory, shown, store_errors
from planner.errors import StoreError

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0009"
VERSION_TABLE = "planner_alembic_version"  # Optuna's tables use alembic_version
LOCK_KEY = 7_526_752_397_146_001  # any number that nobody else uses in this PostgreSQL database
RETRY_SECONDS = 0.05


def current_revision(engine: Engine) -> str | None:
    """Revision of the database; None when it is empty. Raises StoreError."""
    with store_errors(engine), engine.connect() as connection:
        return _revision(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()


def ensure_current(engine: Engine) -> None:
    """Creates or migrates a SQLite database at first use; PostgreSQL has to be current already.

    Raises NotReadyError when it is not, StoreError when it cannot be reached.
    """
    revision = current_revision(engine)
    if revision == HEAD:
        return
    if engine.dialect.name != "sqlite":
        raise NotReadyError(f"database {shown(engine)} {at_revision(revision)}")
    upgrade(engine)


def at_revision(revision: str | None) -> str:
    found, old = revision or "none", revision is None or revision < HEAD
    remedy = "run `planner-cli db upgrade`" if old else "install the newest planner"
    return f"is at revision {found}, not {HEAD}; {remedy}"


def upgrade(engine: Engine, revision: str = "head") -> str | None:
    """Runs the migrations up to `revision` under a lock and returns the revision reached."""
    _run(engine, "upgrade", revision)
    return current_revision(engine)


def downgrade(engine: Engine, revision: str) -> str | None:
    """Runs the migrations back to `revision` ("base": an empty database) under the same lock."""
    _run(engine, "downgrade", revision)
    return current_revision(engine)


def _run(engine: Engine, command: str, revision: str) -> None:
    from alembic.util import CommandError

    from alembic import command as commands

    with store_errors(engine):
        if engine.dialect.name == "sqlite" and not is_memory(engine.url):
            _use_wal(engine)
        with _locked(engine) as connection:
            config = alembic_config()
            config.attributes["connection"] = connection
            try:
                getattr(commands, command)(config, revision)
            except CommandError as error:
                found = _revision(connection)
                if command == "downgrade":
                    raise StoreError(f"database {shown(engine)} stays as it is: {error}") from None
                raise StoreError(
                    f"database {shown(engine)} is at revision {found}, which this version (up to "
                    f"{HEAD}) cannot {command}: {error}; install the newest planner"
                ) from None


def alembic_config() -> "Config":
    """Alembic's configuration, wherever this package was installed."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrations_folder() -> Path:
    """api/storage/migrations in an installed wheel, alembic/ in a checkout.

    setup.py copies one to the other.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "migrations", here.parent.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"the migrations are missing beside {here}; install planner again")


@contextmanager
def _locked(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction that no second migrator can enter.

    It commits at the end or leaves nothing behind.
    """
    if engine.dialect.name == "sqlite":
        writer = engine.execution_options(planner_writes=True)
        with writer.begin() as connection:
            yield connection
        return
    from planner.api.storage.postgres import unbounded

    with engine.begin() as connection, unbounded(connection.connection.dbapi_connection):
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        yield connection


def _use_wal(engine: Engine) -> None:
    """Lets SQLite have readers beside one writer.

    It is kept in the file, so once is enough; the switch itself does not wait for locks.
    """
    deadline = time.monotonic() + MIGRATION_SECONDS
    while True:
        try:
            connection = engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA journal_mode = WAL")
            finally:
                connection.close()
            return
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise OperationalError("PRAGMA journal_mode = WAL", None, error) from error
            time.sleep(RETRY_SECONDS)
