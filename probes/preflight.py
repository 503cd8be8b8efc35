"""Checks once, before the first probe, whether probes can run here at all.

What is missing here would stop every probe in the same way. The check runs in the interpreter that
will run the probes, so a torch in another environment does not count.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ProbeError, how_to_install
from planner.precision import PRECISIONS
from planner.probes.folder import free_bytes
from planner.probes.packages import search_path, told_by
from planner.probes.protocol import ProbeTask, device_of
from planner.probes.trainers import trainer_of
from planner.rules.base import Context
from planner.rules.precisions import gpu_precisions, trainer_precisions
from planner.search.space.domains import domains_of
from planner.specs.job import Job
from planner.units import GIB, format_bytes

CHECK_SECONDS = 300.0  # importing torch from a cold network disk takes minutes
STANDS_SECONDS = 120.0  # an answer without a problem is reused for this long
LEAST_FREE_BYTES = GIB / 16  # judgement: logs and a profile of every rank
EXTRA = how_to_install("probe")
FLOAT8, MX = "torchao.float8", "torchao.prototype.mx_formats"
TAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Need:
    """The need of a probe that is going to run.

    job: any of the jobs to measure.
    device: `cuda` or `cpu`.
    trainer: as in `ProbeTask`.
    precisions: of the layouts.
    compiles: whether any layout is compiled.
    num_gpus: that one run takes.
    """

    job: Job
    trainer: str
    device: str
    precisions: frozenset[str] = frozenset()
    compiles: bool = False
    num_gpus: int = 1

    @classmethod
    def of(cls, job: Job, trainer: str) -> "Need":
        """The need for runs of a job's layout, or of all that a search may propose."""
        precisions, compiles = candidates(job)
        device = device_of(job.cluster)
        return cls(job, trainer, device, precisions, compiles, job.cluster.num_gpus)

    @classmethod
    def of_task(cls, task: ProbeTask, job: Job) -> "Need":
        if task.kernels:
            return cls(job, task.trainer, task.device)
        precisions, compiles = candidates(job)
        compiles = compiles and not task.fake_tensors
        return cls(job, task.trainer, task.device, precisions, compiles, task.num_processes())

    def arguments(self) -> list[str]:
        """Arguments of the check for what these layouts need."""
        low = sorted(name for name in self.precisions if PRECISIONS[name].torchao.low)
        modules = {FLOAT8 if name.startswith("float8") else MX for name in low}
        flags = {"--compiles": self.compiles, "--several-gpus": self.num_gpus > 1}
        return [*sorted(modules), *(flag for flag, wanted in flags.items() if wanted)]


def candidates(job: Job) -> tuple[frozenset[str], bool]:
    """Precisions of a job's layouts, and whether any of them is compiled. Raises SpecError."""
    if job.layout is not None:
        return frozenset([job.layout.precision]), job.layout.compile
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    domains = domains_of(context, job.search).by_field
    runnable = trainer_precisions(context) & {*gpu_precisions(context)}
    runnable = runnable.intersection(map(str, domains["precision"].values))
    return runnable, True in domains["compile"].values


_good_until: dict[tuple[str, ...], float] = {}


def check(need: Need, *, python: str, program: str, folder: Path) -> None:
    """Raises ProbeError with what would stop every probe, and how to fix it.

    python: the interpreter of probes.
    program: the reference program, a module or a file.
    folder: the parent folder of probes.
    """
    check_platform()
    check_folder(folder)
    check_trainer(need, python)
    imported = trainer_of(need.trainer, python=python, worker=program).imports
    asking = command(python, need, imported)
    if _good_until.get(tuple(asking), 0.0) > time.monotonic():
        return
    problem = problem_in(ask(asking, folder=folder, seconds=CHECK_SECONDS), python)
    if problem is not None:
        raise ProbeError(problem)
    _good_until[tuple(asking)] = time.monotonic() + STANDS_SECONDS


def check_platform() -> None:
    """Raises ProbeError on a system that no probe runs on."""
    if sys.platform != "linux":
        raise ProbeError(
            f"probes run on Linux alone, not on {sys.platform}; probe on a Linux machine, or "
            "use --pool replay:FILE"
        )


def check_folder(folder: Path) -> None:
    """Raises ProbeError if no probe folder can be created here."""
    reason = "it may not be written"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not folder.is_dir():
        reason = "it is no folder" if folder.exists() else "it cannot be made"
    elif os.access(folder, os.W_OK | os.X_OK):
        free, needed = free_bytes(folder), format_bytes(LEAST_FREE_BYTES)
        if free >= LEAST_FREE_BYTES:
            return
        raise ProbeError(
            f"{folder}: no room for probes (its disk has {format_bytes(free)} left, and a probe "
            f"may need {needed}); free some, or set PLANNER_PROBE_FOLDER to another disk, and "
            "start again"
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


def command(python: str, need: Need, program: str) -> list[str]:
    """The command that runs the check in an interpreter."""
    return [python, "-m", "planner.probes.selfcheck", need.device, program, *need.arguments()]


def ask(
    command: Sequence[str], *, folder: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Runs that command. Raises ProbeError if it cannot start or does not answer in time."""
    try:
        ours = {**os.environ, "PYTHONPATH": search_path(folder)}
        return told_by(command, seconds, cwd=os.sep, env=ours)
    except subprocess.TimeoutExpired:
        slow = f"{command[0]} did not say within {seconds:.0f} s whether torch can be imported"
        raise ProbeError(f"{slow}; probe from an environment on a faster disk") from None
    except OSError as error:
        text = f"{command[0]}: no interpreter for probes ({error.strerror})"
        raise ProbeError(f"{text}; set PLANNER_PROBE_PYTHON to one that has torch") from None


def problem_in(done: subprocess.CompletedProcess[str], python: str) -> str | None:
    """The fault of an interpreter and how to fix it, in one line; None if there is none."""
    said = _said(done.stdout)
    if said is None:
        tail = " ".join(done.stderr.split())[-TAIL_CHARACTERS:]
        tail = tail or f"it ended with {done.returncode} and said nothing"
        text = f"{python} cannot be asked whether it has torch ({tail})"
        return f"{text}; set PLANNER_PROBE_PYTHON to one that has it"
    problem = said.get("problem")
    if problem is None:
        return None
    return f"{python} {problem}; {said.get('remedy') or remedy(said['package'], python)}"


def remedy(package: str, python: str) -> str:
    """Returns how to fix a package that an interpreter cannot import."""
    ways = [EXTRA if python == sys.executable else f"{EXTRA} for it"]
    if python != sys.executable:
        ways.append(f"set PLANNER_PROBE_PYTHON to an interpreter that has {package}")
    if package == "torchao":
        ways.append("fix precision to bf16")
    return ", or ".join(ways)


def _said(stdout: str) -> Mapping[str, Any] | None:
    """Parses the last line if it is JSON. An interpreter's site setup may print before it."""
    lines = stdout.strip().splitlines()
    with contextlib.suppress(ValueError):
        body = json.loads(lines[-1]) if lines else None
        return body if isinstance(body, dict) else None
    return None
