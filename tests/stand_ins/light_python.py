"""An interpreter for probes (PLANNER_PROBE_PYTHON) in whose hands torchrun is `torchrun.py`, so
that none has to import torch.
"""

import os
import sys
from pathlib import Path

from tests.stand_ins import torchrun

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run"]
SELFCHECK = ["-m", "probes.selfcheck"]


def install(folder: Path) -> Path:
    """An executable of this folder that does so."""
    path = folder / "python"
    ours = f'PYTHONPATH="{ROOT}:$PYTHONPATH"'
    path.write_text(f'#!/bin/sh\n{ours} exec {sys.executable} {Path(__file__)} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Becomes the interpreter with the arguments given, torchrun's command line translated."""
    arguments = sys.argv[1:]
    if arguments[:2] == TORCHRUN:
        number = arguments[arguments.index("--nproc-per-node") + 1]
        arguments = [torchrun.__file__, number, *arguments[arguments.index("probes.inside") + 1 :]]
    if arguments[:2] == SELFCHECK:
        arguments = ["-c", "print('{\"problem\": null}')"]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
