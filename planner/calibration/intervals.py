"""How uncertain a price is: intervals, and the probability of running out of memory.

The calibration's posterior is pushed through the cost model. The logarithm of the step time of
layout n is

    mean_n + sum_d loading_dn z_d + shared + own_n

with z, shared and own normal: what the posterior moves along its D principal directions, what all
runs on one cluster have in common, and what is a layout's own.
Letters: N layouts, D directions, W draws.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.calibration.basis import widening
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.machine.knobs import kernels_at, profile_at
from planner.cost.machine.profile import Profile
from planner.cost.price import Pricer, Prices
from planner.specs.cluster import ClusterSpec

TWO_SIDED_90 = 1.6448536269514722  # 95th percentile of the standard normal
# Judgements of how much a run on fewer GPUs shows about a layout, checked on laws other than ours
# (`benchmarks/replay.py --proxy-runs`). What a larger world adds is mostly exposed communication,
# which the model predicts worse than whole steps. Some of it is hidden on paper but not in truth,
# mostly if one node stands for several.
ADDED_SD = 0.3
OTHER_SIZE_SD = 0.008
ONE_NODE_SD = 0.03

Pair = tuple[FloatColumn, FloatColumn]


def proxy_run_sd(whole: ClusterSpec, small: ClusterSpec, added: float) -> float:
    """Relative standard deviation of a step extrapolated from a smaller world.

    Run-to-run noise is left out.
    added: share of the step that the small run does not show.
    """
    alone = ONE_NODE_SD if small.num_nodes == 1 < whole.num_nodes else 0.0
    return float(np.linalg.norm([ADDED_SD * added, OTHER_SIZE_SD, alone]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """Deviations of log step seconds.

    loadings (D, N): along each direction.
    own_sd (N,): of each layout's own error.
    shared_sd: one number for all layouts of a job.
    """

    loadings: FloatColumn
    own_sd: FloatColumn
    shared_sd: float

    @property
    def sd(self) -> FloatColumn:
        """Standard deviation of each layout by itself, (N,)."""
        return np.asarray(
            np.sqrt((self.loadings**2).sum(axis=0) + self.own_sd**2 + self.shared_sd**2)
        )

    @classmethod
    def join(cls, parts: "Sequence[TimeSpread]") -> "TimeSpread":
        """The spread of all layouts of these parts, in order.

        The parts share their directions and what is common.
        """
        loadings, own = (
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in ("loadings", "own_sd")
        )
        return cls(loadings=loadings, own_sd=own, shared_sd=max(part.shared_sd for part in parts))

    def take(self, places: list[int]) -> "TimeSpread":
        """The spread of some layouts."""
        return TimeSpread(
            loadings=self.loadings[:, places], own_sd=self.own_sd[places], shared_sd=self.shared_sd
        )


def time_spread(pricer: Pricer, batch: LayoutBatch, prices: Prices) -> TimeSpread:
    """Pushes the posterior of the pricer's calibration through the model.

    It moves one principal direction at a time, by one deviation. A layout's own error is wider
    where it uses what was not measured (`basis.widening`).
    """
    trainer, calibration = pricer.training.trainer, pricer.calibration
    _, rest = calibration.directions(trainer, pricer.cluster.gpu.family)
    base, moved = np.log(prices.step_seconds), list(moved_pricers(pricer))
    loadings = np.zeros((len(moved), len(batch)))
    for index, one in enumerate(moved):
        loadings[index] = np.log(one.price(batch).step_seconds) - base
    stretch = calibration.stretch(trainer)
    own = stretch * np.sqrt(rest + calibration.run_sd**2)
    doubt = widening(batch, pricer, calibration)
    return TimeSpread(
        loadings=stretch * loadings, own_sd=own * doubt, shared_sd=stretch * calibration.group_sd
    )


def moved_pricers(pricer: Pricer) -> Iterator[Pricer]:
    """Yields the pricer moved by one deviation along each of the D principal directions.

    The directions are those of its calibration's posterior.
    """
    trainer, gpu, calibration = pricer.training.trainer, pricer.cluster.gpu, pricer.calibration
    centre = calibration.shift(trainer, gpu.family)
    for direction in calibration.directions(trainer, gpu.family)[0]:
        profile, kernels = (
            profile_at(trainer, centre + direction),
            kernels_at(gpu, centre + direction),
        )
        yield Pricer.build(
            pricer.model,
            pricer.cluster,
            pricer.training,
            calibration,
            profile=profile,
            kernels=kernels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """90% intervals as (low, high) columns (N,), and P(device bytes > limit) (N,) for two limits.

    oom_probability: what a plan may use of the GPU.
    oom_probability_full_card: all of it.
    """

    step_seconds: Pair
    peak_allocated_bytes: Pair
    peak_reserved_bytes: Pair
    oom_probability: FloatColumn
    oom_probability_full_card: FloatColumn


def spread(pricer: Pricer, batch: LayoutBatch, prices: Prices, step_seconds: FloatColumn) -> Spread:
    """Intervals of N prices."""

    def around(values: FloatColumn, sd: FloatColumn | float) -> Pair:
        return values * np.exp(-TWO_SIDED_90 * sd), values * np.exp(TWO_SIDED_90 * sd)

    return Spread(
        step_seconds=around(step_seconds, time_spread(pricer, batch, prices).sd),
        peak_allocated_bytes=around(
            prices.peak_allocated_bytes,
            memory_deviation(pricer.profile, prices.peak_allocated_bytes),
        ),
        peak_reserved_bytes=around(
            prices.peak_reserved_bytes, memory_deviation(pricer.profile, prices.peak_reserved_bytes)
        ),
        oom_probability=oom_probability(pricer.profile, pricer.cluster, prices.least_device_bytes),
        oom_probability_full_card=exceeds(
            pricer.profile, pricer.cluster.card_memory_bytes, prices.least_device_bytes
        ),
    )


def oom_probability(
    profile: Profile, cluster: ClusterSpec, device_bytes: FloatColumn
) -> FloatColumn:
    """P(device bytes > what a plan may use), (N,)."""
    return exceeds(profile, cluster.usable_memory_bytes, device_bytes)


def exceeds(profile: Profile, limit_bytes: float, device_bytes: FloatColumn) -> FloatColumn:
    """P(device bytes x e^(sd z) > limit), z standard normal, (N,).

    It is the upper tail at log(limit / device) / sd.
    """
    return upper_tail(np.log(limit_bytes / device_bytes) / memory_deviation(profile, device_bytes))


def memory_deviation(profile: Profile, num_bytes: FloatColumn) -> FloatColumn:
    """Standard deviation of log measured over predicted bytes, (N,).

    It has parts that grow with the peak and a part that does not.
    """
    return np.hypot(
        np.hypot(profile.memory_sd, profile.memory_extra_sd),
        fixed_deviation(profile.memory_sd_bytes, num_bytes),
    )


def fixed_deviation(sd_bytes: float, num_bytes: FloatColumn | float) -> FloatColumn:
    """Standard deviation of log bytes with the 95th percentile of num_bytes + sd_bytes Z.

    It is log(1 + z sd / num) / z, about sd / num.
    """
    return np.asarray(np.log1p(TWO_SIDED_90 * sd_bytes / num_bytes) / TWO_SIDED_90)


def upper_tail(z: FloatColumn) -> FloatColumn:
    """P(Z > z) of a standard normal, clipped to [0, 1].

    Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7).
    """
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    polynomial = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    tail = 0.5 * polynomial * np.exp(-x * x)
    return np.asarray(np.clip(np.where(z >= 0, tail, 1.0 - tail), 0.0, 1.0))
