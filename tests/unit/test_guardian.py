"""The guardian's decisions, without waiting: who belongs to a probe, when to end, when all is gone.

That they hold for real processes is for `tests/e2e/test_probe_kills.py`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from planner.probes import guardian, outcome
from planner.probes.guardian import Guardian, bearers, descendants, kill_all
from tests.e2e.probe_jobs import until

TABLE = [(1, 0), (10, 1), (11, 10), (12, 11), (13, 10), (20, 1), (21, 20)]
ME, TOKEN = os.geteuid(), b"PLANNER_PROBE_TOKEN=abc\0"


def says(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Replaces what the guardian asks of its machine."""
    for name, answer in answers.items():
        monkeypatch.setattr(guardian, name, answer)


class TestWhoBelongsToAProbe:
    def test_everything_below_and_nobody_beside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        says(monkeypatch, processes=lambda: TABLE)
        assert descendants(10) == {11, 12, 13}
        assert descendants(12) == set()

    def test_a_zombie_is_gone_and_we_are_not(self) -> None:
        child = subprocess.Popen([sys.executable, "-S", "-c", ""])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody reaped it
        pids = {pid for pid, _ in guardian.processes()}
        assert (child.pid in pids, os.getpid() in pids) == (False, True)
        child.wait()

    def test_the_token_is_compared_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nodes that share a machine have tokens that begin alike."""
        environments = {
            11: b"PATH=/bin\0PLANNER_PROBE_TOKEN=abc\0",
            12: b"PLANNER_PROBE_TOKEN=abc-0\0",
            13: b"MY_PLANNER_PROBE_TOKEN=abc\0",
            21: b"HOME=/\0PLANNER_PROBE_TOKEN=abc",
            os.getpid(): TOKEN,
        }
        says(monkeypatch, processes=lambda: [(pid, 1) for pid in environments])
        says(monkeypatch, environment_of=environments.__getitem__, owner_of=lambda _: ME)
        assert bearers("abc") == {11, 21}

    def test_another_users_process_is_none_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        says(monkeypatch, processes=lambda: [(11, 1), (12, 1)], environment_of=lambda _: TOKEN)
        says(monkeypatch, owner_of={11: ME, 12: ME + 1}.__getitem__)
        assert bearers("abc") == {11}

    def test_who_cannot_be_read_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = Mock(side_effect=[PermissionError, TOKEN])
        says(monkeypatch, processes=lambda: [(10, 1), (11, 1)], environment_of=read)
        says(monkeypatch, owner_of=lambda _: ME)
        assert bearers("abc") == {11}

    def test_bearers_and_descendants_are_both_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alive = {11: "below", 77: "bearer"}
        says(monkeypatch, bearers=lambda _: {77} & set(alive))
        says(monkeypatch, descendants=lambda _: {11} & set(alive))
        monkeypatch.setattr(os, "kill", lambda pid, _: alive.pop(pid))
        assert kill_all("abc", below=10) == []
        assert alive == {}


class TestUntilNobodyIsLeft:
    def test_one_clean_search_is_not_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that forks while we look may be missed once."""
        searches = iter([{11, 12}, set(), {13}, set(), set(), {99}])
        killed: list[int] = []
        says(monkeypatch, bearers=lambda _: next(searches), kill=killed.append)
        assert (kill_all("abc"), sorted(killed)) == ([], [11, 12, 13])
        assert next(searches) == {99}

    def test_who_cannot_be_killed_is_named_when_the_time_is_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        clock = {"monotonic.side_effect": lambda: float(len(slept)), "sleep": slept.append}
        says(monkeypatch, time=Mock(**clock), KILL_SECONDS=5.0)
        says(monkeypatch, bearers=lambda _: {12, 11}, kill=lambda _: None)
        assert (kill_all("abc"), len(slept)) == ([11, 12], 5)

    @pytest.mark.parametrize("error", [PermissionError, ProcessLookupError])
    def test_another_users_process_and_one_that_ended_do_not_stop_it(
        self, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
    ) -> None:
        monkeypatch.setattr(os, "kill", Mock(side_effect=error))
        guardian.kill(12)


