"""The file of a SQLite database: who may read it, read-only ones, what is no JSON in it."""

import ctypes
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from planner.api.storage import engine as engines
from planner.api.storage.backup import back_up, faults_in
from planner.api.wiring import Wiring, wire
from planner.errors import StoreError
from planner.specs.plan import Plan
from tests.conftest import PLANNER, ROOT, Cli, commands, ran
from tests.served import in_process
from tests.stand_ins.records import PLAN_JOB

CAPBSET_DROP, DAC_OVERRIDE = 24, 1  # linux/prctl.h, linux/capability.h


def save(wiring: Wiring, plan: Plan, *names: str) -> None:
    for name in names:
        wiring.store.save_plan(plan.model_copy(update={"id": name}), PLAN_JOB)


def test_only_its_owner_may_read_a_database(wiring: Wiring, tmp_path: Path, plan: Plan) -> None:
    before = os.umask(0o022)
    try:
        save(wiring, plan, "plan-1")
        back_up(wiring.engine, tmp_path / "planner.db.copy")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("planner.db*")}
    finally:
        os.umask(before)
    ends = ("", "-shm", "-wal", ".copy")
    assert modes == {f"planner.db{end}": 0o600 for end in ends}


def test_what_is_no_json_is_named_and_hides_nothing_else(wiring: Wiring, plan: Plan) -> None:
    save(wiring, plan, "plan-a", "plan-b")
    assert faults_in(wiring.engine) == []
    with closing(sqlite3.connect(str(wiring.engine.url.database))) as connection, connection:
        connection.execute("UPDATE plans SET body = substr(body, 1, 99) WHERE id = 'plan-a'")
        connection.execute("UPDATE plan_layouts SET layout = 'x' WHERE plan_id = 'plan-b'")
    ranks = ", ".join(f"plan-b {entry.rank}" for entry in plan.ranked)
    broken = {"plans: body is no JSON: plan-a", f"plan_layouts: layout is no JSON: {ranks}"}
    assert set(faults_in(wiring.engine)) == broken
    with in_process(str(wiring.settings.database_url), probe_workers=0) as client:
        assert client.get("/plans/plan-a").status_code == 410
        assert client.get("/plans/plan-b").status_code == 200
        assert len(client.get("/plans").json()["items"]) == 2


def test_a_file_that_may_only_be_read_is_read(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    save(wiring, plan, "plan-1")
    wiring.engine.dispose()
    monkeypatch.setattr(engines.os, "access", lambda path, mode: mode != os.W_OK)
    reader = wire(wiring.settings)
    assert reader.store.get_plan("plan-1").ranked == plan.ranked
    assert "immutable" in engines.to_read(Path(str(reader.engine.url.database)))
    with pytest.raises(StoreError, match="readonly database"):
        save(reader, plan, "plan-2")
    reader.engine.dispose()
    monkeypatch.undo()
    save(wiring, plan, "plan-3")
    monkeypatch.setattr(engines.os, "access", lambda path, mode: mode != os.W_OK)
    beside = wire(wiring.settings)  # a log lies beside the file: somebody writes
    assert [line.id for line in beside.store.list().items] == ["plan-3", "plan-1"]
    beside.engine.dispose()


@pytest.mark.slow
def test_commands_read_a_file_on_a_disk_that_takes_nothing(
    sqlite_url: str, wiring: Wiring, tmp_path: Path, plan: Plan
) -> None:
    save(wiring, plan, "plan-1")
    wiring.engine.dispose()
    runs = ROOT / "benchmarks/measured/own-h200-sxm-141gb.runs.jsonl"
    (tmp_path / "row.jsonl").write_text(runs.read_text().splitlines()[0])
    (tmp_path / "planner.db").chmod(0o400)
    tmp_path.chmod(0o500)
    cli = without_roots_right(sqlite_url)
    reading = ("plans", "show plan-1", "measurements list", "db check")
    try:
        listed = [cli(*words.split()) for words in reading]
        refused = cli("measurements", "import", tmp_path / "row.jsonl")
    finally:
        tmp_path.chmod(0o700)
    assert [(done.returncode, done.stderr) for done in listed] == [(0, "")] * 4
    assert "plan-1" in listed[0].stdout
    assert (refused.returncode, len(refused.stderr.splitlines())) == (4, 1), refused.stderr


def without_roots_right(database_url: str) -> Cli:
    """The command line without root's right to write what the mode forbids."""
    libc = ctypes.CDLL(None)

    def run(arguments: Any, **given: Any) -> "subprocess.CompletedProcess[str]":
        drop = {"preexec_fn": lambda: libc.prctl(CAPBSET_DROP, DAC_OVERRIDE, 0, 0, 0)}
        return ran(*PLANNER, *arguments, **drop, **given)

    return commands(run, database_url)
