"""What a probe runs: the reference program, or the user's TorchTitan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from probes.folder import RESULT, TASK
from probes.protocol import Environment, Failed, Outcome, ProbeTask

if TYPE_CHECKING:
    from probes.failures import Evidence

MODULE = "-m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, run in the probe's folder. target: a module, or a file ending in .py.  single:
    one process without torchrun.
    """

    target: str
    arguments: tuple[str, ...]
    single: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def program_of(task: ProbeTask, python: str, worker: str) -> Program | Failed:
    """The program of a task; why it cannot run here, where the trainer knows that before it
    starts.
    """
    if task.trainer == "reference":
        return Program(target=worker, arguments=(TASK, RESULT))
    from probes.trainers.torchtitan import TitanTrainer

    command = TitanTrainer(python=python).command(task)
    if isinstance(command, Failed):
        return command
    target, *arguments = command.program[1:] if command.program[0] == MODULE else command.program
    return Program(
        target=target,
        arguments=tuple(arguments),
        single=command.single,
        files=command.files,
        env=command.env,
    )


def read_trainer(
    task: ProbeTask, folder: Path, evidence: "Evidence"
) -> tuple[Outcome, Environment] | None:
    """Outcome and environment from the trainer's own log; None for a program that writes its result
    itself.
    """
    if task.trainer == "reference":
        return None
    from probes.trainers.torchtitan import TitanTrainer

    trainer = TitanTrainer()
    # it knows its own words in the log better than the error files do
    own = replace(evidence, errors=())
    return trainer.read(task, evidence.log, folder, own), trainer.environment(evidence.log)
