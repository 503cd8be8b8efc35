"""Wraps the worker that torchrun starts: `-m planner.probes.inside RESULT MODULE|FILE ARGUMENTS`.

The worker itself need not know about the wrapper, which adds four things:
- The first rank writes the versions of this interpreter's packages to the folder (`FOUND`).
- The process ends with its parent.
- On SIGUSR1, and before SIGTERM ends it, it writes the stacks of all threads to RESULT.rankN.stack.
- An error that ends it early is written to RESULT.rankN.error.json: type, message, traceback, time.
    This includes errors before the worker's own handler is ready, such as a failed import.
"""

import faulthandler
import os
import platform
import runpy
import signal
import sys
from pathlib import Path

from planner.probes.evidence import RankError, error_path
from planner.probes.folder import FOUND
from planner.probes.guardian import GUARDIAN, STACK_SIGNAL, die_with_parent, write_json
from planner.probes.packages import ALLOCATOR, versions_in

INIT = 1


def main() -> None:
    """Runs the module or file as torchrun would have."""
    die_with_parent()
    if (
        os.getppid() in (INIT, int(os.environ.get(GUARDIAN, "0")))
        and "TORCHELASTIC_RUN_ID" in os.environ
    ):
        os._exit(1)  # torchrun died before the line above
    result, program, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        write_json(result.with_name(FOUND), versions())
    # this file must be open as long as the process lives
    stack = os.open(f"{result}.rank{rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=stack, all_threads=True, chain=True)
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except BaseException as error:
        ended = isinstance(error, SystemExit) and error.code in (None, 0)
        if not ended and not error_path(result, rank).exists():  # the worker's own holds more
            RankError.of(error, rank).write(result)
        raise


def versions() -> dict[str, str | None]:
    """Fields of `planner.probes.protocol.Environment` that packages and variables tell."""
    found = versions_in(sys.executable)
    nccl = next((found[name] for name in sorted(found) if name.startswith("nvidia-nccl")), None)
    return {
        "python": platform.python_version(),
        "torch": found.get("torch"),
        "trainer_version": found.get("torchtitan"),
        "nccl": nccl,
        "allocator": os.environ.get(ALLOCATOR[0]),
    }


if __name__ == "__main__":
    main()
