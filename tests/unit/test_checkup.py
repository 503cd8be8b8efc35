"""`planner-cli doctor`: each part ok, warn or fail, with what to do, and nothing of it slow."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.api import checkup
from planner.api.checkup import all_checks, disk
from planner.api.settings import Settings
from planner.api.wiring import wire
from planner.probes.pools.nvidia import Survey
from tests.conftest import ROOT, ran
from tests.unit.conftest import Say
from tests.unit.test_local_pool import H100


def checks(tmp_path: Path, **settings: Any) -> dict[str, checkup.Check]:
    values = {
        "database_url": f"sqlite:///{tmp_path / 'x.db'}",
        "probe_folder": tmp_path / "probes",
        "lease_folder": tmp_path / "leases",
        **settings,
    }
    return {one.name: one for one in all_checks(wire(Settings(**values)), torch=False)}


def test_every_part_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    found = checks(tmp_path, probe_python="/no/such/python")
    assert {"python", "packages", "torch", "gpus", "slurm", "database", "keys"} <= set(found)
    assert found["torch"].state == "warn"
    assert "PLANNER_PROBE_PYTHON" in str(found["torch"].remedy)
    for one in found.values():
        assert (one.remedy is None) == (one.state == "ok"), one


@pytest.mark.parametrize(("name", "settings", "word"), [
    ("database", {"database_url": "postgresql://127.0.0.1:1/x"}, "PLANNER_DATABASE_URL"),
    ("keys", {"host": "0.0.0.0"}, "PLANNER_API_KEYS"),
    ("probe folder", {"probe_folder": Path("/proc/none")}, "PLANNER_PROBE_FOLDER"),
    ("leases", {"lease_folder": Path("/tmp")}, "mode 700"),
])  # fmt: skip
def test_what_would_stop_the_service_fails(
    tmp_path: Path, name: str, settings: dict[str, Any], word: str
) -> None:
    found = checks(tmp_path, **settings)[name]
    assert found.state == "fail", found
    assert word in str(found.remedy)


@pytest.mark.parametrize(("free", "state"), [(2**20, "fail"), (2**28, "warn"), (2**40, "ok")])
def test_a_disk_is_judged_by_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert disk("d", tmp_path / "not" / "there", "PLANNER_X").state == state


def test_gpus_in_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.api.checkup.survey", lambda: Survey(gpus=(H100,)))
    assert checks(tmp_path)["gpus"].detail == "1 x NVIDIA H100 80GB HBM3, driver 550"


def test_its_json_has_every_check_and_its_code_says_whether_one_failed(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_PROBE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PLANNER_LEASE_FOLDER", str(tmp_path / "leases"))
    report = say("doctor", "--json").json
    assert report["ok"]
    assert {one["state"] for one in report["checks"]} <= {"ok", "warn"}
    monkeypatch.setenv("PLANNER_HOST", "0.0.0.0")
    assert "fail  keys" in say("doctor", code=4).out


def test_torch_is_not_imported_here(sqlite_url: str) -> None:
    code = (
        "import sys\nfrom planner.api.cli.root import run\nrun(['doctor', '--json'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = ran(sys.executable, "-c", code, env={"PLANNER_DATABASE_URL": sqlite_url}, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.probes.packages.ASK_SECONDS", 0.2)
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    found = checks(tmp_path, probe_python=str(hangs))["torch"]
    assert (found.state, "no answer within 0.2 s" in found.detail) == ("warn", True)
