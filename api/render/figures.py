"""Numbers as text: one formatter a quantity, "-" where there is none."""

import math
from collections.abc import Callable, Iterator

from planner.specs.estimate import Estimate
from planner.specs.plan import MOST_RISK, Plan
from planner.units import format_bytes, format_count, format_risk, format_seconds

NONE = "-"


def rate(value: float | None) -> str:
    """Tokens a second: three or more significant digits, grouped by thousands."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)


def size(value: float | None) -> str:
    return NONE if value is None else format_bytes(value)


def percent(value: float | None) -> str:
    """A fraction of one as percent, one digit behind the point."""
    return NONE if value is None else f"{value:.1%}"


def risk(value: float | None) -> str:
    return NONE if value is None else format_risk(value)


def parameters(total: int | None, active: int | None) -> str:
    """Parameters in brackets: " (70.6B parameters)", " (671B parameters, 37.6B active)"."""
    if total is None:
        return ""
    few = f", {format_count(active)} active" if active is not None and active < total else ""
    return f" ({format_count(total)} parameters{few})"


def rate_interval(estimate: Estimate) -> str:
    """Interval of tokens/s/GPU that follows from the step's: "1,100 to 1,300, 90%"."""
    now, step, found = estimate.tokens_per_second_per_gpu, estimate.step_seconds, estimate.interval
    if now is None or step is None or found is None:
        return ""
    slowest, fastest = (rate(now * step / one) for one in reversed(found.step_seconds))
    return f"{slowest} to {fastest} with {found.coverage:.0%} coverage"


def interval_of(pair: tuple[float, float] | None, words: Callable[[float], str]) -> str:
    """Both ends of an interval, "lo to hi". words: `seconds` or `size`."""
    return "" if pair is None else f"{words(pair[0])} to {words(pair[1])}"


def too_risky(plan: Plan) -> Iterator[str]:
    """Names the layouts that are faster than number 1 and too likely to run out of memory."""
    first, *others = plan.ranked
    most = max(MOST_RISK, first.estimate.oom_probability or 0.0)
    found = ", ".join(
        f"{one.rank} ({risk(likely)})"
        for one in others
        if (likely := one.estimate.oom_probability or 0.0) > most
        and (one.shown.step_seconds or math.inf) < (first.shown.step_seconds or 0.0)
    )
    if found and first.measurement is None:
        yield f"faster, but out of memory in over {MOST_RISK:.0%} of runs, so not first: {found}"
