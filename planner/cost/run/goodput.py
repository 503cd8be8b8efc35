"""Cost of saves and of failures, and the share of the wall time that is left for training.

Letters: N layouts, R pipeline ranks; every column is (N,). A segment is `useful` seconds of
training and the seconds for which the save at its end blocks it. Failures are a Poisson process
with mean distance M (mtbf).
"""

from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn, LayoutBatch, groups
from planner.cost.data_parallel import sharding, unit_elements
from planner.cost.memory.host_activations import host_bytes
from planner.cost.memory.peak import SCALES_WITH_MASTER
from planner.cost.pipeline import stages
from planner.cost.price import Pricer
from planner.specs.cluster import ClusterSpec
from planner.specs.run import CheckpointMode
from planner.specs.training import mean_state_bytes
from planner.units import DAY, GIGA, HOUR

# Unexpected interruptions of Llama 3 405B: 54 days on 16,384 H100, by cause.
# Source: arXiv 2407.21783, table 5.
LLAMA3_GPUS, LLAMA3_SECONDS = 16384, 54 * DAY
LLAMA3_INTERRUPTIONS = {
    "faulty GPU": 148, "GPU HBM3 memory": 72, "software": 54, "network switch or cable": 35,
    "unplanned host maintenance": 32,
    "GPU SRAM": 19, "GPU system processor": 17, "NIC": 7, "NCCL watchdog timeout": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6, "SSD": 3, "power supply": 3, "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2, "CPU": 2, "system memory": 2,
}  # fmt: skip
# Judgement: notice the failure, replace the node, start processes, compile. MegaScale (arXiv
# 2402.15627, section 6.3) detects and diagnoses in under 10 minutes on average. Loading the
# checkpoint comes on top. A person who must be woken takes longer.
RESTART_SECONDS = 600.0
# Judgement: walking the state dict and planning the save, in every mode.
PREPARE_SECONDS = 0.1
# Judgement: one rank serialises and writes with one thread, as DCP's FileSystemWriter does by
# default (thread_count=1).
WRITER_BYTES_PER_SECOND = 2 * GIGA
# Judgement: copies to pageable memory pass through the driver's bounce buffer and fault in fresh
# pages: some 6 GB/s on PCIe 5. With it async blocks 18 times less than sync for an 8B model on 64
# GPUs; published: 5 to 15 and 24 times (see save_costs).
PAGEABLE_SHARE = 0.1
# Judgement: share of host memory left besides the operating system and data loading.
HOST_MEMORY_SHARE = 0.8
# Below this a run makes no useful progress; the limit keeps time and cost finite.
LEAST_LOG_GOODPUT = -100.0
NEWTON_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """One save, (N,).

    saved_bytes: of the whole job.
    gpu_bytes: of the fullest rank.
    sync: whether training waits for storage.
    blocking_seconds: for which training stops.
    upload_seconds: of writing in the background.
    write_seconds: of writing (or reading back) the same bytes by the whole job; equals
        upload_seconds unless saves are sync.
    host_bytes: on a node.
    """

    saved_bytes: FloatColumn
    gpu_bytes: FloatColumn
    sync: BoolColumn
    blocking_seconds: FloatColumn
    upload_seconds: FloatColumn
    write_seconds: FloatColumn
    host_bytes: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Shares of the wall time, (N,), which sum to one, and the interval they hold for.

    interval_steps: steps between saves.
    optimal_steps, optimal_goodput: the interval of most goodput, and that goodput.
    delay_seconds: for which a save waits until the last upload has ended.
    restart_seconds: that one failure costs, loading included.
    goodput, saving, lost, restarting: the shares. Lost work is done twice.
    """

    interval_steps: FloatColumn
    optimal_steps: FloatColumn
    optimal_goodput: FloatColumn
    delay_seconds: FloatColumn
    restart_seconds: FloatColumn
    goodput: FloatColumn
    saving: FloatColumn
    lost: FloatColumn
    restarting: FloatColumn


def job_mtbf_seconds(cluster: ClusterSpec) -> float:
    """Mean seconds between interruptions of the job.

    M = mtbf_gpu_hours x 3600 / GPUs: failures are independent, and any of them stops the job.
    """
    return cluster.mtbf_gpu_hours * HOUR / cluster.num_gpus


def usable_host_bytes(cluster: ClusterSpec) -> float:
    """Memory of a node's host besides the operating system and data loading."""
    return HOST_MEMORY_SHARE * cluster.host_memory_bytes


