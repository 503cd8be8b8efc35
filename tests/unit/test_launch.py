"""Staying with a probe: who ends it, which folder and environment it gets, when a port clashes."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from planner.errors import ProbeError
from planner.probes import guardian, launch, preflight, variables
from planner.probes.folder import BEGIN, END, LOG, RESULT, TASK
from planner.probes.launch import GuardianSpec, Launcher, LaunchSettings, Watch, supervise
from planner.probes.outcome import Begin
from planner.probes.protocol import Failed, FailureKind, MeasuredRun, Outcome, ProbeTask
from planner.probes.variables import DeviceLease, environment
from tests.conftest import job_values

JOB = job_values("debug-tiny", "cpu", 2, 64, 4, layout={"dp_shard": 2, "ac": "none"})
TASK_OF_TWO = ProbeTask(id="probe-1", job=JOB, device="cpu")
CLASH = Failed(kind=FailureKind.PORT, rank=0, message="address in use")
DONE = MeasuredRun(step_seconds=0.1, step_seconds_each=[0.1], losses=[1.0])


def spec(folder: Path, *argv: str, **more: Any) -> GuardianSpec:
    values: dict[str, Any] = {"time_limit_seconds": 30.0, **more}
    return GuardianSpec(
        argv=list(argv), env={}, inherit=["PATH"], folder=str(folder),
        token=f"token-of-{folder.name}", bus_ids=[], **values,
    )  # fmt: skip


class TestSupervise:
    def test_what_a_program_inherits_reaches_it_and_no_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PLANNER_DATABASE_URL", "postgresql://u:hunter2@h/d")
        monkeypatch.setenv("NEEDED_HERE", "swordfish")
        one = spec(tmp_path, "/bin/sh", "-c", 'test -n "$NEEDED_HERE" && env -u NEEDED_HERE')
        one = replace(one, inherit=["PATH", "NEEDED_HERE"])
        supervise(tmp_path, one, (), Watch())
        assert json.loads((tmp_path / END).read_text())["exit_code"] == 0
        assert (tmp_path / launch.SPEC).stat().st_mode & 0o777 == 0o600
        written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
        assert not {"hunter2", "swordfish"} & set(re.findall(r"\w+", written))

    def test_the_lease_is_held_by_the_guardian_too(self, tmp_path: Path) -> None:
        lock = os.open(tmp_path / "gpu-0.lock", os.O_RDWR | os.O_CREAT)
        command = ("/bin/sh", "-c", "readlink /proc/$PPID/fd/*")
        supervise(tmp_path, spec(tmp_path, *command), (lock,), Watch())
        os.close(lock)
        assert str(tmp_path / "gpu-0.lock") in (tmp_path / LOG).read_text()

    def test_a_guardian_that_never_ends_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "GUARDIAN_SECONDS", 0.0)
        monkeypatch.setattr(launch, "PROGRESS_SECONDS", 0.0)
        (tmp_path / LOG).write_text("[rank0]: step 3 of 9\n\n")
        messages: list[str] = []
        stuck = Mock(poll=Mock(return_value=None))
        launch._wait(stuck, tmp_path, 0.12, Watch(progress=messages.append))
        assert set(messages) == {"step 3 of 9"}


class TestDisk:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    def test_a_full_disk_is_the_pools_error_and_names_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        full = OSError(code, os.strerror(code), "task.json")
        monkeypatch.setattr(guardian, "write_private", Mock(side_effect=full))
        launcher = Launcher(LaunchSettings(folder=tmp_path / "probes"))
        with pytest.raises(ProbeError, match=r"task\.json: .* make room there, or set PLANNER_PR"):
            launcher.run(TASK_OF_TWO)

    def test_a_disk_without_room_is_found_before_a_probe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preflight.check_folder(tmp_path)
        monkeypatch.setattr(preflight, "free_bytes", lambda _: 4096)
        with pytest.raises(ProbeError, match=r"no room for probes .* start again"):
            preflight.check_folder(tmp_path)


class TestPorts:
    def attempts(self, *outcomes: Outcome, watch: Watch | None = None) -> list[Outcome]:
        """The outcomes of the attempts made; the last is the answer."""
        made: list[Any] = []

        def once() -> Any:
            made.append(SimpleNamespace(outcome=outcomes[len(made)]))
            return made[-1]

        assert launch.with_free_port(3, once, watch or Watch()) is made[-1]
        return [one.outcome for one in made]

    def test_a_clash_is_tried_again_and_nothing_else(self) -> None:
        crash = Failed(kind=FailureKind.CRASH, rank=0, message="")
        assert self.attempts(CLASH, DONE, DONE) == [CLASH, DONE]
        assert self.attempts(crash, DONE) == [crash]

    def test_the_last_clash_is_the_answer(self) -> None:
        assert self.attempts(CLASH, CLASH, CLASH, DONE) == [CLASH] * 3

    def test_a_stop_is_no_reason_to_try_again(self) -> None:
        watch = Watch()
        watch.stop.set()
        assert self.attempts(CLASH, DONE, watch=watch) == [CLASH]


class TestFolders:
    def ended(self, parent: Path, name: str, age: float, *files: str) -> Path:
        folder = parent / name
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        os.utime(folder, (1e9 - age, 1e9 - age))
        return folder

    def test_only_ended_probes_are_removed_and_the_oldest_first(self, tmp_path: Path) -> None:
        for age in range(4):
            self.ended(tmp_path, f"ended-{age}", age, RESULT, END)
        self.ended(tmp_path, "running", 99.0, TASK, BEGIN)
        self.ended(tmp_path, "half", 98.0, RESULT)
        launch.tidy(LaunchSettings(folder=tmp_path, keep=2))
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"ended-0", "ended-1", "running", "half"}

    def test_a_name_is_never_used_twice(self, tmp_path: Path) -> None:
        names = [launch.new_folder(tmp_path / "probes", "probe-1").name for _ in range(3)]
        assert names == ["probe-1", "probe-1.2", "probe-1.3"]

    def test_what_the_program_reads_is_there_before_it_starts(self, tmp_path: Path) -> None:
        seen: list[Path] = []
        begin = Begin(num_gpus=2, token="abc")
        settings = LaunchSettings(folder=tmp_path)
        folder, _ = launch.prepare(settings, TASK_OF_TWO, begin, Watch(folder=seen.append))
        assert seen == [folder]
        assert ProbeTask.model_validate_json((folder / TASK).read_text()) == TASK_OF_TWO
        assert Begin.read(folder / BEGIN) == begin


class TestEnvironment:
    @pytest.mark.parametrize(("devices", "visible"), [(("GPU-1", "7"), "GPU-1,7"), ((), "")])
    def test_devices_are_those_of_the_lease(
        self, tmp_path: Path, devices: tuple[str, ...], visible: str
    ) -> None:
        found = environment(tmp_path, TASK_OF_TWO, DeviceLease(devices=devices), {"EXTRA": "1"})
        assert (found["CUDA_VISIBLE_DEVICES"], found["EXTRA"]) == (visible, "1")

    def test_a_probe_gets_what_programs_need_and_no_secret_of_the_service(self) -> None:
        needed = ["PATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "SLURM_JOB_ID", "HF_HOME", "LC_ALL"]
        ours = {name: "value" for name in (
            *needed, "RANK", guardian.TOKEN, "PLANNER_DATABASE_URL", "PLANNER_API_KEYS",
            "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MY_LICENCE", "SSH_AUTH_SOCK",
        )}  # fmt: skip
        assert variables.inherited((), ours) == needed
        asked = variables.inherited(("MY_*", "HF_TOKEN"), ours)
        assert asked == [*needed, "HF_TOKEN", "MY_LICENCE"]

    @pytest.mark.parametrize(("text", "line"), [
        ("", ""),
        ("one\n[rank1]: step 2\n\n", "step 2"),
        ("x" * 9000, "x" * launch.SHOWN_CHARACTERS),
    ])  # fmt: skip
    def test_the_last_line_of_a_log(self, tmp_path: Path, text: str, line: str) -> None:
        (tmp_path / LOG).write_text(text)
        assert launch.last_line(tmp_path / LOG) == line


def test_progress_shows_what_a_node_says_where_nodes_have_logs_of_their_own(tmp_path: Path) -> None:
    assert launch.newest_line(tmp_path) == ""
    (tmp_path / "output.log").write_text("")
    (tmp_path / "output.node0.log").write_text("[rank0]:step 1 of 9\n")
    assert launch.newest_line(tmp_path) == "step 1 of 9"
    (tmp_path / "output.log").write_text("srun: error\n")
    assert launch.newest_line(tmp_path) == "srun: error"
