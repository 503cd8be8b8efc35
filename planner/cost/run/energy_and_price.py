"""The energy that a run draws and what it costs.

Letters: N layouts; every column is (N,).
"""

from dataclasses import dataclass

from planner.columns import FloatColumn
from planner.specs.cluster import ClusterSpec
from planner.units import HOUR, KILO

# Judgement: a GPU that waits keeps its clocks and spins in NCCL kernels, which draws less than full
# load and more than idling (0.1 to 0.15).
WAITING_POWER_SHARE = 0.5
# Rest of the node (CPUs, NICs, NVSwitch, fans) over the GPU's default board limit: an 8 x 700 W
# H100 node draws 8.4 kW at most while training, 350 W a GPU on top of them. Source: Latif et al.
# 2025, IEEE Access (arXiv 2412.08602).
REST_OF_NODE_SHARE = 0.5
# Judgement: large operators report 1.08 to 1.1, the industry's mean is 1.56 (Uptime Institute
# survey 2024).
POWER_USAGE_EFFECTIVENESS = 1.1
JOULES_PER_KWH = KILO * HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Price and energy of a run, (N,).

    cost: USD.
    joules: at the data centre's meter.
    grams: of CO2.
    watts_per_gpu: mean at the data centre's meter.
    """

    gpu_hours: FloatColumn
    cost: FloatColumn
    joules: FloatColumn
    grams: FloatColumn
    watts_per_gpu: FloatColumn


def gpu_watts(power_limit_watts: float, busy_share: FloatColumn) -> FloatColumn:
    """Mean watts of one GPU.

    P = limit (b + w (1 - b))
    b: busy_share (N,), share of the time in compute kernels, at the limit.
    w: WAITING_POWER_SHARE.
    Assumes that training kernels reach the limit (they do on H100 and later).
    Source: see WAITING_POWER_SHARE.
    """
    return power_limit_watts * (busy_share + WAITING_POWER_SHARE * (1.0 - busy_share))


def bill(cluster: ClusterSpec, wall_seconds: FloatColumn, busy_share: FloatColumn) -> Bill:
    """Price, energy and CO2 of a run.

    cost = GPU-hours x price
    E = PUE x GPUs x wall x (gpu_watts + rest of node)
    CO2 = E x carbon intensity
    wall_seconds (N,): from first to last step.
    busy_share (N,): share of it in compute kernels.
    The rest of the node draws no less under a lower power limit.
    """
    gpu_hours = cluster.num_gpus * wall_seconds / HOUR
    rest = REST_OF_NODE_SHARE * cluster.gpu.power_limit_watts
    watts = POWER_USAGE_EFFECTIVENESS * (gpu_watts(cluster.power_limit_watts, busy_share) + rest)
    joules = watts * cluster.num_gpus * wall_seconds
    grams = joules / JOULES_PER_KWH * cluster.carbon_intensity
    return Bill(
        gpu_hours=gpu_hours,
        cost=gpu_hours * cluster.price_per_gpu_hour,
        joules=joules,
        grams=grams,
        watts_per_gpu=watts,
    )
