"""Kernels to time, and how they are timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARMUP_RUNS = 3
LEAST_RUNS, MOST_RUNS = 5, 100
# GPU clock cycles to sleep for each run to come, about a tenth of a millisecond. The launches get
# ahead in this time, so that the events time only the kernels.
SLEEP_CYCLES = 200_000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


class Unavailable(Exception):
    """The device or the installed torch has no such kernel; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A kernel with its operands.

    run: runs it once, in place or into new memory.
    flops, moved_bytes: of one run, by the shape.
    """

    run: Callable[[], object]
    flops: float = 0.0
    moved_bytes: float = 0.0


def dtype_of(name: str) -> torch.dtype:
    """Dtype of unquantised operands. Raises Unavailable."""
    if name not in DTYPES:
        raise Unavailable(f"{name} has no kernel of this kind in torch")
    return DTYPES[name]


def random(*sizes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Operands with the spread of real ones: constant data draws less power, so it looks faster."""
    drawn = dtype if dtype.itemsize > 1 else torch.bfloat16
    return torch.randn(*sizes, device=device, dtype=drawn).to(dtype)


def warm_up(run: Callable[[], object], device: torch.device) -> float:
    """Runs until the kernels are chosen. Returns the seconds of one run, by the host's clock."""
    for _ in range(WARMUP_RUNS):
        run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-7)


def num_runs(once_seconds: float, budget_seconds: float) -> int:
    """How many runs to time: as many as fit the budget, within bounds."""
    return max(LEAST_RUNS, min(MOST_RUNS, int(budget_seconds / once_seconds)))


def time_runs(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
    return _on_gpu(run, count) if device.type == "cuda" else _on_host(run, count)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_gpu(run: Callable[[], object], count: int) -> list[float]:
    event: Any = torch.cuda.Event
    sleep: Any = torch.cuda._sleep
    marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
    sleep(SLEEP_CYCLES * count)
    for before, after in marks:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in marks]


def _on_host(run: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found
