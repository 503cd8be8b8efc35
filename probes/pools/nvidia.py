"""The NVIDIA GPUs of this machine and who uses them, from nvidia-smi.

Sizes are in bytes; None if the driver does not report them.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.probes.packages import told_by
from planner.specs.gpu import GpuSpec
from planner.units import MIB

SMI_SECONDS = 30.0
GPU_FIELDS = (
    "index", "uuid", "memory.total", "memory.used", "driver_version", "mig.mode.current",
    "pci.bus_id", "name",
)  # fmt: skip
CSV = ("--format=csv,noheader,nounits",)
APP_FIELDS = ("gpu_uuid", "pid", "process_name")
# Memory in use without a process to show (it runs outside our container, or has just ended):
# above this, the GPU is in use. Judgement: an idle data-centre GPU shows 0 to 600 MiB (driver,
# ECC, persistence daemon).
IDLE_BYTES = 1024 * MIB
MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    sliced: in MIG mode, where CUDA sees slices of it instead.
    bus_id: PCI domain, bus and device, as the kernel log names it: 0000:3b:00.
    processes: those that hold its memory, with the host's pid, which a container may not see.
    """

    name: str
    index: int = 0
    uuid: str = ""
    memory_bytes: float | None = None
    used_bytes: float | None = None
    driver: str = ""
    sliced: bool = False
    bus_id: str = ""
    processes: tuple[str, ...] = ()

    def foreign(self, tolerated_bytes: float = 0.0) -> str | None:
        """A description of the foreign process that uses it; None when it is idle.

        tolerated_bytes: memory that others may hold without being in the way.
        """
        if tolerated_bytes and self.used_bytes is not None and self.used_bytes <= tolerated_bytes:
            return None
        if self.processes:
            return ", ".join(self.processes)
        if self.used_bytes is not None and self.used_bytes > IDLE_BYTES:
            return f"an unseen process with {self.used_bytes / MIB:,.0f} MiB"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The GPUs that were found. problem: nvidia-smi's own message if there are none."""

    gpus: tuple[Gpu, ...]
    problem: str | None = None


Ask = Callable[[Sequence[str]], str]


def ask_smi(arguments: Sequence[str]) -> str:
    """The answer of nvidia-smi. Raises OSError if there is none, RuntimeError with its message."""
    try:
        done = told_by(["nvidia-smi", *arguments], SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi did not answer within {SMI_SECONDS:g} s") from None
    if done.returncode:
        message = " ".join((done.stdout + done.stderr).split())
        raise RuntimeError(message or f"nvidia-smi ended with {done.returncode}")
    return done.stdout


def survey(ask: Ask = ask_smi) -> Survey:
    """The GPUs of this machine with their processes."""
    try:
        gpus = parse_gpus(ask([f"--query-gpu={','.join(GPU_FIELDS)}", *CSV]))
        apps = parse_apps(ask([f"--query-compute-apps={','.join(APP_FIELDS)}", *CSV]))
    except OSError:
        return Survey(gpus=(), problem="nvidia-smi is not installed")
    except RuntimeError as error:
        return Survey(gpus=(), problem=str(error))
    users = {gpu.uuid: tuple(one for uuid, one in apps if uuid == gpu.uuid) for gpu in gpus}
    return Survey(gpus=tuple(replace(gpu, processes=users[gpu.uuid]) for gpu in gpus))


def others_on(gpus: Iterable[Gpu], tolerated_bytes: float = 0.0) -> str:
    """Users of these GPUs, in one line; empty if there are none."""
    users = ((gpu.index, gpu.foreign(tolerated_bytes)) for gpu in gpus)
    return "; ".join(f"GPU {index} is used by {user}" for index, user in users if user)


def visible(seen: Survey, environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Whole GPUs of those in CUDA_VISIBLE_DEVICES. environment: where it is; None is ours."""
    whole = tuple(gpu for gpu in seen.gpus if not gpu.sliced)
    allowed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return whole
    names = [name.strip() for name in allowed.split(",")]
    return tuple(
        gpu
        for gpu in whole
        if str(gpu.index) in names or any(name and gpu.uuid.startswith(name) for name in names)
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parses the answer to GPU_FIELDS; skips lines of another shape (warnings)."""
    return tuple(
        Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            memory_bytes=_mib(total),
            used_bytes=_mib(used),
            driver=driver,
            sliced=mig == "Enabled",
            bus_id=bus.lower().rpartition(".")[0][-len("0000:00:00") :],
        )
        for index, uuid, total, used, driver, mig, bus, name in _rows(text, GPU_FIELDS, "index")
    )


def parse_apps(text: str) -> tuple[tuple[str, str], ...]:
    """(GPU's uuid, process) from the answer to APP_FIELDS, whose last may hold commas."""
    rows = _rows(text, APP_FIELDS, "pid")
    return tuple((uuid, f"pid {pid} ({name})") for uuid, pid, name in rows)


def _rows(text: str, fields: Sequence[str], number: str) -> Iterator[list[str]]:
    """The cells of each line that has these fields and, in one of them, a whole number."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        if len(cells) == len(fields) and cells[fields.index(number)].isdigit():
            yield cells


def _mib(text: str) -> float | None:
    """Bytes from a number of MiB; None for "[N/A]" and similar."""
    try:
        return float(text) * MIB
    except ValueError:
        return None


def is_same_gpu(spec: GpuSpec, gpu: Gpu) -> bool:
    """Whether a GPU may be the catalogue's: by generation, form, and memory within a tenth."""
    words = spec.name.split("-")
    said = gpu.name.lower()
    model = f"{words[0]} {words[1]}" if words[0] == "rtx" and len(words) > 1 else words[0]
    if re.search(rf"\b{re.escape(model)}\b", said) is None:
        return False
    # the driver's names of SXM parts often leave the form out
    if any((form in words) != (form in said) for form in ("pcie", "nvl")):
        return False
    if gpu.memory_bytes is None:
        return True
    return abs(gpu.memory_bytes / spec.memory_bytes - 1.0) <= MEMORY_TOLERANCE
