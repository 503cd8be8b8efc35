"""How far a run of a sweep is: what the terminal, the page and the events show of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from planner.api.jobs.leases import Claimed, Observer
from planner.api.storage.job_records import TaskRecord
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
    quarantined: Sequence[str] = ()


def standing_line(body: Mapping[str, Any]) -> str:
    """A standing in a line."""
    quarantined = body["quarantined"]
    out = f", {counted(len(quarantined), 'host')} out" if quarantined else ""
    done = f"{body['layouts']} of {counted(body['num_layouts'], 'layout')}"
    return (
        f"{done}, {body['running']} running, "
        f"{counted(body['failures'], 'failure')}, {body['gpu_seconds']:.0f} of "
        f"{body['max_gpu_seconds']:.0f} GPU-seconds{out}"
    )


@dataclass
class SweepProgress:
    """Reports messages and standings, and knows when the next is due.

    standing: how far the run is now.
    """

    claimed: Claimed[TaskRecord]
    observer: Observer
    standing: Callable[[], Standing]
    _last: dict[str, float] = field(default_factory=dict)

    def report(self, message: str, *, passing: bool = False) -> None:
        """To all who follow. passing: only how far it is; nothing ended."""
        self.claimed.columns["standing"] = standing = asdict(self.standing())
        if message:
            self.claimed.report(message)
        event = "standing" if passing else "sweep"
        self.observer.on_event({"event": event, "message": message, **standing})
        self._last["shown"] = time.monotonic()

    def is_time(self, what: str, seconds: float) -> bool:
        """Whether the interval has passed since the last call that returned true."""
        now = time.monotonic()
        if now - self._last.get(what, -seconds) < seconds:
            return False
        self._last[what] = now
        return True
