"""Starts a probe and waits for its end: a folder, a command under a guardian, always a result.

The runner never starts torchrun itself. It starts the guardian (`planner.probes.guardian`), which
does. The guardian ends every process when the time is up, on request, or when the runner ends. The
files in the folder are enough to say what happened (`planner.probes.outcome.conclude`), so any
process can conclude a probe whose runner crashed.
"""

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import ProbeError
from planner.probes import guardian
from planner.probes.evidence import PREFIX
from planner.probes.folder import BEGIN, END, LOG, NODE_LOGS, OTHERS, RESULT, TASK
from planner.probes.outcome import Begin, conclude, write_result
from planner.probes.preflight import Need, check, check_platform
from planner.probes.protocol import Failed, FailureKind, ProbeResult, ProbeTask
from planner.probes.trainers import WORKER, Program, trainer_of
from planner.probes.variables import DeviceLease, environment, inherited

SPEC = "guardian.json"
POLL_SECONDS = 0.05
PROGRESS_SECONDS = 0.5
# time for the guardian to kill everything and write its end file, after a stop or the time limit
GUARDIAN_SECONDS = 60.0
TAIL_BYTES = 4096
SHOWN_CHARACTERS = 100

Progress = Callable[[str], None]


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun(python: str, task: ProbeTask, program: Program, *, port: int) -> list[str]:
    """The command that runs a program here."""
    grid = f"--nnodes 1 --nproc-per-node {task.num_processes()} --master-addr 127.0.0.1"
    return command_of(python, program, f"{grid} --master-port {port}")


def command_of(python: str, program: Program, grid: str) -> list[str]:
    """The command of a program under torchrun with these options, or of its single process."""
    inside = ["-m", "planner.probes.inside", RESULT, program.target, *program.arguments]
    if program.single:
        return [python, *inside]
    return [python, "-m", "torch.distributed.run", *f"{grid} {TORCHRUN_FLAGS}".split(), *inside]


# No restarts, so that the first failure is the only one.
# The output of every rank goes to one log; each line is prefixed with its rank.
TORCHRUN_FLAGS = "--max-restarts 0 --monitor-interval 0.1 --role rank --tee 3 --log-dir logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How probes are started here.

    folder: where each probe gets its own folder.
    python: the interpreter that has torch.
    worker: the reference program, a module or a file.
    command: from (python, task, program, port) to the command line.
    port: chooses a free port.
    port_tries: how many ports are tried.
    keep: how many folders of ended probes are left on disk.
    inherit: patterns of variables that a probe gets besides `NEEDED`.
    tolerated_bytes: memory of a GPU that other programs may hold while a probe runs on it.
    """

    folder: Path
    python: str = sys.executable
    worker: str = WORKER
    command: Callable[..., list[str]] = torchrun
    port: Callable[[], int] = free_port
    port_tries: int = 3
    keep: int = 50
    inherit: tuple[str, ...] = ()
    tolerated_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How the caller follows a probe, and stops it.

    stop: set to end the probe.
    progress: callback for the last line of output, called from time to time.
    folder: callback for the probe's folder, once it exists.
    avoid: names of hosts that it must not run on, for a pool that can choose
        (`Capacity.avoids_hosts`).
    rather_not: hosts that it keeps off while enough others are left.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    progress: Progress = lambda _: None
    folder: Callable[[Path], None] = lambda _: None
    avoid: frozenset[str] = frozenset()
    rather_not: frozenset[str] = frozenset()

    def kept_off(self, hosts: Collection[str], wanted: int) -> frozenset[str]:
        """The hosts to keep off where a probe wants so many of these."""
        both = self.avoid | self.rather_not
        return both if len(set(hosts) - both) >= wanted else self.avoid


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardianSpec:
    """The guardian's orders (`planner.probes.guardian`).

    argv: the command, which runs in the folder.
    env: variables that we set for it. inherit: names of variables that it gets as the guardian has
        them. Their values, which may be secrets, are never written to a file.
    bus_ids: GPUs whose Xids the kernel's log is read for; see `planner.probes.pools.nvidia.Gpu`.
    suffix: of the names of its output, its end and the kernel's log, where each node has its own.
    watch_runner: end with the process that started the guardian.
    """

    argv: list[str]
    env: dict[str, str]
    inherit: list[str]
    folder: str
    token: str
    time_limit_seconds: float
    bus_ids: list[str]
    suffix: str = ""
    watch_runner: bool = True


class Launcher:
    """Runs tasks on this machine, one per call; several threads may call it at once."""

    def __init__(self, settings: LaunchSettings) -> None:
        self.settings = settings

    def check(self, need: Need) -> None:
        """Raises ProbeError if no probe can run here, whatever its layout."""
        python, worker = self.settings.python, self.settings.worker
        check(need, python=python, program=worker, folder=self.settings.folder.absolute())

    def run(
        self, task: ProbeTask, lease: DeviceLease | None = None, watch: Watch | None = None
    ) -> ProbeResult:
        """Runs a probe to its end, again if another process takes its port. Raises ProbeError."""
        check_platform()
        devices, observer = lease or DeviceLease(), watch or Watch()
        started = time.monotonic()

        def once() -> ProbeResult:
            left = task.time_limit_seconds - (time.monotonic() - started)
            with disk_errors(self.settings.folder):
                return self._once(task, devices, observer, left)

        result = with_free_port(self.settings.port_tries, once, observer)
        return result.model_copy(update={"hosts": [platform.node()]})

    def _once(
        self, task: ProbeTask, lease: DeviceLease, watch: Watch, time_limit_seconds: float
    ) -> ProbeResult:
        settings, token = self.settings, lease.token or uuid.uuid4().hex
        gpus = 0 if task.fake_tensors else task.num_processes()
        begin = Begin(num_gpus=gpus, token=token, gpu_name=lease.gpu_name)
        folder, program = prepare(settings, task, begin, watch)
        if isinstance(program, Failed):
            return write_result(folder, task, begin, program)
        spec = GuardianSpec(
            argv=settings.command(settings.python, task, program, port=settings.port()),
            env=environment(settings.folder, task, lease, program.env),
            inherit=inherited(settings.inherit),
            folder=str(folder),
            token=begin.token,
            bus_ids=list(lease.bus_ids),
            time_limit_seconds=time_limit_seconds,
        )
        if lease.others:
            guardian.write_private(folder / OTHERS, lease.others)
        supervise(folder, spec, lease.locks, watch)
        return conclude(folder)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns what the disk of a probe's files refuses into a ProbeError."""
    try:
        yield
    except OSError as error:
        raise ProbeError(
            f"{error.filename or folder}: the probe's files cannot be written or read "
            f"({error.strerror or error}); make room there, or set PLANNER_PROBE_FOLDER to another "
            "disk, and start again"
        ) from error