class World:
    """A runner, a clock and a child, as the guardian sees them."""

    def __init__(self) -> None:
        self.parent, self.now, self.ended = 500, 0.0, dict[int, int]()
        self.read_end, self.write_end = os.pipe()

    def guardian(self, **spec: Any) -> Guardian:
        values = {
            "time_limit_seconds": 60.0,
            "watch_runner": True,
            "folder": "none",
            "suffix": "",
            **spec,
        }
        return Guardian(values)

    def changes(self, says: bytes | None = None, **fields: Any) -> None:
        """says: to the guardian's stdin; b"" closes it."""
        vars(self).update(fields)
        if says:
            os.write(self.write_end, says)
        elif says is not None:
            os.close(self.write_end)
            self.write_end = os.dup(0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(os, "getppid", lambda: made.parent)
    clock = Mock(wraps=time, monotonic=lambda: made.now)
    says(monkeypatch, reap=lambda: made.ended, STDIN=made.read_end, time=clock)
    yield made
    os.close(made.read_end)
    os.close(made.write_end)


STOP = {"says": b"stop\n"}
NEW_PARENT = {"parent": 1}  # the runner was killed; a child of its own still holds the pipe


class TestWhenToEnd:
    @pytest.mark.parametrize(("happens", "reason"), [
        ({"now": 60.0}, None), ({"ended": {8: 0}}, None), (NEW_PARENT, "runner-gone"),
        ({"says": b""}, "runner-gone"), (STOP, "asked"), ({**NEW_PARENT, **STOP}, "asked"),
        ({"now": 60.5}, "time-limit"), ({"ended": {7: 0}}, "exit"),
        ({**NEW_PARENT, **STOP, "now": 60.5, "ended": {7: 0}}, "exit"),
    ])  # fmt: skip
    def test_when_something_happens(
        self, world: World, happens: dict[str, Any], reason: str | None
    ) -> None:
        one = world.guardian()
        world.changes(**happens)
        assert one.reason_to_end(7) == reason

    def test_when_a_file_asks_for_it(self, world: World, tmp_path: Path) -> None:
        """It is looked for once a second, as it may be on another machine's disk."""
        one = world.guardian(folder=str(tmp_path), watch_runner=False)
        reasons = []
        for moment in (1.5, 2.0, 2.5):
            world.changes(now=moment)
            reasons.append(one.reason_to_end(7))
            (tmp_path / "stop").touch()
        assert reasons == [None, None, "asked"]

    def test_on_a_node_a_signal_asks_and_there_is_no_runner_to_watch(self, world: World) -> None:
        one = world.guardian(watch_runner=False)
        world.changes(**NEW_PARENT, **STOP)
        assert one.reason_to_end(7) is None
        one.ask(15, None)
        assert one.reason_to_end(7) == "asked"


def test_a_rank_that_a_signal_stopped_is_seen() -> None:
    environment = {"PATH": os.environ["PATH"]}
    ranks = [
        subprocess.Popen(["sleep", "60"], env={**environment, "RANK": str(rank)})
        for rank in range(3)
    ]
    try:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        until(lambda: guardian.stopped_ranks(os.getpid()) == [1])
    finally:
        for process in ranks:
            process.kill()
            process.wait()


Run = Callable[..., tuple[bool, dict[str, Any], list[tuple[str, int | None]]]]


@pytest.fixture
def run_it(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` with a real command, and nobody killed but by name."""
    killed: list[tuple[str, int | None]] = []
    started: list[int] = []
    real_start = Guardian._start

    def kill_all(token: str, *, below: int | None = None) -> list[int]:
        killed.append((token, below))
        return []

    def start(this: Guardian, output: Any) -> int:
        started.append(real_start(this, output))
        return started[0]

    def reap() -> dict[int, int]:
        pid, status = os.waitpid(started[0], os.WNOHANG)
        return {pid: status} if pid else {}

    monkeypatch.setattr(Guardian, "_start", start)
    monkeypatch.setattr(guardian, "kill_all", kill_all)
    monkeypatch.setattr(guardian, "reap", reap)

    def run(*argv: str, **spec: Any) -> Any:
        well = world.guardian(**spec_of(tmp_path, *argv, **spec)).run()
        return well, json.loads((tmp_path / "end.json").read_text()), killed

    return run


def spec_of(folder: Path, *argv: str, **spec: Any) -> dict[str, Any]:
    return {
        "argv": list(argv), "env": {}, "inherit": ["PATH"], "folder": str(folder), "suffix": "",
        "bus_ids": [], "token": "abc", **spec,
    }  # fmt: skip


class TestHowItEnds:
    @pytest.mark.parametrize(("code", "well"), [(0, True), (3, False)])
    def test_its_exit_code_is_told(
        self, tmp_path: Path, run_it: Run, code: int, well: bool
    ) -> None:
        ended, end, killed = run_it("/bin/sh", "-c", f"echo $PLANNER_PROBE_TOKEN; exit {code}")
        assert (ended, end["reason"], end["exit_code"]) == (well, "exit", code)
        assert (tmp_path / "output.log").read_text() == "abc\n"
        assert killed == [("abc", os.getpid())]

    def test_a_time_limit_is_told(self, run_it: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guardian, "ask_for_stacks", lambda _: False)
        _, end, killed = run_it("/bin/sleep", "0.05", time_limit_seconds=-1.0)
        assert (end["reason"], end["exit_code"], len(killed)) == ("time-limit", None, 1)

    def test_what_the_kernel_said_of_its_gpus_meanwhile(
        self, tmp_path: Path, run_it: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kmsg = tmp_path / "kmsg"
        kmsg.write_text("4,1,90,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1, an old one\n")
        monkeypatch.setattr(guardian.KernelLog.__init__, "__defaults__", (str(kmsg),))
        ours = "NVRM: Xid (PCI:0000:3B:00): 79, pid=1, name=python3, GPU has fallen off the bus."
        killed = "oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=7"
        others = "NVRM: Xid (PCI:0000:5e:00): 79, pid=2, GPU has fallen off the bus."
        new = f"4,2,99,-;{ours}\n SUBSYSTEM=pci\ngarbage\n4,3,99,-;{others}\n4,4,99,-;{killed}\n"
        run_it("/bin/sh", "-c", f"printf '%s' '{new}' >> {kmsg}", bus_ids=["0000:3b:00"])
        assert (tmp_path / "kernel.log").read_text() == f"{ours}\n{killed}"
        assert guardian.KernelLog(str(tmp_path / "nowhere")).read(["0000:3b:00"]) == ""

    def test_a_command_that_is_none(self, tmp_path: Path, run_it: Run) -> None:
        well, end, _ = run_it(str(tmp_path / "nothing"))
        assert (well, end["reason"]) == (False, "not-started")
        assert "No such file" in end["message"]


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_long_log_keeps_both_ends_while_somebody_writes(tmp_path: Path, mode: str) -> None:
    path, block = tmp_path / "output.log", b"x" * 1_000_000
    with path.open(mode, buffering=0) as log:
        log.write(b"first\n")
        for _ in range(20):
            log.write(block)
        log.write(b"\nthen\n")
        guardian.cut_log(path, guardian.MOST_LOG_BYTES)
        on_disk = path.stat().st_blocks * 512
        log.write(b"last\n")
    assert on_disk < 2.1 * guardian.LOG_BYTES
    assert path.stat().st_blocks * 512 < 2.1 * guardian.LOG_BYTES, "a hole takes no room"
    text = outcome.read_log(path)
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    guardian.cut_log(path, guardian.MOST_LOG_BYTES)
    assert path.read_bytes().startswith(b"first")


def test_only_logs_are_cut(tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "a.log"
    other.write_bytes(b"x" * (guardian.MOST_LOG_BYTES + 1))
    link.symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        guardian.cut_log(link, 0)


def test_a_program_that_writes_without_end_leaves_little(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    program = (
        "import sys\n"
        "for f in (sys.stdout, open('logs/stdout.log', 'w')):\n"
        "    f.write('a' * 30_000_000)\n"
    )
    limits = {"time_limit_seconds": 60.0, "watch_runner": False}
    spec = spec_of(tmp_path, sys.executable, "-S", "-c", program, **limits, token="t-cut")
    guardian.write_json(tmp_path / "spec", spec)
    command = [sys.executable, "-I", "-S", guardian.__file__, str(tmp_path / "spec")]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
    left = {path.name: path.stat().st_size for path in tmp_path.rglob("*.log")}
    assert left.keys() == {"output.log", "stdout.log", "kernel.log"}
    assert max(left.values()) < 2.1 * guardian.LOG_BYTES
