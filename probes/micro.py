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
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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
        kernel = kernels.prepared(shape, self.device)
        once = warm_up(kernel.run, self.device) if kernel is not None else 1.0
        count = num_runs(once, self.each_seconds)
        if shape.between_ranks:
            count = int(self._agreed(float(count)))
        each = time_runs(kernel.run, self.device, count) if kernel is not None else [0.0]
        seconds = statistics.median(each)
        if shape.between_ranks:
            seconds = self._slowest(seconds)
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

    def _agreed(self, number: float) -> float:
        """Rank 0's number on every rank."""
        held = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.broadcast(held, 0)
        return float(held.item())

    def _slowest(self, seconds: float) -> float:
        held = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return float(held.item())

    def goes_on(self, until: float) -> bool:
        """Whether there is time for another shape, by rank 0's clock."""
        here = time.monotonic() < until
        return bool(self._agreed(float(here))) if dist.is_initialized() else here

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_all(
    bench: Bench, shapes: Sequence[KernelShape], out: IO[str], total_seconds: float
) -> int:
    """Measures as many shapes as the time allows; returns how many. Only rank 0 writes lines."""
    started, until = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        time.monotonic() + total_seconds,
    )
    here = environment(bench.device)
    software = here.software()
    _write(out, {"kind": "environment", "at": started, **here.model_dump(exclude_none=True)}, bench)
    done = 0
    for shape in shapes:
        if not bench.goes_on(until):
            break
        _write(out, {**bench.measure(shape), "software": software}, bench)
        done += 1
    left = [shape.as_dict() for shape in shapes[done:]]
    end = environment(bench.device).model_dump(exclude_none=True)
    _write(out, {"kind": "end", "measured": done, "not_reached": left, **end}, bench)
    return done


class KernelProgram:
    """Times the kernels of a probe's task on one rank, as `planner.probes.worker` runs it.

    Raises SpecError if the task's device does not exist here.
    """

    def __init__(self, task: ProbeTask) -> None:
        check_device(task.device)
        self.task, self.device = task, join(task.device)

    def measure(self) -> MeasuredRun:
        """Times what fits into half the time limit; the rest is for start and end."""
        lines, bench = io.StringIO(), Bench(device=self.device, each_seconds=PROBE_EACH_SECONDS)
        measure_all(
            bench, self.task.shapes(), lines, min(TOTAL_SECONDS, self.task.time_limit_seconds / 2.0)
        )
        written = map(json.loads, lines.getvalue().splitlines())
        rows = [row for row in written if row["kind"] in kernels.KERNELS]
        return MeasuredRun(timings=rows)

    def environment(self) -> Environment:
        return environment(self.device)

    def notes(self) -> list[str]:
        """Notes for the reader of the result: none."""
        return []

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def environment(device: torch.device) -> Environment:
    """Versions, and the GPU's current clock, power and throttling; no trainer is part of it."""
    sample = Sample(device)
    sample.take()
    return describe(device, sample).model_copy(update={"trainer_version": None})


def _write(out: IO[str], row: dict[str, Any], bench: Bench) -> None:
    if bench.rank == 0:
        out.write(json.dumps(row) + "\n")
        out.flush()


def read_shapes(text: str) -> list[KernelShape]:
    """Parses shapes, one a line. Raises ValueError that names the line."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(KernelShape.from_dict(json.loads(line)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"line {number} is no shape ({error}); write kind, name, dtype and sizes"
            ) from None
    return found


def join(device_type: str) -> torch.device:
    """Returns the device of this process, and joins the process group if torchrun started it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cuda", local) if device_type == "cuda" else torch.device("cpu")
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(
            "nccl" if here.type == "cuda" else "gloo",
            device_id=here if here.type == "cuda" else None,
        )
    return here


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code is 0 when something was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="wall-clock seconds for all shapes"
    )
    parser.add_argument("--each-seconds", type=float, default=EACH_SECONDS)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(arguments)
    try:
        shapes = read_shapes(options.shapes.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.shapes}: {error}\n")
        return 2
    bench = Bench(device=join(options.device), each_seconds=options.each_seconds)
    with (options.out if bench.rank == 0 else Path(os.devnull)).open("a", encoding="utf-8") as out:
        done = measure_all(bench, shapes, out, options.seconds)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
