"""How far a run of a sweep is: what the terminal, the page and the events show of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a run is.

    layouts, num_layouts: measured or given up, of all; of jobs not yet planned as many are counted
        as the sweep asks for.
    jobs, num_jobs: planned so far, of all.
    running: probes that run now. failures: layouts that gave no step time.
    probes, gpu_seconds: spent, of max_probes and max_gpu_seconds.
    quarantined: hosts that the run found bad.
    """

    layouts: int
    num_layouts: int
    jobs: int
    num_jobs: int
    running: int
    failures: int
    probes: int
    max_probes: int
    gpu_seconds: float
    max_gpu_seconds: float
    quarantined: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "quarantined": list(self.quarantined)}


def standing_line(body: Mapping[str, Any]) -> str:
    """`Standing.as_dict` in a line."""
    quarantined = body["quarantined"]
    out = f", {counted(len(quarantined), 'host')} out" if quarantined else ""
    done = f"{body['layouts']} of {counted(body['num_layouts'], 'layout')}"
    return (
        f"{done}, {body['running']} running, "
        f"{counted(body['failures'], 'failure')}, {body['gpu_seconds']:.0f} of "
        f"{body['max_gpu_seconds']:.0f} GPU-seconds{out}"
    )
