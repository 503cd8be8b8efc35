"""How sure a price is: intervals and the probability of running out of memory.

First form: measured over predicted is log-normal around one, with a spread per trainer that the profile states (the
standard deviation seen on runs that the profile was not fitted to). Letters: N layouts.
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn
from planner.cost.price import Prices
from planner.cost.profile import Profile
from planner.specs.cluster import ClusterSpec

TWO_SIDED_90 = 1.6448536269514722  # 95th percentile of the standard normal

Pair = tuple[FloatColumn, FloatColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """90% intervals as (low, high) columns (N,), and P(device bytes > usable) (N,)."""

    step_seconds: Pair
    peak_allocated_bytes: Pair
    peak_reserved_bytes: Pair
    oom_probability: FloatColumn


def spread(profile: Profile, cluster: ClusterSpec, prices: Prices, step_seconds: FloatColumn) -> Spread:
    """Intervals of N prices under this profile."""

    def around(values: FloatColumn, sd: float) -> Pair:
        return values * np.exp(-TWO_SIDED_90 * sd), values * np.exp(TWO_SIDED_90 * sd)

    return Spread(
        step_seconds=around(step_seconds, profile.time_sd),
        peak_allocated_bytes=around(prices.peak_allocated_bytes, profile.memory_sd),
        peak_reserved_bytes=around(prices.peak_reserved_bytes, profile.memory_sd),
        oom_probability=oom_probability(profile, cluster, prices.device_bytes),
    )


def oom_probability(profile: Profile, cluster: ClusterSpec, device_bytes: FloatColumn) -> FloatColumn:
    """P(device bytes x e^(sd z) > usable), z standard normal: the upper tail at log(usable / device) / sd."""
    distance = np.log(cluster.usable_memory_bytes / device_bytes) / profile.memory_sd
    return upper_tail(distance)


def upper_tail(z: FloatColumn) -> FloatColumn:
    """P(Z > z) of a standard normal, by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7), clipped to [0, 1]."""
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * polynomial * np.exp(-x * x)
    return np.asarray(np.clip(np.where(z >= 0, tail, 1.0 - tail), 0.0, 1.0))
