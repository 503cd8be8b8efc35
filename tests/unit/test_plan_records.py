"""The database of a plan: read and written here, or by a copy of this process."""

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from api.plan_records import RecordsBeside, RecordsHere, plan_records
from api.second_core import Forks, collect
from api.service import ask_on_paper, make_plan
from api.settings import Settings
from api.wiring import Wiring, wire
from planner.errors import ConflictError, SpecError, StoreError
from planner.plan.recommend import recommend
from tests.stand_ins.plan_labels import plan_labels

JOB = {
    "model": "llama3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"seq_len": 8192, "global_batch_size": 64},
    "search": {"fix": {"tp": 1, "pp": 1, "cp": 1, "ac": "full"}},
}


@pytest.fixture
def wiring(sqlite_url: str) -> Wiring:
    return wire(Settings(database_url=sqlite_url))


@pytest.fixture
def core() -> Forks:
    """A second core, whatever threads other tests have left idle in this process."""
    return Forks(spinners=threading.active_count() - 1)


def engine_here(wiring: Wiring) -> bool:
    """Whether this process opened the database."""
    return "engine" in vars(wiring)


@pytest.mark.parametrize("alone", [True, False])
def test_a_plan_is_stored_once_wherever_the_database_is_open(
    alone: bool, core: Forks, wiring: Wiring
) -> None:
    with plan_records(None if alone else core, wiring) as records:
        assert isinstance(records, RecordsHere if alone else RecordsBeside)
        plan = make_plan(wiring, JOB, allow_files=False, records=records)
    assert engine_here(wiring) == alone
    stored = wiring.store.get_plan(plan.id)
    assert stored.model_dump() == plan.model_dump()


def test_a_plan_is_begun_while_the_copy_looks(core: Forks, wiring: Wiring) -> None:
    with plan_records(core, wiring) as records:
        question = ask_on_paper(wiring, JOB, allow_files=False, records=records)
    assert ask_on_paper(wiring, JOB, allow_files=False).begun is None
    assert question.begun is not None
    assert question.begun.draft is not None
    plans = [
        recommend(question.job, ports=wiring.ports, begun=begun) for begun in (question.begun, None)
    ]
    first, second = (plan.model_dump(exclude={"id", "created_at", "searched"}) for plan in plans)
    assert first == second


def test_what_cannot_be_planned_is_said_when_it_is_planned(core: Forks, wiring: Wiring) -> None:
    refused = {**JOB, "search": {"fix": {"tp": 3}}}
    with plan_records(core, wiring) as records:
        assert ask_on_paper(wiring, refused, allow_files=False, records=records).begun is None
        with pytest.raises(SpecError, match="tp=3 does not divide"):
            make_plan(wiring, refused, allow_files=False, records=records)


def test_a_finished_plan_need_not_wait_until_it_is_stored(core: Forks, wiring: Wiring) -> None:
    waits: list[Callable[[], object]] = []
    with plan_records(core, wiring) as records:
        plan = make_plan(wiring, JOB, allow_files=False, records=records, storing=waits.append)
        for wait in waits:
            wait()
    assert len(waits) == 1
    assert wiring.store.get_plan(plan.id).id == plan.id


def test_a_database_that_cannot_be_opened_is_said_before_any_work(
    core: Forks, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    wiring = wire(Settings(database_url=f"sqlite:///{tmp_path}/file/plans.db"))
    said: list[str] = []
    with plan_records(core, wiring) as records, pytest.raises(StoreError):
        make_plan(wiring, JOB, allow_files=False, records=records, progress=said.append)
    assert said == []


def test_what_a_dead_copy_was_to_store_is_stored_here(core: Forks, wiring: Wiring) -> None:
    copies: list[int] = []

    def kill(_: str) -> None:
        if not copies:
            copies.append(records.partner.process)  # type: ignore[union-attr]
            os.kill(copies[0], signal.SIGKILL)

    with plan_records(core, wiring) as records:
        plan = make_plan(wiring, JOB, allow_files=False, records=records, progress=kill)
    assert copies
    assert wiring.store.get_plan(plan.id).id == plan.id


def test_no_copy_is_left_behind(core: Forks, wiring: Wiring) -> None:
    with plan_records(core, wiring) as records:
        copy = records.partner.process  # type: ignore[union-attr]
    collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(copy, os.WNOHANG)


def test_a_copy_that_opened_the_database_knows_nothing_of_planning(
    core: Forks, sqlite_url: str
) -> None:
    """What it imports delays it, and the command waits for it."""
    code = (
        "import sys\n"
        "from api.plan_records import RecordsHere\n"
        "here = RecordsHere()\n"
        "here.get_ready()\n"
        "assert here.in_use('torchtitan', 'h100-sxm-80gb', '') == []\n"
        "print([name for name in sys.modules if name == 'numpy' or name.startswith('planner.')])\n"
    )
    environment = {**os.environ, "PLANNER_DATABASE_URL": sqlite_url}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    known = {
        "planner.beside",
        "planner.errors",
        "planner.ports",
        "planner.units",
        "planner.version",
    }
    assert set(ast.literal_eval(done.stdout)) <= known


def test_what_a_copy_cannot_store_is_told(core: Forks, wiring: Wiring) -> None:
    with plan_records(core, wiring) as records:
        plan = make_plan(wiring, JOB, allow_files=False, records=records)
        labels = plan_labels()
        with pytest.raises(ConflictError):
            records.save(plan, labels)()
    assert wiring.store.get_plan(plan.id).id == plan.id


@pytest.mark.parametrize("arguments", [["--help"], ["--gpu", "nonsense"]])
def test_a_command_that_makes_no_plan_leaves_no_copy(arguments: list[str], sqlite_url: str) -> None:
    """Their copy is ended with them; it would keep the pipe open."""
    environment = {**os.environ, "PLANNER_DATABASE_URL": sqlite_url}
    line = [sys.executable, "-m", "api.cli", "recommend", "--model", "llama3-8b", *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert (done.stdout if arguments == ["--help"] else done.stderr).strip()


def test_a_plan_that_nobody_reads_is_stored(sqlite_url: str) -> None:
    """`recommend ... | head -1`, say: it is stored beside its printing."""
    environment = {**os.environ, "PLANNER_DATABASE_URL": sqlite_url}
    cluster = ["--gpu", "h100-sxm-80gb", "--num-gpus", "8"]
    training = ["--seq-len", "4096", "--global-batch-size", "64"]
    line = [sys.executable, "-m", "api.cli", "recommend", "--model", "llama3-8b", *cluster]
    reading, writing = os.pipe()
    os.close(reading)
    subprocess.run([*line, *training, "--json"], env=environment, stdout=writing, timeout=60)
    os.close(writing)
    found = [sys.executable, "-m", "api.cli", "plans", "--json"]
    listed = subprocess.run(found, env=environment, capture_output=True, text=True, timeout=60)
    assert "llama3-8b" in listed.stdout
