"""An interpreter for probes (PLANNER_PROBE_PYTHON) in whose hands torchrun is `torchrun.py`, so
that none has to import torch.
"""

import os
import sys
from pathlib import Path

from tests.stand_ins import torchrun

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run"]
SELFCHECK = ["-m", "planner.probes.selfcheck"]
SLURM_NODE = ["-m", "planner.probes.pools.slurm_node"]


def install(folder: Path) -> Path:
    """An executable of this folder that does so."""
    path = folder / "python"
    ours = f'PYTHONPATH="{ROOT}:$PYTHONPATH"'
    path.write_text(f'#!/bin/sh\n{ours} exec {sys.executable} {Path(__file__)} "$0" "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Becomes the interpreter with the arguments given, torchrun's command line translated."""
    light, *arguments = sys.argv[1:]
    if arguments[:2] == TORCHRUN:
        grid = (("--node-rank", "0"), ("--nnodes", "1"), ("--nproc-per-node", "1"))
        inside = arguments[arguments.index("planner.probes.inside") + 1 :]
        arguments = [torchrun.__file__, *(given(arguments, *one) for one in grid), *inside]
    if arguments[:2] == SELFCHECK:
        arguments = ["-c", "print('{\"problem\": null}')"]
    if arguments[:2] == SLURM_NODE:  # it starts torchrun with the interpreter that runs it
        program = (
            f"import sys; sys.executable = {light!r}; import planner.probes.pools.slurm_node as it"
        )
        arguments = ["-c", f"{program}; it.main()", *arguments[2:]]
    os.execv(sys.executable, [sys.executable, *arguments])


def given(arguments: list[str], option: str, default: str) -> str:
    """The value of an option of torchrun's."""
    return arguments[arguments.index(option) + 1] if option in arguments else default


if __name__ == "__main__":
    main()
