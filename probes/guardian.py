"""The small process between a runner and what it started: it outlives neither the time limit nor
the runner, and leaves nobody behind.

`python -I -S guardian.py SPEC.json`, standard library alone, so that it is up in a tenth of a
second. It becomes the reaper of everything that descends from it, whatever sessions those processes
make, starts the command, and waits for the command's end, the time limit, the end of its runner
(end of its standard input, or another parent), or a wish to stop. Then it kills every descendant
and everything that carries the probe's token in its environment, until two looks in a row find
nothing, and writes how it ended.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

TOKEN = "PLANNER_PROBE_TOKEN"
GUARDIAN = "PLANNER_PROBE_GUARDIAN"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_SECONDS = 0.03
STACKS_SECONDS = 0.7  # for the dumps of stuck ranks to reach their files
# a process in the kernel's uninterruptible sleep (a hung driver) may outlast it; it is then
# reported
KILL_SECONDS = 20.0
ON_END_SECONDS = 30.0
STACK_SIGNAL = signal.SIGUSR1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def processes() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of every process that is not a zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(name), int(parent)


def descendants(root: int) -> set[int]:
    """Pids below `root`, which itself is not among them."""
    children: dict[int, list[int]] = {}
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    stack = [root]
    while stack:
        below = children.get(stack.pop(), [])
        stack += [pid for pid in below if pid not in found]
        found.update(below)
    return found


def bearers(token: str) -> set[int]:
    """Pids that carry the token in their environment, wherever they stand in the tree. Ours alone
    can be read.
    """
    wanted = f"{TOKEN}={token}".encode()
    found = set()
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found - {os.getpid()}


def kill_all(token: str, *, below: int | None = None, seconds: float = KILL_SECONDS) -> list[int]:
    """Kills the token's bearers, and what is below a process, until none is left; returns who could
    not be killed.
    """
    deadline = time.monotonic() + seconds
    clean_looks = 0
    left: set[int] = set()
    while clean_looks < 2 and time.monotonic() < deadline:
        left = bearers(token) | (descendants(below) if below is not None else set())
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if below == os.getpid():  # elsewhere children are somebody's to wait for
            reap()
        clean_looks = 0 if left else clean_looks + 1
        time.sleep(TICK_SECONDS if left else 0.0)
    return sorted(left)


def reap() -> dict[int, int]:
    """Wait statuses of children that have ended, by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def ask_for_stacks(below: int) -> bool:
    """Asks every process that listens for it to write where it is; True when somebody listens."""
    asked = False
    for pid in descendants(below):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            caught = int(next(line for line in status if line.startswith("SigCgt:")).split()[1], 16)
            if caught >> (STACK_SIGNAL - 1) & 1:
                os.kill(pid, STACK_SIGNAL)
                asked = True
    return asked


def write_json(path: Path, value: object) -> None:
    """Writes a whole file or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    os.replace(partial, path)


class Guardian:
    """One command and its end. The keys of the spec are those of `probes.launch.GuardianSpec`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.started = spec, time.monotonic()
        self.parent = os.getppid()
        self.asked = False
        self.status: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True

    def run(self) -> bool:
        """Starts, waits, kills, and writes the end; whether the command ended well of its own
        accord.
        """
        end = Path(self.spec["end"])
        try:
            with open(self.spec["output"], "ab", buffering=0) as output:
                child = self._start(output)
        except OSError as error:
            write_json(
                end,
                {
                    "reason": "not-started",
                    "message": f"{error.strerror}: {self.spec['argv'][0]}",
                    "seconds": 0.0,
                    "left": [],
                },
            )
            return False
        reason = self._wait(child)
        seconds = time.monotonic() - self.started
        if reason == "time-limit" and ask_for_stacks(os.getpid()):
            time.sleep(STACKS_SECONDS)
        left = kill_all(self.spec["token"], below=os.getpid())
        for command in self.spec["on_end"] if reason != "exit" else []:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(command, capture_output=True, timeout=ON_END_SECONDS, check=False)
        code = (
            None
            if self.status is None or reason != "exit"
            else os.waitstatus_to_exitcode(self.status)
        )
        write_json(end, {"reason": reason, "exit_code": code, "seconds": seconds, "left": left})
        return code == 0

    def _start(self, output: Any) -> int:
        environment = {**self.spec["env"], TOKEN: self.spec["token"], GUARDIAN: str(os.getpid())}
        child = subprocess.Popen(
            self.spec["argv"],
            env=environment,
            cwd=self.spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        child.returncode = 0  # its status is read by `reap`, which reads everybody's
        return child.pid

    def _wait(self, child: int) -> str:
        """exit, time-limit, runner-gone or asked."""
        watched = [sys.stdin.fileno()] if self.spec["watch_runner"] else []
        while True:
            self.status = reap().get(child)
            if self.status is not None:
                return "exit"
            if self.asked:
                return "asked"
            if watched and (os.getppid() != self.parent or select.select(watched, [], [], 0)[0]):
                told = os.read(watched[0], 16) if select.select(watched, [], [], 0)[0] else b""
                return "asked" if told.startswith(b"stop") else "runner-gone"
            if time.monotonic() - self.started > self.spec["time_limit_seconds"]:
                return "time-limit"
            time.sleep(TICK_SECONDS)


def main() -> NoReturn:
    """Runs the spec whose path is the one argument."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended_well = Guardian(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run()
    sys.exit(not ended_well)  # `srun --kill-on-bad-exit` ends the other nodes by it


if __name__ == "__main__":
    main()