def with_free_port(tries: int, once: Callable[[], ProbeResult], watch: Watch) -> ProbeResult:
    """Returns the first result of `once` that is no port clash, or the last one."""
    for _ in range(tries):
        result = once()
        clash = isinstance(result.outcome, Failed) and result.outcome.kind == FailureKind.PORT
        if not clash or watch.stop.is_set():
            break
    return result


def prepare(
    settings: LaunchSettings, task: ProbeTask, begin: Begin, watch: Watch
) -> tuple[Path, Program | Failed]:
    """The folder with what the program reads, and the program or its refusal. Raises ProbeError."""
    tidy(settings)
    folder = new_folder(settings.folder.absolute(), task.id)
    watch.folder(folder)
    guardian.write_private(folder / TASK, task.model_dump_json(indent=2))
    guardian.write_whole(folder / BEGIN, begin.model_dump_json())
    trainer = trainer_of(task.trainer, python=settings.python, worker=settings.worker)
    program = trainer.program(task)
    for name, text in () if isinstance(program, Failed) else program.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guardian.write_private(folder / name, text)
    return folder, program


def tidy(settings: LaunchSettings) -> None:
    """Removes the folders of ended probes, except the newest."""
    with contextlib.suppress(OSError):
        written = (one.parent for one in settings.folder.glob(f"*/{RESULT}"))
        ended = [path for path in written if (path / END).exists()]
        ended.sort(key=lambda path: path.stat().st_mtime)
        for path in ended[: -settings.keep]:
            shutil.rmtree(path, ignore_errors=True)


def new_folder(parent: Path, name: str) -> Path:
    """Creates an unused folder of this name. Raises ProbeError if none can be created."""
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(1, 1000):
            folder = parent / (name if number == 1 else f"{name}.{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
    except OSError as error:
        remedy = "set PLANNER_PROBE_FOLDER to a place that may be written"
        raise ProbeError(f"{parent}: no folder for probes ({error.strerror}); {remedy}") from error
    raise ProbeError(f"{parent / name} and its successors exist already; remove them")


def supervise(folder: Path, spec: GuardianSpec, locks: Sequence[int], watch: Watch) -> None:
    """Starts a guardian and waits until it has ended; Ctrl-C ends the probe first."""
    guardian.write_json(folder / SPEC, asdict(spec))
    command = [sys.executable, "-I", "-S", guardian.__file__, str(folder / SPEC)]
    own: dict[str, Any] = {"start_new_session": True, "pass_fds": tuple(locks)}
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, **own)
    try:
        _wait(process, folder, spec.time_limit_seconds, watch)
    finally:
        _order(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GUARDIAN_SECONDS)
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        # processes are left only if the guardian itself was killed
        guardian.kill_all(spec.token)


def _order(process: subprocess.Popen[bytes]) -> None:
    """Orders the guardian to stop; has no effect on one that has ended."""
    if process.stdin is not None and not process.stdin.closed and process.poll() is None:
        with contextlib.suppress(OSError):
            process.stdin.write(b"stop\n")
            process.stdin.flush()


def _wait(
    process: subprocess.Popen[bytes], folder: Path, time_limit_seconds: float, watch: Watch
) -> None:
    said = time.monotonic()
    deadline = said + time_limit_seconds + GUARDIAN_SECONDS
    while process.poll() is None and not watch.stop.is_set() and time.monotonic() < deadline:
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            watch.progress(newest_line(folder))
        time.sleep(POLL_SECONDS)


def newest_line(folder: Path) -> str:
    """The last line of the program's output; of the log of a node where every node has its own."""
    lines = (last_line(log) for log in (folder / LOG, *sorted(folder.glob(NODE_LOGS))))
    return next((line for line in lines if line), "")


def last_line(log: Path) -> str:
    """The last line of a log, without the rank's prefix; empty if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - TAIL_BYTES))
        text = stream.read().decode("utf-8", "replace").rstrip()
        if text:
            return PREFIX.sub("", text.splitlines()[-1], count=1).strip()[:SHOWN_CHARACTERS]
    return ""
