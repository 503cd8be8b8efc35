"""The programs that a probe can run: one file each, one line each below.

A line names the class that starts the program for a few steps and reads its numbers. It is imported
when a probe of its kind runs.
"""

import sys
from importlib import import_module

from planner.probes.trainers.protocol import ProbeTrainer
from planner.specs.probe_trainers import PROBE_TRAINERS

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
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        loaded: type[ProbeTrainer] = getattr(import_module(module), attribute)
        return loaded.of(python=python, worker=worker)
    return found.of(python=python, worker=worker)
