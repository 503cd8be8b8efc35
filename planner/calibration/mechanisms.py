"""The one list of mechanisms: what a run exercises, by name, and which layouts use it.

Measured runs mark mechanisms as seen (`basis`); the choice of number 1 weighs them by points. A
point is one more thing that has to be configured, can break, and may not have been tested. Points
are a judgement, written down here and in docs/decisions/0006; `search.choice.preference` has the
numbers that weigh them. Whether a mechanism was measured is a fact of the calibration's runs.
Mechanisms that are "more of the same" are ordered: a run on 100 nodes has "more than 4 nodes" too.
What a program does to a layer is composed of parts that runs timed, in whatever combination. How
long an exchange takes that no run on the GPU family made is not, nor what a compiler chooses to
redo within a memory budget: such a mechanism `leads` only once it was measured there.
Letters: N layouts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from planner.columns import CODES, TRAINER_SPLIT, BoolColumn, IntColumn, LayoutBatch
from planner.cost.layer.trainer_kernels import chunks_loss
from planner.rules.base import Context
from planner.rules.cuda_graphs import captured
from planner.rules.pipeline import spelled_out
from planner.schedules import SCHEDULES, Schedule
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import AC_KINDS, Layout
from planner.specs.mixers import MIXER_KINDS
from planner.specs.model import ModelSpec
from planner.specs.training import CUDA_GRAPHS, OPTIMIZER_STATE_BYTES, TrainingSpec
from planner.trainers.attention import library
from planner.trainers.registry import TRAINERS
from planner.units import counted

MANY_EXPERTS = 16  # models with fewer have been trained without expert parallelism
# twice the widest sharding of the published runs; from here on fabrics are not flat
# (leaf and spine)
WIDE = 256
# Judgement: a run shows what happens on up to 4 times as many nodes, or with sequences up to 4
# times as long; one node and 8,192 tokens are the ordinary case.
NODES = (1, 4, 16, 64, 256, 1024)
TOKENS = (8192, 32768, 131072, 524288)
# what the published runs reach: the shortest sequences that Ulysses cut, the widest exchange of
# experts
SHORT, FAR_EXPERTS = 4096, 4
CUT = 8192  # tokens a rank below which a sequence is cut for room alone, not for its length
# from here on Llama 3 (arXiv 2407.21783, 3.3.2) and TorchTitan cut sequences as a rule
GATHERED_FROM = 131072
LONG = 16  # ranks of a pipeline, beyond what anybody runs by default; judgement
AC_POINTS = {"selective-layer": 1, "memory-budget": 2, "block": 1, "uniform": 1, "modules": 1}
AC_WORDS = {
    "none": "no recomputation",
    "full": "full recomputation",
    "selective-op": "selective recomputation of operators",
    "selective-layer": "checkpointing of every n-th layer",
    "selective-attention": "recomputation of attention alone",
    "memory-budget": "memory-budget recomputation",
    "block": "recomputation of a part of each stage's layers",
    "uniform": "recomputation of several layers at once",
    "modules": "recomputation of parts of a layer",
}
# else 1, float8 scaled by its own step; a value that jumps overflows the scale of earlier steps
PRECISION_POINTS = {"bf16": 0, "fp16": 0, "float8-delayed": 2, "mxfp8": 2, "nvfp4": 2, "mxfp4": 2}
DISPATCHER_POINTS = {"deepep": 1, "hybridep": 1}  # a library of its own to build
ATTENTION_KERNELS = ("flash1", "flash2", "flash3", "flex", "ck", "cudnn", "unfused")
CP_WORDS = {
    "allgather": "keys and values gathered over context ranks",
    "alltoall": "keys and values passed round a ring",
    "ulysses": "Ulysses attention",
}


class Setting(Protocol):
    """Model, cluster and training of a job."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def cluster(self) -> ClusterSpec: ...
    @property
    def training(self) -> TrainingSpec: ...


