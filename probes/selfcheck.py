"""Checks interpreter and machine: `python -m planner.probes.selfcheck DEVICE MODULE... [FLAGS]`.

Prints one line of JSON, `{"problem": ..., "package": ..., "remedy": ...}`. `problem` is what would
stop every probe that this interpreter runs, null if nothing would; `package` names what cannot be
imported, `remedy` what to do about anything else. Until it tries torch it imports only the standard
library, so that it can report what is missing.
"""

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LAUNCHER = "torch.distributed.run"
OLDEST_TORCH = (2, 11)  # that ran probes: on one H200, and on CPUs
SHARED_MEMORY = "/dev/shm"
SHARED_BYTES = 10**9  # NCCL's buffers between the GPUs of a machine; containers get 64 MB
COMPILERS = ("clang", "gcc", "cc")  # where CC names none (triton/runtime/build.py)

Found = Mapping[str, str | None]
NOTHING: Found = {"problem": None, "package": None}


def main() -> None:
    """Checks and prints.

    DEVICE: cuda or cpu.
    MODULE: the program of a probe, a module or a file ending in .py; others that it will import.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--compiles", action="store_true")
    parser.add_argument("--several-gpus", action="store_true")
    asked = parser.parse_args()
    answer = found(
        asked.device, asked.modules, compiles=asked.compiles, several_gpus=asked.several_gpus
    )
    sys.stdout.write(f"{json.dumps(answer)}\n")


def found(
    device: str, modules: Sequence[str], *, compiles: bool = False, several_gpus: bool = False
) -> Found:
    """Returns the first problem, in the order in which a probe would meet it.

    compiles: whether torch.compile will be called.
    several_gpus: whether a probe takes several GPUs.
    """
    for name in (LAUNCHER, *(one for one in modules if not one.endswith(".py"))):
        problem = _import(name)
        if problem is not None:
            return problem
    on_gpus = device == "cuda"
    return (
        _old_torch()
        or (on_gpus and _without_cuda())
        or (on_gpus and several_gpus and _small_shared_memory())
        or (on_gpus and compiles and _without_compiler())
        or (compiles and _without_cache())
        or NOTHING
    )


def _import(name: str) -> Found | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken package too: a shared object, another version's symbols
        missing = isinstance(error, ModuleNotFoundError)
        lacking = ((getattr(error, "name", None) if missing else None) or name).partition(".")[0]
        said = error if missing else f"{type(error).__name__}: {error}"
        return {"problem": f"cannot import {lacking} ({said})", "package": lacking}
    return None


def _problem(problem: str, remedy: str) -> Found:
    return {"problem": " ".join(problem.split()), "package": None, "remedy": remedy}


def _old_torch() -> Found | None:
    """Why no probe was ever seen to run on this torch; None if one was."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return _problem(
        f"has torch {version}, and probes need {oldest} or newer",
        f"install torch {oldest} or newer, or set PLANNER_PROBE_PYTHON to one that has it",
    )


def _without_cuda() -> Found | None:
    """Why torch sees no CUDA device; None if it does. Creates no context on any GPU."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return None
    why = "which sees no CUDA device"
    if torch.version.cuda is None:
        why = "which was built without CUDA"
    else:
        try:
            torch.cuda.init()
        except Exception as error:  # torch's own message about the driver
            why += f" ({error})"
    return _problem(
        f"has torch {torch.__version__}, {why}",
        "install a build of torch for this machine's driver",
    )


def _small_shared_memory() -> Found | None:
    """Why processes on several GPUs of this machine cannot share memory; None if they can."""
    if importlib.import_module("torch").cuda.device_count() < 2:
        return None
    try:
        disk = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        size, why = 0, f"finds no {SHARED_MEMORY} ({error.strerror})"
    else:
        size = disk.f_blocks * disk.f_frsize
        why = f"finds {size / 1e6:.0f} MB of {SHARED_MEMORY}, of which NCCL needs 1 GB"
    if size >= SHARED_BYTES:
        return None
    return _problem(why, "start the container with --shm-size 1g, or mount a larger one")


def _without_compiler() -> Found | None:
    """Why Triton cannot build what starts its kernels; None if it can."""
    named = os.environ.get("CC", "").split()[:1]
    off = "or fix compile to false"
    if not any(map(shutil.which, named or COMPILERS)):
        where = f"CC is {named[0]}" if named else f"none of {', '.join(COMPILERS)}"
        return _problem(
            f"finds no C compiler for torch.compile ({where})",
            f"install gcc, set CC to a compiler, {off}",
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        return _problem(
            f"finds no {headers} for torch.compile",
            f"install Python's headers (python3-dev), {off}",
        )
    return None


def _without_cache() -> Found | None:
    """Why compiled code cannot be loaded from the folders that cache it; None if it can."""
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    named = {name: os.environ[name] for name in variables if os.environ.get(name)}
    try:
        if "TORCHINDUCTOR_CACHE_DIR" not in named:  # a folder of torch's own in the temporary one
            named["TMPDIR"] = tempfile.gettempdir()
        for folder in named.values():
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(mmap.PAGESIZE))
                file.flush()
                # as the dynamic linker does: "failed to map segment" where the mount is noexec
                protection = mmap.PROT_READ | mmap.PROT_EXEC
                mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=protection).close()
    except OSError as error:
        where = " and ".join(f"{name}={folder}" for name, folder in named.items()) or "no TMPDIR"
        return _problem(
            f"cannot run what torch.compile caches ({where}: {error.strerror})",
            "set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to a folder that may be written, on "
            "a disk that is not mounted noexec, or fix compile to false",
        )
    return None


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # to tear torch down takes half a second
