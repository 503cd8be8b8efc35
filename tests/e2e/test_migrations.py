"""Migrations on real databases: up, down, up; models equal tables; many processes at once."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from planner.api.errors import NotReadyError
from planner.api.storage.audit import SqlAuditTrail
from planner.api.storage.engine import make_engine, normalise_url
from planner.api.storage.migrate import (
    HEAD,
    VERSION_TABLE,
    alembic_config,
    current_revision,
    downgrade,
    ensure_current,
    upgrade,
)
from planner.api.storage.records import AuditFilter
from planner.api.storage.store import SqlStore
from planner.api.storage.tables import Base
from planner.errors import StoreError
from planner.specs.plan import Plan
from tests.conftest import ROOT, Cli, clean_environment
from tests.stand_ins.plan_labels import plan_labels

TABLES = set(Base.metadata.tables)


def test_head_is_the_newest_migration() -> None:
    from alembic.script import ScriptDirectory

    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [HEAD]


def test_up_down_up(database_url: str) -> None:
    engine = make_engine(normalise_url(database_url))
    assert current_revision(engine) is None
    for _ in range(2):
        assert upgrade(engine) == HEAD
        assert set(inspect(engine).get_table_names()) >= TABLES | {VERSION_TABLE}
        assert downgrade(engine, "base") is None
        assert not set(inspect(engine).get_table_names()) & TABLES
    engine.dispose()


def test_a_plan_of_an_older_version_stays_and_is_listed_without_its_training(
    database_url: str, plan: Plan
) -> None:
    engine = make_engine(normalise_url(database_url))
    upgrade(engine)
    store = SqlStore(engine)
    store.save_plan(plan, plan_labels())
    assert store.list_plans().items[0].seq_len == 8192
    downgrade(engine, "0003")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM plan_layouts")) == len(plan.ranked)
    upgrade(engine)
    line = store.list_plans().items[0]
    assert (line.id, line.seq_len, line.global_batch_size, line.trainer) == (plan.id, *[None] * 3)
    assert store.get_plan(plan.id) == plan
    engine.dispose()


def test_a_downgrade_keeps_events_and_deletes_nothing(database_url: str, plan: Plan) -> None:
    engine = make_engine(normalise_url(database_url))
    upgrade(engine)
    store, trail = SqlStore(engine), SqlAuditTrail(engine)
    store.save_plan(plan, plan_labels())
    before = trail.list(AuditFilter()).items
    assert [event.action for event in before] == ["plan.made"]
    assert (downgrade(engine, "0004"), upgrade(engine)) == ("0004", HEAD)
    assert trail.list(AuditFilter()).items == before
    with pytest.raises(StoreError, match=r"stays as it is: .* what .*plan_layouts, plans holds"):
        downgrade(engine, "base")
    assert current_revision(engine) == HEAD
    assert store.get_plan(plan.id) == plan
    engine.dispose()


def test_the_tables_are_what_the_code_says(database_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = make_engine(normalise_url(database_url))
    upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_a_new_file_has_the_tables_that_all_migrations_make(tmp_path: Path) -> None:
    made, migrated = (of_file(tmp_path / name) for name in ("made.db", "migrated.db"))
    ensure_current(made)
    upgrade(migrated)
    assert current_revision(made) == current_revision(migrated) == HEAD
    first, second = inspect(made), inspect(migrated)
    assert first.get_table_names() == second.get_table_names()
    for table in first.get_table_names():
        for told in ("columns", "indexes", "foreign_keys", "unique_constraints", "pk_constraint"):
            here, there = (getattr(one, f"get_{told}")(table) for one in (first, second))
            assert shape(here) == shape(there), (table, told)
    assert downgrade(made, "base") is None
    for engine in (made, migrated):
        engine.dispose()


def of_file(path: Path) -> Engine:
    return make_engine(normalise_url(f"sqlite:///{path}"))


def shape(described: object) -> list[str]:
    """What a database says of one table, in an order that does not matter."""
    parts = described if isinstance(described, list) else [described]
    return sorted(str(sorted((name, str(value)) for name, value in part.items())) for part in parts)


def test_a_file_with_another_s_tables_is_migrated(tmp_path: Path) -> None:
    engine = of_file(tmp_path / "shared.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE plans (id TEXT)"))
    with pytest.raises(StoreError):  # not ours to change: the migration says so
        ensure_current(engine)
    engine.dispose()


def test_optuna_beside_us_is_left_alone(sqlite_url: str) -> None:
    engine = make_engine(normalise_url(sqlite_url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('v3.2.0.a')"))
    assert upgrade(engine) == HEAD
    with engine.connect() as connection:
        assert (
            connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            == "v3.2.0.a"
        )
    engine.dispose()


def test_sqlite_is_made_at_first_use_and_postgres_is_not(database_url: str) -> None:
    engine = make_engine(normalise_url(database_url))
    if engine.dialect.name == "sqlite":
        ensure_current(engine)
        assert current_revision(engine) == HEAD
        with engine.connect() as connection:
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
            assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    else:
        with pytest.raises(NotReadyError, match="db upgrade"):
            ensure_current(engine)
    engine.dispose()


def test_a_database_from_the_future_is_refused(sqlite_url: str) -> None:
    engine = make_engine(normalise_url(sqlite_url))
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"9999.*newest planner"):
        ensure_current(engine)
    engine.dispose()


def test_a_failed_migration_leaves_nothing(database_url: str) -> None:
    engine = make_engine(normalise_url(database_url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE estimates (id INTEGER)"))
    with pytest.raises(StoreError, match="estimates"):
        upgrade(engine)
    assert not set(inspect(engine).get_table_names()) & {"plans", VERSION_TABLE}
    engine.dispose()


def test_several_processes_create_the_database_at_once(cli: Cli, database_url: str) -> None:
    asked = ("plans",) if database_url.startswith("sqlite") else ("db", "upgrade")
    environment = {"PLANNER_DATABASE_URL": database_url}
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda _: cli(*asked, env=environment), range(4)))
    assert [done.returncode for done in ended] == [0] * 4, ended
    engine = make_engine(normalise_url(database_url))
    assert current_revision(engine) == HEAD
    engine.dispose()


def test_db_upgrade_by_command(cli: Cli, database_url: str) -> None:
    first = cli("db", "upgrade", env={"PLANNER_DATABASE_URL": database_url})
    assert (first.returncode, f"revision {HEAD}, was empty" in first.stdout) == (0, True), (
        first.stderr
    )
    second = cli("db", "upgrade", env={"PLANNER_DATABASE_URL": database_url})
    assert (second.returncode, f"revision {HEAD} already" in second.stdout) == (0, True)


def test_first_use_does_not_import_alembic_again(sqlite_url: str) -> None:
    engine = make_engine(normalise_url(sqlite_url))
    upgrade(engine)
    engine.dispose()
    program = (
        "import sys; from planner.api.wiring import wire; wire().store; "
        "sys.exit('alembic' in sys.modules)"
    )
    environment = {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url}
    assert (
        subprocess.run(
            [sys.executable, "-c", program], env=environment, check=False, timeout=300
        ).returncode
        == 0
    )


def test_the_folder_of_migrations_does_not_shadow_alembic() -> None:
    program = "import alembic.config; print(alembic.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "site-packages" in done.stdout
    assert not (ROOT / "alembic" / "__init__.py").exists()
