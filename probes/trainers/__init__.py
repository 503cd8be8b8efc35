"""The programs that a probe can run: one file each, one line each below.

A line names the class that starts the program for a few steps and reads its numbers. It is imported
when a probe of its kind runs.
"""

import sys
from pkgutil import resolve_name

from planner.probes.trainers.protocol import ProbeTrainer
from planner.specs.job import PROBE_TRAINERS

WORKER = "planner.probes.worker"  # the reference program
TRAINERS: dict[str, str | type[ProbeTrainer]] = {}


def register(name: str, trainer: str | type[ProbeTrainer]) -> None:
    """Adds a program. trainer: the class, or `module:class` of it."""
    if name not in PROBE_TRAINERS:
        PROBE_TRAINERS.append(name)
    TRAINERS[name] = trainer


register("reference", "planner.probes.trainers.reference:ReferenceTrainer")
register("torchtitan", "planner.probes.trainers.torchtitan:TitanTrainer")


def trainer_of(name: str, *, python: str = sys.executable, worker: str = WORKER) -> ProbeTrainer:
    """Returns the program of this name.

    python: the interpreter that runs it.
    worker: the reference program, a module or a file.
    """
    found = TRAINERS[name]
    trainer: type[ProbeTrainer] = resolve_name(found) if isinstance(found, str) else found
    return trainer.of(python=python, worker=worker)
