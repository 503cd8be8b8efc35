"""Progress of a run, for those who follow it and for those who look it up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.api.jobs.leases import Claimed
from planner.api.jobs.observer import Observer
from planner.api.jobs.standing import Standing
from planner.api.storage.job_records import TaskEnd, TaskRecord


@dataclass
class SweepProgress:
    """Reports messages and standings, and knows when the next is due.

    standing: how far the run is now.
    """

    claimed: Claimed[TaskRecord, TaskEnd]
    observer: Observer
    standing: Callable[[], Standing]
    _last: dict[str, float] = field(default_factory=dict)

    def report(self, message: str, *, passing: bool = False) -> None:
        """To all who follow. passing: only how far it is; nothing ended."""
        self.claimed.columns["standing"] = standing = self.standing().as_dict()
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
