"""The reference program (`planner.probes.worker`): plain torch on GPUs, a CPU, fake tensors."""

from typing import ClassVar

from planner.probes.folder import RESULT, TASK
from planner.probes.protocol import Failed, ProbeTask
from planner.probes.reference.recipe import refusal
from planner.probes.trainers import ProbeTrainer, Program
from planner.specs.job import Job
from planner.specs.layout import Layout


class ReferenceTrainer(ProbeTrainer):
    """The reference program, which reads the task and writes the result itself."""

    times_kernels: ClassVar[bool] = True

    @property
    def imports(self) -> str:
        return self.worker

    def refusal(self, job: Job, layout: Layout, device: str) -> str | None:
        return refusal(job, layout, "cpu" if device == "cpu" else "cuda")

    def program(self, task: ProbeTask) -> Program | Failed:
        return Program(target=self.worker, arguments=(TASK, RESULT))
