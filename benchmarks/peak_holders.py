"""One rank's memory at its peak, tensor by tensor, with fake tensors and no GPU.

    python benchmarks/peak_holders.py fake/rank/70b-on-256/0 [--gpu h100-sxm-80gb] [--rows 20]

The cases are those of `gpu_survey.py --fake`. It also prints the cost model's parts of the same
rank. Use it when `predicted_against_measured.py` shows a memory error.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.survey_grid import Case, fake_cases
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.probes.protocol import ProbeTask
from planner.probes.reference import optimizers, run
from planner.probes.reference.memory import Tracker
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer
from planner.units import GIB

# a new peak is recorded when it exceeds the last by this; recording every byte would take hours
GROWTH = 1.0005
OURS, TORCHS = "probes/reference", ("_fully_shard", "checkpoint", "parallel/loss")
Label = tuple[str, tuple[int, ...], str, str]


class Holders(Tracker):
    """A tracker that records the origin of each storage that is live at the peak.

    The origin is its operation, its shape and its caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: Counter[Label] = Counter()
        self.number: Counter[Label] = Counter()
        self._labels: dict[int, Label] = {}
        self._operation, self._noted = "", 0

    def reset(self) -> None:
        super().reset()
        self._noted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operation = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tensor: torch.Tensor) -> None:
        key = id(tensor.untyped_storage())
        if key not in self._held:
            self._labels[key] = (
                self._operation,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                caller(),
            )
        super()._see(tensor)

    def _count(self, key: int, reference: Any, size: int) -> None:
        super()._count(key, reference, size)
        if self.live == self.peak and self.peak > self._noted * GROWTH:
            self._noted = self.peak
            self.at_peak.clear()
            self.number.clear()
            for held, (_, num_bytes) in self._held.items():
                self.at_peak[self._labels[held]] += num_bytes
                self.number[self._labels[held]] += 1


def caller() -> str:
    """The innermost informative frame: ours, or torch's sharding, recomputation or loss.

    Empty inside autograd.
    """
    frame = sys._getframe(3)
    while frame is not None:
        name = frame.f_code.co_filename
        if (OURS in name and not name.endswith("memory.py")) or any(
            part in name for part in TORCHS
        ):
            return f"{Path(name).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def track(case: Case) -> Holders:
    """Tracks one steady step of the case's rank."""
    task = ProbeTask(
        id="peak", job=case.job, device="cpu", emulate_rank=case.rank, fake_tensors=True
    )
    recipe = ReferenceRecipe.of(task)
    run.enter_world(recipe)
    trainer = Trainer(recipe, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), Holders() as holders:
        trainer.materialise()
        optimizers.prime(trainer.updates.optimizers)
        holders.reset()
        trainer.step(0)
    return holders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case")
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--rows", type=int, default=20)
    options = parser.parse_args()
    case = next((case for case in fake_cases(options.gpu) if case.id == options.case), None)
    if case is None:
        raise SystemExit(
            f"{options.case} is no case; see gpu_survey.py --fake {options.gpu} --list"
        )
    holders = track(case)
    print(f"{case.id}: peak {holders.peak / GIB:.2f} GiB")
    for label, num_bytes in holders.at_peak.most_common(options.rows):
        operation, shape, dtype, place = label
        print(
            f"{num_bytes / GIB:8.2f} GiB  {holders.number[label]:4d} x {list(shape)} {dtype}  "
            f"{operation}  {place}"
        )
    memory = estimate_job(read_job(case.job)).memory
    if memory is not None:
        parts = memory.stages[case.labels.get("pipeline_rank", 0)].model_dump()
        print(
            "predicted: "
            + ", ".join(
                f"{name.removesuffix('_bytes')} {value / GIB:.2f}" for name, value in parts.items()
            )
        )


if __name__ == "__main__":
    main()
