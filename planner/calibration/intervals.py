"""How uncertain a price is: intervals, and the probability of running out of memory.

The calibration's posterior is pushed through the cost model. The logarithm of the step time of
layout n is

    mean_n + sum_d loading_dn z_d + own_n

What the posterior moves along its principal directions, and what the runs of one stack and unit
have in common (`cost.machine.stacks`), are shared; the rest is a layout's own. The sum follows
Student's t with four degrees of freedom (`student`), and every deviation here is its scale.
Letters: N layouts, D directions and offsets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.calibration import student
from planner.calibration.basis import WIDER, widening
from planner.calibration.classes import factor_of
from planner.calibration.kernel_doubt import attention_sd, unmeasured_gpu_sd
from planner.columns import FloatColumn, LayoutBatch, in_order
from planner.columns.table import Table
from planner.cost.machine.profile import Profile
from planner.cost.machine.stacks import stack_name, unit_names
from planner.cost.price import Pricer, Prices
from planner.specs.cluster import ClusterSpec
from planner.trainers.registry import code_of

JITTER = 1e-9  # on the diagonal of a covariance that one's own runs may have left without variance
MOSTLY_HIDDEN = 0.5  # of the compute; no published run hides as much
TWO_SIDED_90 = 1.6448536269514722  # 95th percentile of the standard normal

Pair = tuple[FloatColumn, FloatColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread(Table):
    """Standard deviations of log step seconds, by cause.

    loadings (D, N): along each direction, then those of the offsets of stack and units, then those
        of an unknown attention kernel and of a GPU that no run was measured on (`kernel_doubt`).
    own_sd (N,): of each layout's own error.
    """

    loadings: FloatColumn
    own_sd: FloatColumn

    @property
    def sd(self) -> FloatColumn:
        """Scale of each layout by itself, (N,)."""
        return np.asarray(np.sqrt(in_order(self.loadings**2) + self.own_sd**2))


def time_spread(pricer: Pricer, batch: LayoutBatch, prices: Prices) -> TimeSpread:
    """Pushes the posterior of the pricer's calibration through the model.

    It moves one principal direction at a time, by one deviation, and with it the offsets that
    one's own runs have tied to it. A layout's own error is wider where it uses what was not
    measured (`basis.widening`).
    """
    trainer, gpu, calibration = code_of(pricer.training), pricer.cluster.gpu, pricer.calibration
    directions, rest = calibration.directions(trainer, gpu.family)
    stack = stack_name(trainer, gpu.name)
    names = unit_names(stack, pricer.model)
    offsets = calibration.offsets(trainer, gpu.family, stack, names)
    with_offset = (offsets.slopes @ directions.T)[batch.precision].T
    moved = pricer.step_seconds_on(list(moved_pricers(pricer)), batch)
    loadings = np.log(moved) - np.log(prices.step_seconds) + with_offset
    apart = np.linalg.cholesky(offsets.covariance + JITTER * np.eye(len(names)))
    doubts = (attention_sd(pricer, batch), np.full(len(batch), unmeasured_gpu_sd(calibration, gpu)))
    return TimeSpread(
        loadings=np.vstack([loadings, apart.T[:, batch.precision], *doubts]),
        own_sd=np.sqrt(rest + calibration.run_sd**2) * widening(batch, pricer, calibration),
    )


def interval_sd(pricer: Pricer, batch: LayoutBatch, prices: Prices) -> FloatColumn:
    """Scale of each layout's log step seconds where it stands by itself, (N,).

    What is not measured (`basis.widening`) widens all of it: kinds of runs that no fitted run is of
    were off twice as far. So does communication that hides under most of the compute
    (MOSTLY_HIDDEN). Between layouts of one job it widens their own errors alone. Its class has a
    factor on all of it (`classes`), which says how far off whole jobs are, not how layouts differ.
    """
    spread = time_spread(pricer, batch, prices)
    wider = widening(batch, pricer, pricer.calibration)
    hidden = hidden_share(prices) > MOSTLY_HIDDEN
    shared = in_order(spread.loadings**2)
    measured, unmeasured = (
        factor_of(pricer.calibration, pricer.model, pricer.cluster.gpu.family, unmeasured=beyond)
        for beyond in (False, True)
    )
    factor = np.where((wider > 1.0) & ~hidden, unmeasured, measured)
    wider = np.where(hidden, WIDER, wider)
    return np.asarray(factor * np.sqrt(wider**2 * shared + spread.own_sd**2))


def hidden_share(prices: Prices) -> FloatColumn:
    """Data-parallel communication that nobody waits for, over a rank's own work, (N,)."""
    return np.asarray(prices.stage_seconds.hidden / prices.stage_seconds.busy)


def moved_pricers(pricer: Pricer) -> Iterator[Pricer]:
    """Pricers moved by one standard deviation along each of D principal directions.

    The directions are those of its calibration's posterior.
    """
    trainer, gpu, calibration = code_of(pricer.training), pricer.cluster.gpu, pricer.calibration
    centre = calibration.shift(trainer, gpu.family)
    for index, direction in enumerate(calibration.directions(trainer, gpu.family)[0]):
        yield pricer.variant(("moved", index), partial(pricer.moved, centre + direction))


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
    def around(values: FloatColumn, sd: FloatColumn, width: float = TWO_SIDED_90) -> Pair:
        return values * np.exp(-width * sd), values * np.exp(width * sd)

    time_sd = interval_sd(pricer, batch, prices)
    return Spread(
        step_seconds=around(step_seconds, time_sd, student.TWO_SIDED_90),
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
    """P(device bytes > usable bytes), (N,)."""
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
