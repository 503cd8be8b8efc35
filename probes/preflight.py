"""Checks once, before the first probe, whether probes can run here at all.

What is missing here would stop every probe in the same way. The check runs in the interpreter that
will run the probes, so a torch in another environment does not count.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ProbeError, how_to_install
from planner.specs.job import Job
from planner.units import GIB, format_bytes
from probes.trainers import trainer_of

CHECK_SECONDS = 300.0  # importing torch from a cold network disk takes minutes
STANDS_SECONDS = 120.0  # an answer without a problem is reused for this long
LEAST_FREE_BYTES = GIB / 16  # judgement: logs and a profile of every rank
EXTRA = how_to_install("probe")
CUDA_TORCH = "install a build of torch for this machine's driver"
TAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is going to run.

    job: any of the jobs to measure.
    device: `cuda` or `cpu`.
    trainer: as in `ProbeTask`.
    """

    job: Job
    trainer: str
    device: str

    @classmethod
    def of(cls, job: Job, trainer: str) -> "Need":
        """The need for runs of whole layouts of a job."""
        return cls(
            job=job, trainer=trainer, device="cpu" if job.cluster.gpu.name == "cpu" else "cuda"
        )


_good_until: dict[tuple[str, str, str], float] = {}


def check(need: Need, *, python: str, program: str, folder: Path, root: Path) -> None:
    """Raises ProbeError with what would stop every probe, and how to fix it.

    python: the interpreter of probes.
    program: the reference program, a module or a file.
    folder: the parent folder of probes.
    root: the folder that holds our packages.
    """
    if sys.platform != "linux":
        raise ProbeError(
            f"probes run on Linux alone, not on {sys.platform}; probe on a Linux machine, or "
            "use --pool replay:FILE"
        )
    check_folder(folder)
    check_trainer(need, python)
    imported = trainer_of(need.trainer, python=python, worker=program).imports
    asked = (python, need.device, imported)
    if _good_until.get(asked, 0.0) > time.monotonic():
        return
    problem = problem_in(ask(command(python, *asked[1:]), root=root, seconds=CHECK_SECONDS), python)
    if problem is not None:
        raise ProbeError(problem)
    _good_until[asked] = time.monotonic() + STANDS_SECONDS


def free_bytes(folder: Path) -> int:
    """What is left for us on the disk of a folder."""
    return shutil.disk_usage(folder).free


def check_folder(folder: Path) -> None:
    """Raises ProbeError if no probe folder can be created here."""
    reason = "it may not be written"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not folder.is_dir():
        reason = "it is no folder" if folder.exists() else "it cannot be made"
    elif os.access(folder, os.W_OK | os.X_OK):
        free = free_bytes(folder)
        if free >= LEAST_FREE_BYTES:
            return
        reason = f"its disk has {format_bytes(free)} left, and a probe may need "
        reason += format_bytes(LEAST_FREE_BYTES)
        raise ProbeError(
            f"{folder}: no room for probes ({reason}); free some, or set PLANNER_PROBE_FOLDER to "
            "another disk, and start again"
        )
    raise ProbeError(
        f"{folder}: no folder for probes ({reason}); set PLANNER_PROBE_FOLDER to a place that "
        "may be written"
    )


def check_trainer(need: Need, python: str) -> None:
    """Raises ProbeError if the trainer is missing, has a wrong version, or cannot train the job."""
    refused = trainer_of(need.trainer, python=python).unsuited(need.job, need.device)
    if refused is not None:
        raise ProbeError(refused.message)


def command(python: str, device: str, program: str) -> list[str]:
    """The command that runs the check in an interpreter."""
    return [python, "-m", "probes.selfcheck", device, program]


def ask(
    command: Sequence[str], *, root: Path, seconds: float
) -> "subprocess.CompletedProcess[str]":
    """Runs that command. Raises ProbeError if it cannot start or does not answer in time."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=os.sep,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        slow = f"{command[0]} did not say within {seconds:.0f} s whether torch can be imported"
        raise ProbeError(f"{slow}; probe from an environment on a faster disk") from None
    except OSError as error:
        text = (
            f"{command[0]}: no interpreter for probes ({error.strerror}); set "
            "PLANNER_PROBE_PYTHON to one that has torch"
        )
        raise ProbeError(text) from None


def problem_in(done: "subprocess.CompletedProcess[str]", python: str) -> str | None:
    """What is wrong with an interpreter and how to fix it, in one line; None if nothing is."""
    said = _said(done.stdout)
    if said is None:
        tail = (
            " ".join(done.stderr.split())[-TAIL_CHARACTERS:]
            or f"it ended with {done.returncode} and said nothing"
        )
        return (
            f"{python} cannot be asked whether it has torch ({tail}); set PLANNER_PROBE_PYTHON to "
            "one that has it"
        )
    problem = said.get("problem")
    return None if problem is None else f"{python} {problem}; {remedy(said.get('package'), python)}"


def remedy(package: str | None, python: str) -> str:
    """Returns how to fix a package that an interpreter cannot import.

    None as the package means that its torch sees no GPU.
    """
    if package is None:
        return CUDA_TORCH
    if python == sys.executable:
        return EXTRA
    return f"{EXTRA} for it, or set PLANNER_PROBE_PYTHON to an interpreter that has {package}"


def _said(stdout: str) -> Mapping[str, Any] | None:
    """Parses the last line if it is JSON. An interpreter's site setup may print before it."""
    lines = stdout.strip().splitlines()
    with contextlib.suppress(ValueError):
        body = json.loads(lines[-1]) if lines else None
        return body if isinstance(body, dict) else None
    return None
