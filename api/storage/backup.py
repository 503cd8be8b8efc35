"""Copies of a database in use, and whether what is in it fits together."""

import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import JSON, Connection, Engine, text

from planner.api.storage.engine import is_memory, make_private, store_errors, to_read
from planner.api.storage.tables import Base
from planner.errors import StoreError, fault

PAGES_AT_ONCE = 1000  # between which others may write
MOST_NAMED = 5
# each finds ids of rows that cannot be
_INVARIANTS = {
    "ended probes and tasks have an end": (
        "SELECT id FROM {queue} WHERE (state IN ('done', 'failed', 'cancelled')) "
        "<> (finished_at IS NOT NULL)"
    ),
    "what runs has an owner and a lease, what waits has none": (
        "SELECT id FROM {queue} WHERE (state = 'running') <> (lease_until IS NOT NULL) "
        "OR (state = 'queued' AND owner IS NOT NULL)"
    ),
    "nothing was claimed more often than it may be": (
        "SELECT id FROM {queue} WHERE attempts > max_attempts AND state = 'queued'"
    ),
    "whatever was claimed has a fencing token": (
        "SELECT id FROM {queue} WHERE state = 'running' AND fencing_token < 1"
    ),
}
_PLANS = {
    "studies that are done have a plan": (
        "SELECT id FROM tasks WHERE kind = 'study' AND state = 'done' "
        "AND id NOT IN (SELECT id FROM plans)"
    ),
    "plans have ranked layouts": (
        "SELECT id FROM plans WHERE id NOT IN (SELECT plan_id FROM plan_layouts)"
    ),
}


def back_up(engine: Engine, file: Path) -> int:
    """Copies a SQLite database into a new file, whole, while others use it; its bytes.

    Raises SpecError for a file that is there, and of PostgreSQL with the command that does it;
    StoreError where the copy fails.
    """
    if engine.dialect.name != "sqlite" or is_memory(engine.url):
        rule = "is made by PostgreSQL's own tools" if engine.dialect.name != "sqlite" else "is not"
        raise fault("FILE", str(file), f"a backup of this database {rule}", _command(engine, file))
    if file.exists():
        raise fault("FILE", str(file), "is there already", "name a new file")
    origin = to_read(Path(str(engine.url.database)))
    with store_errors(engine):
        try:
            make_private(file)
            with (
                closing(sqlite3.connect(origin, uri=True)) as source,
                closing(sqlite3.connect(file)) as copy,
            ):
                source.backup(copy, pages=PAGES_AT_ONCE)
                (said,) = copy.execute("PRAGMA quick_check").fetchone()
        except sqlite3.Error as error:
            file.unlink(missing_ok=True)
            raise StoreError(
                f"{file} was not written: {error}; make room or name another place, and see "
                "whether PLANNER_DATABASE_URL names the database"
            ) from None
    if said != "ok":
        raise StoreError(f"the copy in {file} is not sound: {said}; run `planner-cli db check`")
    return file.stat().st_size


def _command(engine: Engine, file: Path) -> str:
    if engine.dialect.name == "sqlite":
        return "set PLANNER_DATABASE_URL to a database in a file"
    url = engine.url.set(drivername="postgresql", password=None, query={})
    target = shlex.quote(str(file))
    return f"run `pg_dump --format=custom --file={target} {url.render_as_string()}`"


def faults_in(engine: Engine) -> list[str]:
    """Inconsistencies, one line each; none of a sound database."""
    found: list[str] = []
    with store_errors(engine), engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            found += _of_the_file(connection)
        queries = {
            f"{queue}: {name}": query.format(queue=queue)
            for queue in ("probes", "tasks")
            for name, query in _INVARIANTS.items()
        }
        for name, query in {**queries, **_PLANS}.items():
            ids = list(connection.scalars(text(query)))
            if ids:
                found.append(f"not so: {name}: {_some(ids)}")
    return found


def _of_the_file(connection: Connection) -> list[str]:
    said = [str(line) for line in connection.scalars(text("PRAGMA integrity_check"))]
    broken = [str(row[0]) for row in connection.execute(text("PRAGMA foreign_key_check"))]
    return [
        *([] if said == ["ok"] else [f"the file is damaged: {_some(said)}"]),
        *([f"rows refer to what is not there, in {_some(broken)}"] if broken else []),
        *_no_json(connection),
    ]


def _no_json(connection: Connection) -> Iterator[str]:
    """JSON columns whose text is not JSON, which SQLite stores and PostgreSQL would refuse."""
    for table in Base.metadata.sorted_tables:
        for column in table.columns:
            if isinstance(column.type, JSON):
                key = " || ' ' || ".join(f'"{one.name}"' for one in table.primary_key)
                wrong = f'SELECT {key} FROM {table.name} WHERE NOT json_valid("{column.name}")'
                if ids := list(map(str, connection.scalars(text(wrong)))):
                    yield f"{table.name}: {column.name} is no JSON: {_some(ids)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
