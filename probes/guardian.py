"""The small process between a runner and what it started. It ends every process of the probe.

It ends with the time limit or with the runner, and leaves no process of the probe behind.
`python -I -S guardian.py SPEC.json`: imports the standard library only, so that it starts in a
tenth of a second. It becomes the reaper of all its descendants, whatever sessions they create, and
starts the command. Then it waits for the first of:
- the command's end;
- the time limit;
- the end of its runner (its standard input is closed, or it has another parent);
- an order to stop: a signal, a line from the runner, or the file `stop` in the folder.

Last it kills every descendant, and every process that carries the probe's token in its environment,
until two searches in a row find none. Then it writes how the command ended.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

STOP = "stop"  # a file in the folder of a probe that asks its guardians, on all nodes, to end it
STDIN = 0  # the pipe from the runner
TOKEN = "PLANNER_PROBE_TOKEN"
GUARDIAN = "PLANNER_PROBE_GUARDIAN"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TICK_SECONDS = 0.03
STACKS_SECONDS = 0.7  # for the dumps of stuck ranks to reach their files
# a process in the kernel's uninterruptible sleep (a hung driver) may outlive this; it is reported
KILL_SECONDS = 20.0
STOP_FILE_SECONDS = 1.0  # between two looks for the file that asks to stop
CLEAN_SEARCHES = 2  # a process that forks during one search may be missed by it
LOG_SECONDS = 1.0  # between two looks at how long logs have become
LOG_BYTES = 2_000_000  # that are left of each end of a long log
MOST_LOG_BYTES = 8 * LOG_BYTES  # on disk while the probe runs
STACK_SIGNAL = signal.SIGUSR1
KMSG = "/dev/kmsg"
RECORD_BYTES = 8192  # of the kernel log, at most (CONSOLE_EXT_LOG_MAX)
PCI_DEVICE = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}", re.IGNORECASE)


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
    """Pids below `root`, without `root` itself."""
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


def environment_of(pid: int) -> bytes:
    """The environment that a process was started with. Raises OSError for other users' ones."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def owner_of(pid: int) -> int:
    """The user that a process runs as. Raises OSError for one that has ended."""
    return os.stat(f"/proc/{pid}").st_uid


def bearers(token: str) -> set[int]:
    """Pids of our processes that carry the token in their environment, except this process.

    They may stand anywhere in the process tree. Another user's process is none of ours, whatever
    it carries: who may read every environment could be told to kill it.
    """
    wanted = f"{TOKEN}={token}".encode()
    found = set()
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            if owner_of(pid) == os.geteuid() and wanted in environment_of(pid).split(b"\0"):
                found.add(pid)
    return found - {os.getpid()}


def kill(pid: int) -> None:
    """Kills a process; ignores one that has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_all(token: str, *, below: int | None = None) -> list[int]:
    """Kills all that carries the token or is below a process, until two searches find nothing.

    Returns the pids that are left.
    """
    deadline = time.monotonic() + KILL_SECONDS
    clean_searches = 0
    left: set[int] = set()
    while clean_searches < CLEAN_SEARCHES and time.monotonic() < deadline:
        if below == os.getpid():  # other processes wait for their own children
            reap()
        left = bearers(token) | (set() if below is None else descendants(below))
        for pid in left:
            kill(pid)
        clean_searches = 0 if left else clean_searches + 1
        if left:
            time.sleep(TICK_SECONDS)
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


def stopped_ranks(below: int) -> list[int]:
    """Ranks below a process that a signal has stopped; the others wait for them, and say so."""
    found = set()
    for pid in descendants(below):
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "Tt":
                told = environment_of(pid).split(b"\0")
                found.add(int(next(one for one in told if one.startswith(b"RANK=")).split(b"=")[1]))
    return sorted(found)


def ask_for_stacks(below: int) -> bool:
    """Asks every process that handles the signal to dump its stack. Returns whether any does."""
    asked = False
    for pid in descendants(below):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            caught = int(next(line for line in status if line.startswith("SigCgt:")).split()[1], 16)
            if caught >> (STACK_SIGNAL - 1) & 1:
                os.kill(pid, STACK_SIGNAL)
                asked = True
    return asked


class KernelLog:
    """Lines that the kernel logs from now on; none if its log may not be read.

    Source: Documentation/ABI/testing/dev-kmsg.
    """

    def __init__(self, path: str = KMSG) -> None:
        self.descriptor: int | None = None
        with contextlib.suppress(OSError):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.descriptor, 0, os.SEEK_END)

    def read(self, bus_ids: Iterable[str]) -> str:
        """The new lines, without the driver's about other GPUs than these (0000:3b:00)."""
        ours, kept = set(bus_ids), []
        for record in self._records():
            # "priority,sequence,microseconds,flags;text", then lines that start with a blank
            head, _, text = record.partition(";")
            named = {one.lower() for one in PCI_DEVICE.findall(text)} if "NVRM" in text else set()
            if head[:1].isdigit() and not (ours and named and not named & ours):
                kept.append(text.strip())
        return "\n".join(kept)

    def _records(self) -> Iterator[str]:
        while self.descriptor is not None:
            try:
                record = os.read(self.descriptor, RECORD_BYTES)
            except BrokenPipeError:
                continue  # the kernel overwrote what came next
            except OSError:
                return
            if not record:
                return
            yield from record.decode("utf-8", "replace").splitlines()


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value))