def state_bytes(batch: LayoutBatch, pricer: Pricer) -> FloatColumn:
    """Bytes that a checkpoint holds for each parameter, (N,).

    Master copy + optimizer state (+ compute copy where it is separate). States follow the master
    dtype as in `cost.memory`.
    AdamW in TorchTitan: 4 + 8. Megatron's distributed optimizer: 2 + 4 + 8.
    Sources: torch.distributed.checkpoint.state_dict; Megatron-LM dist_checkpointing.
    """
    optimizer = pricer.training.optimizer
    state = mean_state_bytes(optimizer, pricer.model) * np.where(
        optimizer in SCALES_WITH_MASTER, batch.master_bytes / 4.0, 1.0
    )
    copies = batch.param_bytes if pricer.rules.sharding.keeps_copies else 0.0
    return batch.master_bytes + state + copies


def held_parameters(batch: LayoutBatch, pricer: Pricer) -> FloatColumn:
    """Parameters of the fullest rank after TP, EP, PP and sharding, (N,)."""
    shard_rows, at_shard = groups.distinct(batch, sharding.KEY)
    dense, expert = unit_elements.unit_parameters(pricer.model, shard_rows)
    kept = unit_elements.kept_shards(shard_rows, dense, expert, pricer.cluster.rank_order)
    pipe_rows, at_pipe = groups.distinct(batch, stages.KEY)
    ranks = stages.rank_layers(pipe_rows, pricer.model, pricer.rules, every_rank=False)
    units = ranks.units[:, :, at_pipe]
    return np.asarray(np.einsum("rkn,kn->rn", units, kept[:, at_shard]).max(axis=0))


def save_costs(
    pricer: Pricer, batch: LayoutBatch, step_seconds: FloatColumn, mode: CheckpointMode | None
) -> Saves:
    """Costs of one save. Without a mode async where the host has room for its copies, else sync.

    write = bytes of the job / min(storage, nodes x GPUs a node x min(PCIe, writer))
    sync: blocks for prepare + write.
    async: blocks for prepare + (bytes of a rank) / (pageable share x PCIe), writes in the
        background.
    async-pinned: the copy to pinned shared memory runs under the next forward and backward, and
        must be over before the optimizer changes the weights. It blocks for prepare + max(0, bytes
        of a rank / PCIe - step).
    Replicas stage their own copy; each element is written once (DCP removes duplicates).
    Sources: torch.distributed.checkpoint.async_save and its recipe (host memory rises by checkpoint
    size per rank x ranks); torchtitan/components/checkpoint.py (staging stream,
    maybe_wait_for_staging before the optimizer, one save in flight).
    Measured effect: 5 to 15 times less overhead (TorchTitan, arXiv 2410.06511), 10 to 20
    (pytorch.org/blog/reducing-checkpointing-times).
    """
    cluster = pricer.cluster
    pcie = cluster.pcie_bandwidth_bytes_per_second
    per_parameter = state_bytes(batch, pricer)
    held = held_parameters(batch, pricer)
    total, on_gpu = pricer.model.total_parameters() * per_parameter, held * per_parameter
    host_path = cluster.num_nodes * cluster.gpus_per_node * min(pcie, WRITER_BYTES_PER_SECOND)
    write = total / min(cluster.storage_bandwidth_bytes_per_second, host_path)
    gradients = held * batch.master_bytes
    offloaded = batch.host_share * (on_gpu + gradients) + host_bytes(pricer, batch)
    room = usable_host_bytes(cluster) / cluster.gpus_per_node
    sync = on_gpu + offloaded > room if mode is None else np.full(len(batch), mode == "sync")
    pinned = np.maximum(0.0, on_gpu / pcie - step_seconds)
    copied = pinned if mode == "async-pinned" else on_gpu / (PAGEABLE_SHARE * pcie)
    return Saves(
        saved_bytes=total,
        gpu_bytes=on_gpu,
        sync=sync,
        blocking_seconds=PREPARE_SECONDS + np.where(sync, write, copied),
        upload_seconds=np.where(sync, 0.0, write),
        write_seconds=write,
        host_bytes=(np.where(sync, 0.0, on_gpu) + offloaded) * cluster.gpus_per_node,
    )


def young_interval_seconds(blocking_seconds: FloatColumn, mtbf_seconds: FloatColumn) -> FloatColumn:
    """Young's first-order best training time between saves: sqrt(2 d M).

    Source: Young 1974, CACM 17(9).
    """
    return np.sqrt(2.0 * blocking_seconds * mtbf_seconds)


