"""Migrations on real databases: up, down, up; models equal tables; many processes at once."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from planner.api.errors import NotReadyError
from planner.api.storage.audit import SqlAuditTrail
from planner.api.storage.migrate import (
    HEAD,
    VERSION_TABLE,
    current_revision,
    downgrade,
    ensure_current,
    upgrade,
)
from planner.api.storage.store import SqlStore
from planner.api.storage.tables import Base
from planner.errors import StoreError
from planner.specs.plan import Plan
from tests.conftest import ROOT, Cli, engine_of, ran
from tests.stand_ins.records import PLAN_JOB

TABLES = set(Base.metadata.tables)


@pytest.fixture
def engine(database_url: str) -> Engine:
    """Of an empty database."""
    return engine_of(database_url)


@pytest.fixture
def migrated(engine: Engine) -> Engine:
    assert upgrade(engine) == HEAD
    return engine


def test_up_down_up(engine: Engine) -> None:
    assert current_revision(engine) is None
    for _ in range(2):
        assert upgrade(engine) == HEAD
        assert set(inspect(engine).get_table_names()) >= TABLES | {VERSION_TABLE}
        assert downgrade(engine, "base") is None
        assert not set(inspect(engine).get_table_names()) & TABLES


def test_a_plan_of_an_older_version_stays_and_is_listed_without_its_training(
    migrated: Engine, plan: Plan
) -> None:
    store = SqlStore(migrated)
    store.save_plan(plan, PLAN_JOB)
    assert store.list().items[0].seq_len == 8192
    downgrade(migrated, "0003")
    with migrated.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM plan_layouts")) == len(plan.ranked)
    upgrade(migrated)
    line = store.list().items[0]
    assert (line.id, line.seq_len, line.global_batch_size, line.trainer) == (plan.id, *[None] * 3)
    assert store.get_plan(plan.id) == plan


def test_a_downgrade_keeps_events_and_deletes_nothing(migrated: Engine, plan: Plan) -> None:
    store, trail = SqlStore(migrated), SqlAuditTrail(migrated)
    store.save_plan(plan, PLAN_JOB)
    before = trail.list().items
    assert [event.action for event in before] == ["plan.made"]
    assert (downgrade(migrated, "0004"), upgrade(migrated)) == ("0004", HEAD)
    assert trail.list().items == before
    with pytest.raises(StoreError, match=r"stays as it is: .* what .*plan_layouts, plans holds"):
        downgrade(migrated, "base")
    assert current_revision(migrated) == HEAD
    assert store.get_plan(plan.id) == plan


def test_the_tables_are_what_the_code_says(migrated: Engine) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    opts = {"version_table": VERSION_TABLE, "compare_type": True}
    with migrated.connect() as connection:
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, Base.metadata) == []


def test_a_file_with_another_s_tables_is_migrated(tmp_path: Path) -> None:
    engine = engine_of(f"sqlite:///{tmp_path}/shared.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE plans (id TEXT)"))
    with pytest.raises(StoreError):  # not ours to change: the migration says so
        ensure_current(engine)


def test_optuna_beside_us_is_left_alone(sqlite_url: str) -> None:
    engine = engine_of(sqlite_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('v3.2.0.a')"))
    assert upgrade(engine) == HEAD
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "v3.2.0.a"


def test_sqlite_is_made_at_first_use_and_postgres_is_not(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        with pytest.raises(NotReadyError, match="db upgrade"):
            ensure_current(engine)
        return
    ensure_current(engine)
    assert current_revision(engine) == HEAD
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1


def test_a_database_from_the_future_is_refused(engine: Engine) -> None:
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"9999.*newest planner"):
        ensure_current(engine)


def test_a_failed_migration_leaves_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE estimates (id INTEGER)"))
    with pytest.raises(StoreError, match="estimates"):
        upgrade(engine)
    assert not set(inspect(engine).get_table_names()) & {"plans", VERSION_TABLE}


def test_processes_create_the_database_at_once(cli: Cli, database_url: str, engine: Engine) -> None:
    asked = ("plans",) if database_url.startswith("sqlite") else ("db", "upgrade")
    environment = {"PLANNER_DATABASE_URL": database_url}
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda _: cli(*asked, env=environment), range(4)))
    assert [done.returncode for done in ended] == [0] * 4, ended
    assert current_revision(engine) == HEAD


def test_db_upgrade_by_command(cli: Cli, database_url: str) -> None:
    for said in ("was empty", "already"):
        done = cli("db", "upgrade", env={"PLANNER_DATABASE_URL": database_url})
        assert done.returncode == 0, done.stderr
        assert re.search(rf"revision {HEAD},? {said}", done.stdout)


def test_first_use_does_not_import_alembic_again(sqlite_url: str) -> None:
    upgrade(engine_of(sqlite_url))
    program = (
        "import sys; from planner.api.wiring import wire; wire().store; "
        "sys.exit('alembic' in sys.modules)"
    )
    done = ran(sys.executable, "-c", program, env={"PLANNER_DATABASE_URL": sqlite_url})
    assert done.returncode == 0, done.stderr


def test_the_folder_of_migrations_does_not_shadow_alembic() -> None:
    program = "import alembic.config; print(alembic.__file__)"
    assert "site-packages" in ran(sys.executable, "-c", program, cwd=ROOT, check=True).stdout
    assert not (ROOT / "alembic" / "__init__.py").exists()