def write_whole(path: Path, text: str) -> None:
    """Writes a whole file that only we may read, or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    write_private(partial, text)
    os.replace(partial, path)


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only we may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def runner_wants(*, other_parent: bool, line: bytes | None) -> str | None:
    """Returns the runner's wish: `asked` to stop, `runner-gone` if it has ended, None to go on.

    line: what was read from standard input; None if nothing was there, empty when it was closed.
    """
    if line is not None and line.startswith(b"stop"):
        return "asked"
    return "runner-gone" if other_parent or line is not None else None


def cut_log(path: Path, most: int) -> None:
    """Leaves both ends of a log that takes more than so many bytes on disk.

    Who writes goes on: at its new end, or where it was, over a hole that takes no room.
    """
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as log:
        found = os.fstat(log.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_blocks * 512 <= most:
            return
        log.seek(max(LOG_BYTES, found.st_size - LOG_BYTES))
        tail = log.read(LOG_BYTES)
        log.truncate(LOG_BYTES)
        log.seek(0, os.SEEK_END)
        log.write(b"\n[...]\n" + tail)


class Guardian:
    """One command and its end. `planner.probes.launch.GuardianSpec` has the keys of the spec."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.started, self.first_parent = time.monotonic(), os.getppid()
        self.asked = False
        self.looked = self.started - STOP_FILE_SECONDS  # the first look is at once
        self.kernel = KernelLog()
        self.status: int | None = None

    def ask(self, number: int, frame: object) -> None:
        """Signal handler: orders the end."""
        self.asked = True

    def run(self) -> bool:
        """Starts, waits, kills, writes the end. Returns whether the command succeeded by itself."""
        end = self._file("end.json")
        try:
            with open(self._file("output.log"), "ab", buffering=0) as output:
                child = self._start(output)
        except OSError as error:
            message = f"{error.strerror}: {self.spec['argv'][0]}"
            values = {"reason": "not-started", "message": message, "seconds": 0.0, "left": []}
            write_json(end, values)
            return False
        looked = time.monotonic()
        while (reason := self.reason_to_end(child)) is None:
            time.sleep(TICK_SECONDS)
            if time.monotonic() - looked > LOG_SECONDS:
                self._cut_logs(MOST_LOG_BYTES)
                looked = time.monotonic()
        seconds = time.monotonic() - self.started
        stopped = stopped_ranks(os.getpid())
        if reason == "time-limit" and ask_for_stacks(os.getpid()):
            time.sleep(STACKS_SECONDS)
        left = kill_all(self.spec["token"], below=os.getpid())
        self._cut_logs(2 * LOG_BYTES)
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        write_private(self._file("kernel.log"), self.kernel.read(self.spec["bus_ids"]))
        told = {"reason": reason, "exit_code": code, "seconds": seconds, "left": left}
        write_json(end, {**told, "stopped": stopped})
        return code == 0

    def reason_to_end(self, child: int) -> str | None:
        """Returns why to end now: exit, asked, runner-gone or time-limit; None to go on."""
        self.status = reap().get(child)
        if self.status is not None:
            return "exit"
        if self.asked or self._stop_file():
            return "asked"
        if self.spec["watch_runner"]:
            line = os.read(STDIN, 16) if select.select([STDIN], [], [], 0)[0] else None
            wanted = runner_wants(other_parent=os.getppid() != self.first_parent, line=line)
            if wanted is not None:
                return wanted
        if time.monotonic() - self.started > self.spec["time_limit_seconds"]:
            return "time-limit"
        return None

    def _stop_file(self) -> bool:
        """Whether the file is there that asks to stop; on a shared disk it reaches every node."""
        if time.monotonic() - self.looked < STOP_FILE_SECONDS:
            return False
        self.looked = time.monotonic()
        return os.path.exists(os.path.join(self.spec["folder"], STOP))

    def _file(self, name: str) -> Path:
        """The file of this name in the probe's folder, of this node where every node has one."""
        stem, ending = name.split(".")
        return Path(self.spec["folder"], f"{stem}{self.spec['suffix']}.{ending}")

    def _cut_logs(self, most: int) -> None:
        """Shortens its own output and the logs of the ranks."""
        for path in Path(self.spec["folder"]).rglob("*.log"):
            with contextlib.suppress(OSError):
                cut_log(path, most)

    def _start(self, output: Any) -> int:
        given = {name: os.environ[name] for name in self.spec["inherit"] if name in os.environ}
        ours = {TOKEN: self.spec["token"], GUARDIAN: str(os.getpid())}
        environment = {**given, **self.spec["env"], **ours}
        child = subprocess.Popen(
            self.spec["argv"],
            env=environment,
            cwd=self.spec["folder"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        child.returncode = 0  # its status is read by `reap`, which reads every child's
        return child.pid


def main() -> NoReturn:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guardian = Guardian(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, guardian.ask)
    sys.exit(not guardian.run())  # a failure makes `srun --kill-on-bad-exit` end the other nodes


if __name__ == "__main__":
    main()
