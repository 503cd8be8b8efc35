"""Programs that torchrun starts for a probe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its second name is the older one
EXPANDABLE = re.compile(r"expandable_segments:\w+,?")


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


def allocator_settings(expandable: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Torch's allocator settings under both of their names, so that releases read the same.

    What the environment sets besides stays as it is.
    """
    given = next((environment[name] for name in ALLOCATOR if environment.get(name)), "")
    asked = f"expandable_segments:{expandable}"
    value = ",".join(filter(None, [EXPANDABLE.sub("", given).strip(","), asked]))
    return dict.fromkeys(ALLOCATOR, value)
