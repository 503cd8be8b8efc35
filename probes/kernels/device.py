"""What the numbers of a micro-probe hold for: versions from torch, the state of the GPU from nvidia-smi."""

import platform
import subprocess
from typing import Any

import torch

from planner.units import MEGA
from probes.protocol import Environment

SMI_SECONDS = 10.0
FIELDS = ("driver_version", "clocks.sm", "power.draw", "clocks_throttle_reasons.active")
# nvml.h: hardware slowdown, software and hardware thermal slowdown; the power cap is a GPU's ordinary life
THROTTLED = 0x08 | 0x20 | 0x40


def environment(device: torch.device) -> Environment:
    """Versions, and clocks and power of this moment; what cannot be asked is None."""
    python = platform.python_version()
    if device.type != "cuda":
        return Environment(python=python, torch=torch.__version__)
    properties = torch.cuda.get_device_properties(device)
    driver, clock, power, reasons = _asked(str(getattr(properties, "uuid", "")))
    number = _number(clock)
    nccl: Any = torch.cuda.nccl.version
    return Environment(
        python=python, torch=torch.__version__, cuda=torch.version.cuda, nccl=".".join(map(str, nccl())),
        driver=driver, gpu_name=properties.name, sm_clock_hertz=None if number is None else number * MEGA, power_watts=_number(power),
        throttled=None if reasons is None else bool(int(reasons, 16) & THROTTLED),
    )  # fmt: skip


def _asked(uuid: str) -> tuple[str | None, str | None, str | None, str | None]:
    wanted = ["-i", f"GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    try:
        done = subprocess.run(
            ["nvidia-smi", *wanted, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=SMI_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None, None, None, None
    return parse_state(done.stdout if done.returncode == 0 else "")


def parse_state(text: str) -> tuple[str | None, str | None, str | None, str | None]:
    """(driver, SM clock in MHz, watts, throttle reasons as a hexadecimal number) of the first GPU listed."""
    cells = [cell.strip() for cell in text.splitlines()[0].split(",")] if text.strip() else []
    if len(cells) != len(FIELDS):
        return None, None, None, None
    driver, clock, power, reasons = (None if cell.startswith("[") or cell == "N/A" else cell for cell in cells)
    return driver, clock, power, reasons if reasons is not None and reasons.startswith("0x") else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