def daly_interval_seconds(blocking_seconds: FloatColumn, mtbf_seconds: FloatColumn) -> FloatColumn:
    """Daly's higher-order best training time between saves.

    sqrt(2 d M) (1 + (d / 2M)^(1/2) / 3 + (d / 2M) / 9) - d  where d < 2M, else M
    d: seconds for which a save blocks.
    M: mean time between failures.
    Source: Daly 2006, FGCS 22(3), the perturbation solution.
    """
    ratio = blocking_seconds / (2.0 * mtbf_seconds)
    series = (
        young_interval_seconds(blocking_seconds, mtbf_seconds)
        * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0)
        - blocking_seconds
    )
    return np.where(ratio < 1.0, series, mtbf_seconds)


def best_interval_seconds(blocking_seconds: FloatColumn, mtbf_seconds: FloatColumn) -> FloatColumn:
    """Training time between saves that minimises Daly's wall time exactly.

    Newton's method, begun at his series, solves 1 - t/M = exp(-(t + d)/M).
    """
    useful = daly_interval_seconds(blocking_seconds, mtbf_seconds)
    for _ in range(NEWTON_STEPS):
        survive = -np.expm1(-(useful + blocking_seconds) / mtbf_seconds)
        useful = useful + mtbf_seconds * (survive - useful / mtbf_seconds) / np.maximum(
            survive, np.finfo(float).tiny
        )
    return np.asarray(useful)


def goodput(
    useful_seconds: FloatColumn,
    blocked_seconds: FloatColumn,
    mtbf_seconds: FloatColumn,
    redo_seconds: FloatColumn,
) -> FloatColumn:
    """Useful time over wall time, (N,), in (0, 1].

    g = t / (M e^(R/M) (e^((t + d)/M) - 1))
    To first order it is 1 / (1 + d/t + ((t + d)/2 + R)/M): each failure loses half a segment.
    t: useful seconds of a segment.
    d: seconds for which its save blocks.
    M: mean time between failures.
    R: seconds that each failure costs besides lost segments: the restart, and work since a save
        whose upload had not ended.
    Failures may strike during restarts.
    Source: Daly 2006, the complete cost function.
    """
    period = (useful_seconds + blocked_seconds) / mtbf_seconds
    log_wall = redo_seconds / mtbf_seconds + period + np.log(-np.expm1(-period))
    return np.asarray(
        np.exp(np.clip(np.log(useful_seconds / mtbf_seconds) - log_wall, LEAST_LOG_GOODPUT, 0.0))
    )


def progress(
    saves: Saves, step_seconds: FloatColumn, mtbf_seconds: float, given_steps: int | None
) -> Progress:
    """How the wall time divides, for the given interval or the best one.

    One save is in flight. When training reaches the next save before the last upload has ended, it
    waits: delay = upload - interval. A failure costs restart + loading, and work as long as the
    upload takes, because a run can only restart from a finished upload.
    """
    mtbf = np.full_like(step_seconds, mtbf_seconds)
    restart = RESTART_SECONDS + saves.write_seconds
    redo = restart + saves.upload_seconds

    def delay(steps: FloatColumn) -> FloatColumn:
        return np.maximum(0.0, saves.upload_seconds - steps * step_seconds)

    def useful(steps: FloatColumn) -> FloatColumn:
        return goodput(steps * step_seconds, saves.blocking_seconds + delay(steps), mtbf, redo)

    exact = best_interval_seconds(saves.blocking_seconds, mtbf) / step_seconds
    no_wait = np.ceil(saves.upload_seconds / step_seconds)
    # From `no_wait` on goodput has one peak, and below it goodput grows. So the best number of
    # steps is one of these.
    choices = np.maximum(1.0, np.array([np.floor(exact), np.ceil(exact), no_wait, no_wait - 1.0]))
    scores = np.array([useful(choice) for choice in choices])
    best = np.take_along_axis(choices, scores.argmax(axis=0)[None], axis=0)[0]
    steps = best if given_steps is None else np.full_like(step_seconds, given_steps)
    share = useful(steps)
    saving = np.minimum(
        share * (saves.blocking_seconds + delay(steps)) / (steps * step_seconds), 1.0 - share
    )
    restarting = np.minimum(restart / mtbf, 1.0 - share - saving)
    return Progress(
        interval_steps=steps,
        optimal_steps=best,
        optimal_goodput=scores.max(axis=0),
        delay_seconds=delay(steps),
        restart_seconds=restart,
        goodput=share,
        saving=saving,
        lost=1.0 - share - saving - restarting,
        restarting=restarting,
    )
