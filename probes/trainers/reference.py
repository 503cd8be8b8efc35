"""The reference program (`planner.probes.worker`): plain torch on GPUs, a CPU, fake tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from planner.probes.evidence import Evidence
from planner.probes.folder import RESULT, TASK
from planner.probes.programs import Program
from planner.probes.protocol import Environment, Failed, Outcome, ProbeTask
from planner.probes.reference.recipe import refusal
from planner.specs.job import Job
from planner.specs.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTrainer:
    """The reference program. worker: a module or a file ending in .py."""

    times_kernels: ClassVar[bool] = True

    worker: str

    @classmethod
    def of(cls, *, python: str, worker: str) -> Self:
        return cls(worker=worker)

    @property
    def imports(self) -> str:
        return self.worker

    def unsuited(self, job: Job, device: str) -> Failed | None:
        """None: what it cannot run depends on the layout."""
        return None

    def refusal(self, job: Job, layout: Layout, device: str) -> str | None:
        return refusal(job, layout, "cpu" if device == "cpu" else "cuda")

    def program(self, task: ProbeTask) -> Program | Failed:
        """The worker, which reads the task and writes the result."""
        return Program(target=self.worker, arguments=(TASK, RESULT))

    def outcome(
        self, task: ProbeTask, folder: Path, evidence: Evidence
    ) -> tuple[Outcome, Environment] | None:
        """None: it writes its result itself."""
        return None
