"""The programs that a probe can run: one file each, one line each below.

A line names the class that starts the program for a few steps and reads its numbers. It is imported
when a probe of its kind runs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

from planner.probes.evidence import Evidence
from planner.probes.protocol import Environment, Failed, Outcome, ProbeTask
from planner.specs.job import PROBE_TRAINERS, Job
from planner.specs.layout import Layout

WORKER = "planner.probes.worker"  # the reference program


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, run in the probe's folder.

    target: a module, or a file ending in .py.
    arguments: the program's arguments.
    single: one process, without torchrun.
    files: text by name, to write into the folder before the start.
    env: variables to add to the environment.
    """

    target: str
    arguments: tuple[str, ...]
    single: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrainer:
    """A program that trains. A probe starts it for a few steps and reads its numbers.

    python: the interpreter that runs it.
    worker: the reference program, a module or a file ending in .py.
    times_kernels: it can time single kernels instead of a layout.
    """

    times_kernels: ClassVar[bool] = False

    python: str = sys.executable
    worker: str = WORKER

    @property
    def imports(self) -> str:
        """A module, or a file ending in .py, that the interpreter must be able to load."""
        return "torch"

    def unsuited(self, job: Job, device: str) -> Failed | None:
        """Why no probe of this job can run here, whatever its layout; None if probes may run."""
        return None

    def refusal(self, job: Job, layout: Layout, device: str) -> str | None:
        """Why this program cannot run a layout; None if it can, or if only a run can show it."""
        return None

    def program(self, task: ProbeTask) -> Program | Failed:
        """The program for a task; a failure if it cannot run it. Raises SpecError."""
        raise NotImplementedError

    def outcome(
        self, task: ProbeTask, folder: Path, evidence: Evidence
    ) -> tuple[Outcome, Environment] | None:
        """Outcome and environment from what the run left; None if it writes its result itself."""
        return None


TRAINERS: dict[str, str | type[ProbeTrainer]] = {}


def register(name: str, trainer: str | type[ProbeTrainer]) -> None:
    """Adds a program. trainer: the class, or `module:class` of it."""
    if name not in PROBE_TRAINERS:
        PROBE_TRAINERS.append(name)
    TRAINERS[name] = trainer


register("reference", "planner.probes.trainers.reference:ReferenceTrainer")
register("torchtitan", "planner.probes.trainers.torchtitan:TitanTrainer")


def trainer_of(name: str, *, python: str = sys.executable, worker: str = WORKER) -> ProbeTrainer:
    """Returns the program of this name, run by this interpreter."""
    found = TRAINERS[name]
    trainer: type[ProbeTrainer] = resolve_name(found) if isinstance(found, str) else found
    return trainer(python=python, worker=worker)