Mask = Callable[[LayoutBatch, Setting], BoolColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One mechanism.

    name: in `Calibration.seen` and in an estimate's basis.
    words: for the reader.
    points: its weight in the choice.
    used: whether each layout uses it, (N,).
    of_job: the same for all layouts of a job.
    of_gpu: a kernel of the GPU, which runs of any trainer show.
    travels: whether runs on other families of GPUs count; each has its own kernels of few bits.
    leads: whether a layout may come first by it before a run of its trainer on its GPU family
        used it.
    practised: jobs for which it is what practitioners run, measured here or not, and no more to
        explain than what it replaces.
    """

    name: str
    words: str
    points: int
    used: Mask
    of_job: bool = False
    of_gpu: bool = False
    travels: bool = True
    leads: bool = True
    practised: Callable[[Setting], bool] = lambda setting: False


def _layout(
    name: str, used: Mask, points: int = 0, words: str = "", *, leads: bool = True
) -> Mechanism:
    return Mechanism(
        name=name, words=words or name, points=points, leads=leads,
        used=lambda x, setting: np.asarray(used(x, setting)),
    )  # fmt: skip


def _job(name: str, condition: Callable[[Setting], bool], words: str = "") -> Mechanism:
    return Mechanism(
        name=name, words=words or name, points=0, of_job=True,
        used=lambda x, setting: np.full(len(x), condition(setting), dtype=np.bool_),
    )  # fmt: skip


def _code(column: str, value: str, *, axis: str = "") -> Mask:
    """Whether a column has this value, where the degree that it belongs to is above 1."""
    code = (AC_KINDS if column == "ac_kind" else CODES[column]).index(value)
    if not axis:
        return lambda x, s: np.asarray(getattr(x, column) == code)
    return lambda x, s: np.asarray((getattr(x, column) == code) & (getattr(x, axis) > 1))


def _trained(field: str, value: str) -> Callable[[Setting], bool]:
    return lambda setting: bool(getattr(setting.training, field) == value)


def _above(count: Callable[[Setting], int], limit: int) -> Callable[[Setting], bool]:
    return lambda setting: count(setting) > limit


def _context(setting: Setting) -> Context:
    return Context(model=setting.model, cluster=setting.cluster, training=setting.training)


def _attends_by(kernel: str) -> Callable[[Setting], bool]:
    """Whether a job's attention runs by this kernel, the likeliest of what its release brings."""

    def attends(s: Setting) -> bool:
        if s.training.attention_kernel == "unfused":
            return kernel == "unfused"
        trainer = TRAINERS[s.training.trainer]
        return kernel == library(trainer.fused_attention(s.training, s.cluster.gpu, s.model)[0])

    return attends


def _captures(graphs: int) -> Mask:
    return lambda x, setting: captured(x, _context(setting)) == graphs


def _domain(setting: Setting) -> int:
    """GPUs of one scale-up domain (NVLink or similar)."""
    return setting.cluster.fabric[0].gpus


def _schedule_points(schedule: Schedule) -> int:
    """Points of a schedule on top of a pipeline's: 1F1B is what a pipeline is by default."""
    if schedule.splits_backward:
        return 2
    return 0 if schedule.name == "1F1B" else 1


def _precisions() -> Iterator[Mechanism]:
    for name in CODES["precision"]:
        points = PRECISION_POINTS.get(name, 1)
        found = _layout(f"precision {name}", _code("precision", name), points, name)
        yield replace(found, travels=points == 0)
    gathered = "weights gathered in float8"
    yield _layout("float8 all-gather", lambda x, s: x.float8_all_gather, words=gathered)
    for column, dtype, words in (
        ("param_dtype", "float32", "computing in 32 bits"),
        ("reduce_dtype", "bfloat16", "gradients reduced in bfloat16"),
        ("master_dtype", "bfloat16", "master weights in bfloat16"),
    ):
        yield _layout(f"{column} {dtype}", _code(column, dtype), words=words)


def _shards(stage: int) -> Mask:
    return lambda x, s: (x.zero_stage == stage) & (x.dp_shard * x.cp > 1)


def _data_parallel() -> Iterator[Mechanism]:
    yield _layout(
        "ddp", lambda x, s: (x.dp_replicate > 1) & ((x.zero_stage == 0) | (x.dp_shard == 1)),
        words="plain DDP",
    )  # fmt: skip
    yield _layout("zero1", _shards(1), words="a sharded optimizer (ZeRO 1)")
    yield _layout("zero2", _shards(2), words="sharded weights kept until the backward")
    yield _layout("fsdp", _shards(3), words="fully sharded weights")
    # tests/golden/source_tables.md: HSDP moves the point where FSDP's communication saturates 3 to
    # 6 times further out; beyond WIDE GPUs flat groups are the exception (TorchTitan, InternEvo)
    hsdp = "replicated shard groups (HSDP)"
    found = _layout("hsdp", lambda x, s: (x.dp_replicate > 1) & (x.dp_shard > 1), 1, hsdp)
    yield replace(found, practised=lambda s: s.cluster.num_gpus > WIDE)
    yield _layout(
        f"sharded over {WIDE} ranks",
        lambda x, s: (x.zero_stage >= 2) & (x.dp_shard * x.cp > WIDE),
        2,
        f"weights gathered from more than {WIDE} ranks",
    )


def _tensor_and_context_parallel() -> Iterator[Mechanism]:
    yield _layout("tp", lambda x, s: x.tp > 1, 1, "tensor parallelism")
    yield _layout(
        "tp without sp",
        lambda x, s: (x.tp > 1) & ~x.sequence_parallel,
        1,
        "tensor parallelism without sequence parallelism",
    )
    across = "tensor parallelism across nodes"
    yield _layout("tp across nodes", lambda x, s: x.tp > _domain(s), 2, across)
    yield _layout("async tp", lambda x, s: x.async_tp, 1, "async TP")
    yield _layout("cp", lambda x, s: x.cp > 1, 2, "context parallelism")
    for method in CODES["cp_method"]:
        name = "ulysses" if method == "ulysses" else f"cp {method}"
        used, words = _code("cp_method", method, axis="cp"), CP_WORDS[method]
        cut = _layout(name, used, words=words, leads=False)
        usual = _above(lambda s: s.training.seq_len, GATHERED_FROM - 1)
        yield replace(cut, practised=usual) if method == "allgather" else cut
    yield _layout(
        "short cp", lambda x, s: (x.cp > 1) & (x.cp * CUT > s.training.seq_len), leads=False,
        words=f"context parallelism with fewer than {CUT:,} tokens a rank",
    )  # fmt: skip
    ulysses = _code("cp_method", "ulysses", axis="cp")
    yield _layout(
        "short ulysses", lambda x, s: ulysses(x, s) & (x.cp * SHORT > s.training.seq_len),
        leads=False, words=f"Ulysses attention with fewer than {SHORT:,} tokens a rank",
    )  # fmt: skip


def _pipelines() -> Iterator[Mechanism]:
    yield _layout("pp", lambda x, s: x.pp > 1, 2, "a pipeline")
    long = f"a pipeline of more than {LONG} ranks"
    yield _layout(f"pp over {LONG}", lambda x, s: x.pp > LONG, 2, long)
    yield _layout(  # a block priced wrongly makes its stages the slowest
        "pp of unlike layers", lambda x, s: (x.pp > 1) & (len({*s.model.mixers}) > 1),
        words="a pipeline through layers of several kinds",
    )  # fmt: skip
    for name, schedule in SCHEDULES.items():
        chosen, points = _code("pp_schedule", name, axis="pp"), _schedule_points(schedule)
        yield _layout(f"schedule {name}", chosen, points, f"the schedule {name}")
    yield _layout(
        "own split",
        lambda x, s: (x.pp > 1) & ((x.split != TRAINER_SPLIT) | spelled_out(x, _context(s))),
        1,
        "a layer split of its own",
    )


def _mixtures() -> Iterator[Mechanism]:
    yield _job("experts", lambda s: s.model.is_moe, "a mixture of experts")
    yield _layout("ep", lambda x, s: (x.ep > 1) & s.model.is_moe, words="expert parallelism")
    for name in CODES["moe_dispatcher"]:
        yield _layout(
            f"dispatcher {name}", _dispatched(name), DISPATCHER_POINTS.get(name, 0),
            f"experts dispatched by {name}", leads=name == "alltoall",
        )  # fmt: skip
    yield _layout(
        "all experts everywhere",
        lambda x, s: (x.ep * x.etp == 1) & (s.model.num_experts >= MANY_EXPERTS),
        1,
        "all of many experts gathered on every rank",
    )
    yield _layout(
        "ep across nodes",
        lambda x, s: (x.ep * x.etp > _domain(s)) & s.model.is_moe,
        2,
        "expert parallelism across nodes",
    )
    yield _layout(
        f"ep over more than {FAR_EXPERTS} nodes",
        lambda x, s: (x.ep * x.etp > FAR_EXPERTS * _domain(s)) & s.model.is_moe,
        words=f"experts spread over more than {FAR_EXPERTS} nodes", leads=False,
    )  # fmt: skip
    yield _layout("etp", lambda x, s: (x.etp > 1) & s.model.is_moe, 1, "experts cut by TP")


def _dispatched(name: str) -> Mask:
    chosen = _code("moe_dispatcher", name, axis="ep")
    return lambda x, s: chosen(x, s) & s.model.is_moe


def _program() -> Iterator[Mechanism]:
    for kind in AC_KINDS:
        used, leads = _code("ac_kind", kind), kind != "memory-budget"
        yield _layout(f"ac {kind}", used, AC_POINTS.get(kind, 0), AC_WORDS[kind], leads=leads)
    yield _layout("compile", lambda x, s: x.compile, words="compiled layers")
    backward, host = "the optimizer in the backward", "activations on the host"
    yield _layout("optimizer in backward", lambda x, s: x.optimizer_in_backward, 1, backward)
    yield _layout("cpu offload", lambda x, s: x.cpu_offload, 2, "CPU offload")
    yield _layout("activation offload", lambda x, s: x.activation_offload_layers > 0, 2, host)


def _mixes(mixer: str) -> Callable[[Setting], bool]:
    return lambda s: mixer in s.model.mixers


def _jobs() -> Iterator[Mechanism]:
    yield _job("mla", lambda s: s.model.uses_mla, "multi-head latent attention")
    yield from (_job(mixer, _mixes(mixer), kind.words) for mixer, kind in MIXER_KINDS.items())
    yield _job("hyper-connections", lambda s: s.model.hc_mult > 0)
    yield _job("mtp", lambda s: s.model.mtp_num_layers > 0, "multi-token prediction")
    yield _job("latent", lambda s: s.model.moe_latent_size > 0, "experts on a latent")
    yield _job("output gate", lambda s: s.model.gates_attention, "gated attention")
    yield _job("sliding window", lambda s: s.model.sliding_layers > 0, "sliding-window attention")
    yield _job("heads by layer", lambda s: s.model.varies_heads, "heads that differ by layer")
    yield _job("windows of several lengths", lambda s: bool(s.model.sliding_windows))
    yield _job("norms around experts and router", lambda s: s.model.moe_branch_norms)
    yield _job("gated norms", lambda s: s.model.gated_norm_rank > 0)
    yield _job("zero experts", lambda s: s.model.zero_expert_num > 0, "zero-compute experts")
    yield _job("per-layer embeddings", lambda s: s.model.hidden_size_per_layer_input > 0)
    for kernel in ATTENTION_KERNELS:
        found = _job(f"attention {kernel}", _attends_by(kernel), f"attention by {kernel}")
        yield replace(found, of_gpu=True)
    for graphs in ("partial", "full"):
        used = _captures(CUDA_GRAPHS.index(graphs))
        yield _layout(f"cuda graphs {graphs}", used, words=f"{graphs} CUDA graphs")
    yield _job(
        "chunked loss", lambda s: chunks_loss(s.training, _context(s).released), "a chunked loss"
    )
    for optimizer in OPTIMIZER_STATE_BYTES:
        yield _job(f"optimizer {optimizer}", _trained("optimizer", optimizer))
    for nodes in NODES:
        name = f"more than {counted(nodes, 'node')}"
        yield _job(name, _above(lambda s: s.cluster.num_nodes, nodes))
    for tokens in TOKENS:
        name = f"more than {counted(tokens, 'token')}"
        yield _job(name, _above(lambda s: s.training.seq_len, tokens), f"sequences of {name}")


MECHANISMS: tuple[Mechanism, ...] = (
    _job("compute", lambda s: True, "compute"),
    *_precisions(),
    *_data_parallel(),
    *_tensor_and_context_parallel(),
    *_pipelines(),
    *_mixtures(),
    *_program(),
    *_jobs(),
)
WEIGHTY = tuple(mechanism for mechanism in MECHANISMS if mechanism.points)


def points(batch: LayoutBatch, setting: Setting) -> IntColumn:
    total = np.zeros(len(batch), dtype=np.int64)
    for mechanism in WEIGHTY:
        if not mechanism.practised(setting):
            total += mechanism.points * mechanism.used(batch, setting)
    return total


def used_by(layout: Layout, setting: Setting) -> tuple[Mechanism, ...]:
    """The mechanisms of one layout, in the order of the table."""
    batch = LayoutBatch.from_layouts([layout])
    return tuple(mechanism for mechanism in MECHANISMS if mechanism.used(batch, setting)[0])
