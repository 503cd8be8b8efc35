"""The whole runs of N layouts: wall time, energy, price, and the warnings that come with one."""

from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.price import Pricer, Prices
from planner.cost.run import goodput
from planner.cost.run.goodput import LLAMA3_INTERRUPTIONS, RESTART_SECONDS, job_mtbf_seconds
from planner.specs.cluster import ClusterSpec
from planner.specs.run import CheckpointCost, RunEstimate
from planner.units import HOUR, KILO, TERA, counted, format_bytes, format_count, format_seconds

REFERENCE_TOKENS = TERA
# Warn of a given interval that loses more goodput than this against the best one, and of a run
# below POOR_GOODPUT.
WORTH_SAYING = 0.005
POOR_GOODPUT = 0.8
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumns:
    """N whole runs of `tokens` tokens."""

    tokens: float
    step_seconds: FloatColumn
    saves: goodput.Saves
    progress: goodput.Progress
    tokens_per_second: FloatColumn
    wall_seconds: FloatColumn
    bill: Bill


def run_columns(
    pricer: Pricer, batch: LayoutBatch, step_seconds: FloatColumn, busy: FloatColumn
) -> RunColumns:
    """The whole runs of N layouts.

    wall = tokens / (tokens a step / step_seconds x goodput)
    busy (N,): seconds of a step in compute kernels. While a run saves or restarts, GPUs wait; while
        it repeats lost work, they are as busy as ever.
    """
    training, cluster = pricer.training, pricer.cluster
    spec = training.checkpoint
    one_save = goodput.save_costs(pricer, batch, step_seconds, spec.mode if spec else None)
    shares = goodput.progress(
        one_save, step_seconds, job_mtbf_seconds(cluster), spec.interval_steps if spec else None
    )
    tokens = training.total_tokens or REFERENCE_TOKENS
    per_second = training.global_batch_size * training.seq_len / step_seconds * shares.goodput
    wall = tokens / per_second
    share = np.minimum(1.0, busy / step_seconds) * (shares.goodput + shares.lost)
    return RunColumns(
        tokens=tokens,
        step_seconds=step_seconds,
        saves=one_save,
        progress=shares,
        tokens_per_second=per_second,
        wall_seconds=wall,
        bill=bill(cluster, wall, share),
    )


def busy_seconds(prices: Prices) -> FloatColumn:
    """Seconds of a step that the critical rank spends in compute kernels, (N,)."""
    return np.asarray(
        sum(prices.parts[name] for name in ("compute", "copies", "recompute", "optimizer"))
    )


def run_estimate(pricer: Pricer, columns: RunColumns, row: int) -> RunEstimate:
    shares, paid = columns.progress, columns.bill
    mtbf, wall = job_mtbf_seconds(pricer.cluster), float(columns.wall_seconds[row])
    checkpoint = _checkpoint(pricer, columns, row)
    return RunEstimate(
        checkpoint=checkpoint,
        mtbf_seconds=mtbf,
        restart_seconds=float(shares.restart_seconds[row]),
        expected_failures=wall / mtbf,
        goodput=float(shares.goodput[row]),
        saving_share=float(shares.saving[row]),
        lost_share=float(shares.lost[row]),
        restarting_share=float(shares.restarting[row]),
        tokens=columns.tokens,
        total_tokens=pricer.training.total_tokens,
        tokens_per_second=float(columns.tokens_per_second[row]),
        time_to_train_seconds=wall,
        gpu_hours=float(paid.gpu_hours[row]),
        cost=float(paid.cost[row]),
        energy_joules=float(paid.joules[row]),
        joules_per_token=float(paid.joules[row]) / columns.tokens,
        mean_watts_per_gpu=float(paid.watts_per_gpu[row]),
        co2_grams=float(paid.grams[row]),
        warnings=_warnings(
            checkpoint, float(shares.goodput[row]), float(shares.optimal_goodput[row]), mtbf
        ),
        assumptions=_assumptions(checkpoint, pricer.training.total_tokens is not None),
    )


def _checkpoint(pricer: Pricer, columns: RunColumns, row: int) -> CheckpointCost:
    spec, one_save, shares = pricer.training.checkpoint, columns.saves, columns.progress
    steps, host = int(shares.interval_steps[row]), float(one_save.host_bytes[row])
    usable = goodput.usable_host_bytes(pricer.cluster)
    return CheckpointCost(
        mode=spec.mode if spec else "sync" if one_save.sync[row] else "async",
        given=spec is not None,
        interval_steps=steps,
        interval_seconds=steps * float(columns.step_seconds[row]),
        optimal_interval_steps=int(shares.optimal_steps[row]),
        saved_bytes=float(one_save.saved_bytes[row]),
        gpu_bytes=float(one_save.gpu_bytes[row]),
        blocking_seconds=float(one_save.blocking_seconds[row]),
        upload_seconds=float(one_save.upload_seconds[row]),
        delay_seconds=float(shares.delay_seconds[row]),
        host_memory_bytes=host,
        host_memory_usable_bytes=usable,
        fits_host_memory=host <= usable,
    )


def _warnings(checkpoint: CheckpointCost, share: float, best: float, mtbf: float) -> list[str]:
    found = []
    if not checkpoint.fits_host_memory:
        need = format_bytes(checkpoint.host_memory_bytes)
        have = format_bytes(checkpoint.host_memory_usable_bytes)
        other_mode = "" if checkpoint.mode == "sync" else "save with mode sync, "
        found.append(
            f"checkpoints ({checkpoint.mode}) need {need} of host memory on a node, {have} is "
            f"usable: {other_mode}shard over more GPUs or add memory"
        )
    if checkpoint.delay_seconds > 0:
        every = format_seconds(checkpoint.interval_seconds)
        takes, waits = map(format_seconds, (checkpoint.upload_seconds, checkpoint.delay_seconds))
        found.append(
            f"a save starts every {every} but uploads for {takes}: training waits {waits} "
            "each time; save less often or raise storage_bandwidth"
        )
    if best - share > WORTH_SAYING:
        found.append(
            f"a save every {counted(checkpoint.interval_steps, 'step')} leaves {share:.1%} of the "
            f"time for training; every {counted(checkpoint.optimal_interval_steps, 'step')} would "
            f"leave {best:.1%}"
        )
    if share < POOR_GOODPUT:
        faults = LLAMA3_INTERRUPTIONS["faulty GPU"] / sum(LLAMA3_INTERRUPTIONS.values())
        found.append(
            f"only {share:.1%} of the time trains: an interruption every {format_seconds(mtbf)}; "
            f"keep spare nodes (about {faults:.0%} of Llama 3's interruptions were faulty "
            "GPUs), restart and save faster"
        )
    return found


def _assumptions(checkpoint: CheckpointCost, tokens_given: bool) -> list[str]:
    stated = []
    if not checkpoint.given:
        saves = f"{checkpoint.mode} saves at the interval of most goodput"
        why = "" if checkpoint.mode == "async" else ", as the host has no room for copies"
        stated.append(f"no training.checkpoint given: {saves}{why}")
    if not tokens_given:
        tokens = format_count(REFERENCE_TOKENS)
        stated.append(f"no training.total_tokens given: figures are for {tokens} tokens")
    return [
        *stated,
        f"judgement: automatic restart in {format_seconds(RESTART_SECONDS)} and the time to load",
        f"judgement: a waiting GPU draws {WAITING_POWER_SHARE:.0%} of its limit, "
        f"data centre overhead (PUE) {POWER_USAGE_EFFECTIVENESS}",
    ]
