"""The environment of a measurement: versions, device, clocks, power, throttling."""

import platform
import subprocess
from typing import Any

import torch

from probes.protocol import Environment
from probes.reference import VERSION

MEGA = 1e6
_QUERY = ("driver_version", "clocks.sm", "power.draw", "clocks_throttle_reasons.active")
# NVML nvmlClocksEventReasons: HW slowdown, SW thermal, HW thermal, HW power brake. Power capping at
# the limit is normal.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80


def describe(device: torch.device, sample: "Sample | None" = None) -> Environment:
    """Versions of everything, with what a sample under load read from the GPU."""
    base: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainer_version": f"reference {VERSION}",
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()
        base |= {
            "cuda": torch.version.cuda,
            "gpu_name": torch.cuda.get_device_name(device),
            "nccl": ".".join(str(part) for part in nccl) if isinstance(nccl, tuple) else str(nccl),
        }
    return Environment(**base, **(sample.values if sample is not None else {}))


class Sample:
    """The last reading of the GPU's driver, clock, power and throttling.

    Empty if neither pynvml nor nvidia-smi answers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.values: dict[str, Any] = {}

    def take(self) -> None:
        """Reads once. Call while the GPU is busy."""
        if self._device.type != "cuda":
            return
        try:
            self.values = self._by_nvml()
        # pynvml raises its own errors; a measurement without clocks is still valid
        except Exception:
            self.values = self._by_command()

    def _by_nvml(self) -> dict[str, Any]:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(self._device))
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            driver = pynvml.nvmlSystemGetDriverVersion()
            return {
                "driver": driver.decode() if isinstance(driver, bytes) else driver,
                "sm_clock_hertz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                * MEGA,
                "power_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "throttled": bool(reasons & _THROTTLED),
            }
        finally:
            pynvml.nvmlShutdown()

    def _by_command(self) -> dict[str, Any]:
        command = [
            "nvidia-smi",
            f"--query-gpu={','.join(_QUERY)}",
            "--format=csv,noheader,nounits",
            "-i",
            _uuid(self._device),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        return parse_query(done.stdout)


def parse_query(text: str) -> dict[str, Any]:
    """Parses one line of nvidia-smi's answer to `_QUERY`; skips unknown values ([N/A])."""
    driver, clock, power, reasons = (
        cell.strip() for cell in text.strip().splitlines()[0].split(",")
    )
    values: dict[str, Any] = {"driver": driver}
    if _is_number(clock):
        values["sm_clock_hertz"] = float(clock) * MEGA
    if _is_number(power):
        values["power_watts"] = float(power)
    if reasons.startswith("0x"):
        values["throttled"] = bool(int(reasons, 16) & _THROTTLED)
    return values


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
