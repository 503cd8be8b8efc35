"""Numbers as text: one formatter a quantity, "-" where there is none."""

from planner.specs.estimate import Estimate
from planner.units import format_bytes, format_count, format_seconds

NONE = "-"
RARE = 0.001


def rate(value: float | None) -> str:
    """Tokens a second: three or more significant digits, thousands apart."""
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
    """A probability as percent; small ones as a bound."""
    if value is None:
        return NONE
    return "under 0.1%" if value < RARE else f"{value:.1%}"


def parameters(total: int | None, active: int | None) -> str:
    """Parameters in brackets: " (70.6B parameters)", " (671B parameters, 37.6B active)"."""
    if total is None:
        return ""
    few = f", {format_count(active)} active" if active is not None and active < total else ""
    return f" ({format_count(total)} parameters{few})"


def rate_interval(estimate: Estimate) -> str:
    """The interval of tokens a second a GPU, from that of the step: "1,100 to 1,300, 90%"."""
    rate_now, step, interval = (
        estimate.tokens_per_second_per_gpu,
        estimate.step_seconds,
        estimate.interval,
    )
    if rate_now is None or step is None or interval is None:
        return ""
    fastest, slowest = interval.step_seconds
    return (
        f"{rate(rate_now * step / slowest)} to {rate(rate_now * step / fastest)} with "
        f"{interval.coverage:.0%} coverage"
    )


def interval_of(pair: tuple[float, float] | None, shown: str) -> str:
    """Both ends of an interval, "lo to hi". shown: "seconds" or "bytes"."""
    if pair is None:
        return ""
    words = seconds if shown == "seconds" else size
    return f"{words(pair[0])} to {words(pair[1])}"
