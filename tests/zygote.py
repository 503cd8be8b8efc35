"""The command line in forks of one process that has imported it once.

Each call is a process of its own, made by the standard library's fork server: it has the
arguments, environment, folder and streams of a started command, and nothing of an earlier call.
What no fork can show (closed streams, a kill at the start, imports, hash seeds) is tested with
`tests.conftest.executable`.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ModuleSpec("planner.api.cli.__main__", None)
# of other packages, what commands import when they run
IMPORTED = ("alembic.command", "optuna", "sqlalchemy.dialects.sqlite", "tomlkit", "rich.console")


def modules() -> list[str]:
    """All of the command line and what it plans with."""
    files = [path for room in ("api", "planner") for path in (ROOT / room).rglob("*.py")]
    return [*IMPORTED, *map(module_of, sorted(files))]


def module_of(path: Path) -> str:
    """The name that a file of the checkout is imported by."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    parts = inside if inside[0] == "planner" else ("planner", *inside)
    return ".".join(parts).removesuffix(".__init__")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.zygote", *modules()])


def run(
    arguments: Sequence[str], *, input: str, env: Mapping[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """`planner-cli` with these arguments, as `subprocess.run` would with its output captured."""
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name, stream) for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_text(input)
        process = start(become, arguments, dict(env), os.getcwd(), streams)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        out, err = (stream.read_text() for stream in streams[1:])
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def restart(variables: Mapping[str, str]) -> None:
    """Begins anew the process that is forked, with variables that its libraries read."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    with patch.dict(os.environ, variables):
        forkserver.ensure_running()


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """A fork that has begun; what its parent was started as is not run in it first."""
    sys.modules["__main__"].__spec__ = COMMAND
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def enter(env: Mapping[str, str], cwd: str, streams: Sequence[str | Path]) -> None:
    """Takes on an environment, a folder and standard streams, which are files."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        opened = os.open(stream, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)


def become(
    arguments: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[str | Path]
) -> None:
    """Goes on as the command would that the caller started so."""
    enter(env, cwd, streams)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.argv = ["planner-cli", *arguments]
    from planner.api.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
