"""The interface of every program that a probe can run."""

from pathlib import Path
from typing import ClassVar, Protocol, Self

from planner.probes.evidence import Evidence
from planner.probes.programs import Program
from planner.probes.protocol import Environment, Failed, Outcome, ProbeTask
from planner.specs.job import Job
from planner.specs.layout import Layout


class ProbeTrainer(Protocol):
    """A program that trains. A probe starts it for a few steps and reads its numbers.

    times_kernels: it can time single kernels instead of a layout.
    """

    times_kernels: ClassVar[bool]

    @classmethod
    def of(cls, *, python: str, worker: str) -> Self:
        """The program under this interpreter. worker: the reference program."""
        ...

    @property
    def imports(self) -> str:
        """A module, or a file ending in .py, that the interpreter must be able to load."""
        ...

    def unsuited(self, job: Job, device: str) -> Failed | None:
        """Why no probe of this job can run here, whatever its layout; None if probes may run."""
        ...

    def refusal(self, job: Job, layout: Layout, device: str) -> str | None:
        """Why this program cannot run a layout that the job's trainer may; None if it can.

        Also None if only a run can show it.
        """
        ...

    def program(self, task: ProbeTask) -> Program | Failed:
        """The program for a task; a failure if it cannot run it. Raises SpecError."""
        ...

    def outcome(
        self, task: ProbeTask, folder: Path, evidence: Evidence
    ) -> tuple[Outcome, Environment] | None:
        """Reads outcome and environment from what the run left.

        None if the program writes its result itself.
        """
        ...
