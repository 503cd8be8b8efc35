"""The budget of a sweep's run: its use so far, and the time that it leaves to a probe."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from planner.api.jobs.probes import RequestedProbe
from planner.api.jobs.schedule import is_within
from planner.specs.sweep import SweepSpec


@dataclass(slots=True)
class SpentByRun:
    """Use of a run so far. most_at_once: probes that ran side by side."""

    probes: int = 0
    gpu_seconds: float = 0.0
    most_at_once: int = 0
    retried: int = 0

    def limited(
        self,
        wanted: RequestedProbe,
        spec: SweepSpec,
        running: Iterable[RequestedProbe],
        now: Callable[[], datetime],
    ) -> RequestedProbe | str:
        """The probe with the time that the budget leaves it; why there is none.

        The last of a budget has what is left. Beside others a probe starts only where its whole
        time limit is covered, so that the run never spends more than its budget.
        """
        budget, limit = spec.budget, wanted.request.time_limit_seconds
        hours, zone = budget.hours, spec.time_zone
        if hours is not None and not is_within(hours, now(), zone):
            return f"outside the hours of the budget, {hours} {zone}"
        promised = [one.request.time_limit_seconds * one.devices for one in running]
        left = budget.max_gpu_seconds - self.gpu_seconds - sum(promised)
        spent = self.probes >= budget.max_probes or left <= 0
        if spent or (promised and left < limit * wanted.devices):
            return "the budget is spent"
        limit = min(limit, max(1.0, left / wanted.devices))
        own = wanted.request.model_copy(update={"time_limit_seconds": limit})
        return replace(wanted, request=own)
