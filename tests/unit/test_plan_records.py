"""The database of a plan: read and written here, or by a copy of this process."""

import os
import signal
import threading
from pathlib import Path

import pytest

from api.plan_records import RecordsBeside, RecordsHere, plan_records
from api.second_core import Forks
from api.service import make_plan
from api.settings import Settings
from api.wiring import Wiring, wire
from planner.errors import StoreError

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
    with pytest.raises(ChildProcessError):
        os.waitpid(copy, os.WNOHANG)
