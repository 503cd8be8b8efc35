"""Alembic's entry: migrations run on the connection that `planner.api.storage.migrate` holds, or
on PLANNER_DATABASE_URL.
"""

from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text

from alembic import context
from planner.api.settings import load_settings
from planner.api.storage.engine import make_engine, normalise_url
from planner.api.storage.migrate import VERSION_TABLE
from planner.api.storage.tables import Base

REMADE = {"priced_runs"}  # from what other tables hold, when it is asked for


def _filled(connection: Connection) -> set[str]:
    """Our tables that hold rows, but for what is made again."""
    ours = {*Base.metadata.tables} - REMADE
    there = ours.intersection(inspect(connection).get_table_names())
    return {one for one in there if connection.scalar(text(f"SELECT 1 FROM {one} LIMIT 1"))}


def _run(connection: Connection) -> None:
    filled = _filled(connection)
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        transactional_ddl=True,
        transaction_per_migration=False,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    context.run_migrations()
    if lost := sorted(filled.difference(inspect(connection).get_table_names())):
        raise CommandError(
            f"that would delete what {', '.join(lost)} holds; delete it first, or put a backup of "
            "that revision back"
        )


connection = context.config.attributes.get("connection")
if connection is not None:
    _run(connection)
elif context.is_offline_mode():
    context.configure(
        url=normalise_url(load_settings().database_url),
        version_table=VERSION_TABLE,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.run_migrations()
else:
    with make_engine(normalise_url(load_settings().database_url)).connect() as own:
        _run(own)
        own.commit()
