"""Programs that torchrun starts for a probe."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
