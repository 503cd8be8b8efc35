"""Checks the interpreter that probes will use: `python -m probes.selfcheck DEVICE PROGRAM`.

Prints one line of JSON, `{"problem": ..., "package": ...}`. `problem` is what would stop every
probe that this interpreter runs, null if nothing would; `package` names what cannot be imported.
Until it tries torch it imports only the standard library, so that it can report what is missing.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping

LAUNCHER = "torch.distributed.run"


def main() -> None:
    """Checks and prints.

    DEVICE: cuda or cpu.
    PROGRAM: the program of a probe, a module or a file ending in .py.
    """
    device, program = sys.argv[1], sys.argv[2]
    sys.stdout.write(f"{json.dumps(found(device, program))}\n")


def found(device: str, program: str) -> Mapping[str, str | None]:
    """Returns the first problem, in the order in which a probe would meet it."""
    wanted = [LAUNCHER, *([] if program.endswith(".py") else [program])]
    for name in wanted:
        problem = _import(name)
        if problem is not None:
            return problem
    return {"problem": _without_cuda() if device == "cuda" else None, "package": None}


def _import(name: str) -> Mapping[str, str | None] | None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        return {"problem": f"cannot import {missing} ({error})", "package": missing}
    except (
        Exception
    ) as error:  # an installed but broken package: a shared object, another version's symbols
        broken = name.partition(".")[0]
        return {
            "problem": f"cannot import {broken} ({type(error).__name__}: {error})",
            "package": broken,
        }
    return None


def _without_cuda() -> str | None:
    """Why torch sees no CUDA device; None if it does. Creates no context on any GPU."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return None
    if torch.version.cuda is None:
        return f"has torch {torch.__version__}, which was built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # torch's own message about the driver
        return (
            f"has torch {torch.__version__}, which sees no CUDA device "
            f"({' '.join(str(error).split())})"
        )
    return f"has torch {torch.__version__}, which sees no CUDA device"


if __name__ == "__main__":
    main()
