"""The environment of a measurement: versions, device, clocks, power, throttling."""

import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from planner.errors import fault
from planner.probes.packages import ALLOCATOR, told_by
from planner.probes.protocol import Environment
from planner.probes.reference import VERSION

MEGA = 1e6
# NVML nvmlClocksEventReasons: HW slowdown, SW thermal, HW thermal, HW power brake. Power capping at
# the limit is normal.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
READ_SECONDS, ASK_SECONDS = 0.1, 10.0
THROTTLED_SHARE = 0.05  # of the readings; judgement: a reason that shows once moves no median
# nvidia-smi's name of a figure -> our field, and how it is read
_QUERY: dict[str, tuple[str, Callable[[str], Any]]] = {
    "driver_version": ("driver", str),
    "clocks.sm": ("sm_clock_hertz", lambda cell: float(cell) * MEGA),
    "power.draw": ("power_watts", float),
    "clocks_throttle_reasons.active": ("throttled", lambda cell: bool(int(cell, 16) & _THROTTLED)),
}
# hertz, watts, degrees Celsius, throttled, programs that compute
Reading = tuple[float, float, float, bool, int]


def check_device(device: str) -> None:
    """Raises SpecError where this machine lacks it."""
    if device == "cuda" and not torch.cuda.is_available():
        remedy = "probe with device cpu, or install a CUDA build of torch"
        raise fault("device", device, "torch sees no GPU here", remedy)


def describe(device: torch.device, sample: "Sample | None" = None) -> Environment:
    """Versions of everything, with what a sample under load read from the GPU."""
    base: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainer_version": f"reference {VERSION}",
        "allocator": os.environ.get(ALLOCATOR[0]),
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
    """Readings of the GPU's clock, power, temperature and throttling while it works.

    A thread reads NVML ten times a second between `start` and `stop`; `values` sums them up. Where
    NVML does not answer, nvidia-smi is asked once, by `stop`, so that it never runs beside timed
    steps. Empty on a CPU, or if neither answers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._readings: list[Reading] = []
        self._others: dict[str, Any] = {}  # the driver; without readings what nvidia-smi says

    def take(self) -> None:
        self.start()
        self.stop()

    def start(self) -> None:
        if self._device.type != "cuda":
            return
        self._ended.clear()
        self._thread = threading.Thread(target=self._read, args=(_uuid(self._device),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends reading. Safe to call twice."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if not self._readings:
            self._others = self._by_command()

    @property
    def values(self) -> dict[str, Any]:
        """Fields of `Environment`: means, the highest temperature, what disturbed it."""
        if not self._readings:
            return self._others
        clocks, watts, celsius, throttled, programs = zip(*self._readings, strict=True)
        return self._others | {
            "sm_clock_hertz": statistics.fmean(clocks),
            "power_watts": statistics.fmean(watts),
            "temperature_celsius": max(celsius),
            "throttled": statistics.fmean(throttled) > THROTTLED_SHARE,
            "intruded": max(programs) > programs[0],
        }

    def _read(self, uuid: str) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            driver = pynvml.nvmlSystemGetDriverVersion()
            self._others = {"driver": driver.decode() if isinstance(driver, bytes) else driver}
            while True:
                self._readings.append(_reading(pynvml, handle))
                if self._ended.wait(READ_SECONDS):
                    break
            pynvml.nvmlShutdown()
        # pynvml raises its own errors; a measurement without clocks is still valid
        except Exception:
            return

    def _by_command(self) -> dict[str, Any]:
        query, form = f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"
        try:
            done = told_by(["nvidia-smi", query, form, "-i", _uuid(self._device)], ASK_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        return {} if done.returncode else parse_query(done.stdout)


def _reading(pynvml: Any, handle: Any) -> Reading:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return (
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * MEGA,
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        bool(reasons & _THROTTLED),
        len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def parse_query(text: str) -> dict[str, Any]:
    """Parses one line of nvidia-smi's answer to `_QUERY`; skips unknown values ([N/A])."""
    values: dict[str, Any] = {}
    for (name, read), cell in zip(_QUERY.values(), text.splitlines()[0].split(","), strict=True):
        with suppress(ValueError):
            values[name] = read(cell.strip())
    return values


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
