"""Times single kernels and collectives: `python -m planner.probes.micro --shapes FILE --out FILE`.

Collectives need the same command under torchrun.
The file of shapes has one JSON object a line, {"kind", "name", "dtype", "sizes"}
(`planner.calibration.kernels.KernelShape`), most valuable first. Shapes that no longer fit the time
are named at the end.
The file of results has one line a shape, with the median of its seconds, their spread, rates and
versions. Its first and last lines hold the environment. A kernel that runs out of memory or does
not exist here gets a line too.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.calibration.kernels import KernelShape
from planner.probes import kernels
from planner.probes.causes import is_foreign
from planner.probes.kernels.base import Prepared, Unavailable, num_runs, time_runs, warm_up
from planner.probes.protocol import Environment, MeasuredRun, ProbeTask
from planner.probes.reference.environment import Sample, check_device, describe

TOTAL_SECONDS, EACH_SECONDS = 60.0, 0.25
PROBE_EACH_SECONDS = 0.1  # in a study, where kernel timings are one of the fidelities
SHOWN = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where kernels are timed. each_seconds: how long each shape is timed."""

    device: torch.device
    each_seconds: float = EACH_SECONDS

    @property
    def rank(self) -> int:
        """The rank of this process among those that torchrun started."""
        return dist.get_rank() if dist.is_initialized() else 0

    def measure(self, shape: KernelShape) -> dict[str, Any]:
        """Measures one line of results, errors included. All processes call it together."""
        row = shape.as_dict()
        if self.rank and not shape.between_ranks:
            return row
        try:
            return row | self._timed(shape)
        except Unavailable as error:
            return row | {"status": "unavailable", "message": str(error)}
        except torch.OutOfMemoryError as error:
            status = "failed" if is_foreign(str(error)) else "oom"
            return row | {"status": status, "message": str(error)[:SHOWN]}
        except (RuntimeError, ValueError, TypeError) as error:
            return row | {"status": "failed", "message": f"{type(error).__name__}: {error}"[:SHOWN]}
        finally:
            self._free()

    def _timed(self, shape: KernelShape) -> dict[str, Any]:
        kernel = kernels.KERNELS[shape.kind](shape, self.device)
        once = warm_up(kernel.run, self.device) if kernel is not None else 1.0
        count = num_runs(once, self.each_seconds)
        if shape.between_ranks:
            count = int(self._largest(count))
        each = time_runs(kernel.run, self.device, count) if kernel is not None else [0.0]
        seconds = statistics.median(each)
        if shape.between_ranks:
            seconds = self._largest(seconds)
        assert kernel is not None or self.rank
        work = kernel or Prepared(run=lambda: None)
        return {
            "status": "ok",
            "seconds": seconds,
            "seconds_sd": statistics.pstdev(each),
            "runs": len(each),
            "flops_per_second": work.flops / seconds if work.flops else None,
            "bytes_per_second": work.moved_bytes / seconds,
        }

    def _largest(self, number: float) -> float:
        """The largest rank's number, on every rank."""
        held = torch.tensor([number], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return float(held.item())

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def rows(self, shapes: Sequence[KernelShape], total_seconds: float) -> Iterator[dict[str, Any]]:
        """Lines of results: the environment, as many shapes as the time allows, and the end."""
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        until = time.monotonic() + total_seconds
        here = environment(self.device)
        yield {"kind": "environment", "at": started, **here.model_dump(exclude_none=True)}
        left = list(shapes)
        while left and self._largest(time.monotonic() < until):
            yield {**self.measure(left.pop(0)), "software": here.software()}
        unmeasured = [shape.as_dict() for shape in left]
        end = environment(self.device).model_dump(exclude_none=True)
        done = len(shapes) - len(left)
        yield {"kind": "end", "measured": done, "not_reached": unmeasured, **end}


class KernelProgram:
    """Times the kernels of a probe's task on one rank, as `planner.probes.worker` runs it.

    Raises SpecError if the task's device does not exist here.
    """

    def __init__(self, task: ProbeTask) -> None:
        check_device(task.device)
        self.task, self.device = task, join(task.device)

    def measure(self) -> MeasuredRun:
        """Times what fits into half the time limit; the rest is for start and end."""
        bench = Bench(device=self.device, each_seconds=PROBE_EACH_SECONDS)
        seconds = min(TOTAL_SECONDS, self.task.time_limit_seconds / 2.0)
        _, *rows, _ = bench.rows(self.task.shapes(), seconds)
        return MeasuredRun(timings=rows)

    def environment(self) -> Environment:
        return environment(self.device)

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def environment(device: torch.device) -> Environment:
    """Versions, and the GPU's current clock, power and throttling; no trainer is part of it."""
    sample = Sample(device)
    sample.take()
    return describe(device, sample).model_copy(update={"trainer_version": None})


def read_shapes(text: str) -> list[KernelShape]:
    """Parses shapes, one a line. Raises ValueError that names the line."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(KernelShape.from_dict(json.loads(line)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            rule = f"line {number} is no shape ({error}); write kind, name, dtype and sizes"
            raise ValueError(rule) from None
    return found


def join(device_type: str) -> torch.device:
    """Returns the device of this process, and joins the process group if torchrun started it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cuda", local) if device_type == "cuda" else torch.device("cpu")
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_gpu = here.type == "cuda"
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, device_id=here if on_gpu else None)
    return here


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code is 0 when something was measured."""
    raw, here = argparse.RawDescriptionHelpFormatter, "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--shapes", type=Path, required=True)
    option("--out", type=Path, required=True)
    option("--seconds", type=float, default=TOTAL_SECONDS, help="wall-clock seconds for all shapes")
    option("--each-seconds", type=float, default=EACH_SECONDS)
    option("--device", choices=("cuda", "cpu"), default=here)
    options = parser.parse_args(arguments)
    try:
        shapes = read_shapes(options.shapes.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.shapes}: {error}\n")
        return 2
    bench = Bench(device=join(options.device), each_seconds=options.each_seconds)
    with (options.out if bench.rank == 0 else Path(os.devnull)).open("a", encoding="utf-8") as out:
        for row in bench.rows(shapes, options.seconds):
            out.write(json.dumps(row) + "\n")
            out.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if row["measured"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
