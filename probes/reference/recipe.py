"""The recipe of one probe, resolved once for all parts of the program. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.cost.pipeline.stages import stage_layers
from planner.errors import Fault, SpecError
from planner.probes.protocol import Device, ProbeTask
from planner.rules import violations
from planner.schedules import SCHEDULES, schedules_of
from planner.specs.cluster import ClusterSpec
from planner.specs.job import Job
from planner.specs.layout import Layout, parse_ac
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.registry import TRAINERS
from planner.work.axes import expected_imbalance

# Weights below which every parameter is drawn whole from its own seed and then cut, so that all
# layouts start from the same model. Larger models draw each shard on its own rank. Judgement: 4 GiB
# of fp32 for the largest whole tensor is too much for a rank.
WHOLE_INIT_PARAMETERS = 200_000_000
# A step of so many times the fewest microbatches of a full pipeline is timed whole: two shorter
# ones take three times the fewest.
SHORT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRecipe:
    """One probe, resolved.

    task: as requested.
    layout, model, training, cluster: the job's.
    etp: ranks that share one expert's width; TorchTitan cuts experts by tp while ep = 1.
    num_microbatches: per step and data-parallel rank.
    vocab_parallel: logits are cut over tp in the loss too.
    """

    task: ProbeTask
    layout: Layout
    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    etp: int
    num_microbatches: int
    vocab_parallel: bool

    @classmethod
    def of(cls, task: ProbeTask) -> "ReferenceRecipe":
        """The task's recipe. Raises SpecError for a wrong job, or what this program cannot run."""
        job = task.parsed()
        if job.layout is None:
            raise SpecError(Fault("layout", None, "is required to probe", "add the layout to run"))
        layout, training = job.layout, job.training
        broken = violations(layout, job.model, job.cluster, training)
        faults = [Fault(f"layout.{v.field}", v.value, v.rule, v.remedy) for v in broken]
        faults = faults or list(_beyond(task, job, layout))
        if faults:
            raise SpecError(faults)
        parallel = training.vocab_parallel_loss
        if parallel is None:
            parallel = TRAINERS[training.trainer].vocab_parallel_loss
        return cls(
            task=task,
            layout=layout,
            model=job.model,
            training=training,
            cluster=job.cluster,
            etp=layout.tp if layout.ep == 1 and job.model.is_moe else layout.etp,
            num_microbatches=max(1, layout.num_microbatches(training.global_batch_size)),
            vocab_parallel=layout.tp > 1 and parallel,
        )

    @property
    def emulated(self) -> bool:
        """Whether one rank runs by itself: nothing is exchanged and the loss means nothing."""
        return self.task.emulate_rank is not None

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled; fake tensors cannot be."""
        return self.layout.compile and not self.task.fake_tensors

    @property
    def autocasts(self) -> bool:
        """Whether every rank holds the whole model and autocast makes its low precision.

        Every other layout runs under FSDP2, with replicas as its outer mesh axis. Source:
        torchtitan distributed/utils.py, maybe_enable_amp.
        """
        x = self.layout
        return x.dp_shard * x.cp * x.tp * x.pp * x.ep == 1 and not x.cpu_offload

    @property
    def uses_ddp(self) -> bool:
        """Whether it runs under DistributedDataParallel: only plain replicas do."""
        return self.autocasts and self.layout.dp_replicate > 1

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch_size * self.training.seq_len

    @property
    def local_seq_len(self) -> int:
        return self.training.seq_len // self.layout.cp

    @property
    def whole_init(self) -> bool:
        """Whether parameters start with equal values in every layout."""
        return not self.emulated and self.model.total_parameters() <= WHOLE_INIT_PARAMETERS

    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, first stage first."""
        layout = self.layout
        if layout.pp == 1:
            return (self.model.num_hidden_layers,)
        return layout.layers_per_stage or stage_layers(
            self.model.num_hidden_layers, layout.pp * layout.virtual_stages, counts_ends=True
        )

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Stages that one pipeline rank holds, ascending."""
        layout = self.layout
        if layout.pp == 1:
            return (0,)
        schedule = SCHEDULES[layout.pp_schedule]
        pp, virtual = layout.pp, layout.virtual_stages
        stages = range(pp * virtual)
        return tuple(s for s in stages if int(schedule.stage_rank(s, pp, virtual)) == pipeline_rank)

    def timed_microbatches(self) -> tuple[int, int] | None:
        """Microbatches of the two shorter steps that are timed instead of a long one."""
        return short_steps(self.layout, self.num_microbatches)

    def assigned_imbalance(self) -> float | None:
        """Load of the busiest expert-parallel rank over the mean; None where the router decides."""
        if self.task.routing == "learned" and not self.emulated:
            return None
        return 1.0 if self.emulated else float(self.training.moe_imbalance or 1.0)

    def received_share(self) -> float:
        """Token copies that the busiest rank's experts receive per copy that a rank sends."""
        layout, training = self.layout, self.training
        if training.moe_imbalance is not None:
            return float(training.moe_imbalance) if layout.ep > 1 else 1.0
        cut = layout.tp if layout.sequence_parallel and self.etp == 1 else 1
        own = layout.micro_batch_size * self.local_seq_len / cut
        copies = np.array([own * self.model.num_experts_per_tok])
        return float(expected_imbalance(copies, np.array([float(layout.ep)]))[0])


def short_steps(layout: Layout, whole: int) -> tuple[int, int] | None:
    """Microbatches of two shorter steps from which the seconds of a step of `whole` follow.

    A step is a + b M seconds for M microbatches once its pipeline is full: a is the update and the
    pipeline's fill, b one microbatch. None where the step itself is short, and where more
    microbatches change what ranks hold or the order that repeats.
    """
    few = 2 * layout.pp
    if whole <= SHORT * few:
        return None
    if layout.pp > 1:
        schedule, virtual = SCHEDULES[layout.pp_schedule], layout.virtual_stages
        ranks = np.arange(layout.pp)
        held = [schedule.in_flight(ranks, layout.pp, virtual, m) for m in (few, whole)]
        broken = [schedule.violation(layout.pp, virtual, m) for m in (few, 2 * few)]
        between = schedule.repeats_after(layout.pp, virtual, whole)
        if any(broken) or (whole - few) % between or not (held[0] == held[1]).all():
            return None
    return few, 2 * few


def extrapolated(timed: tuple[int, int], whole: int, short: float, longer: float) -> float:
    """Seconds of a step of `whole` microbatches: a + b M through the two sizes that were timed."""
    few, more = timed
    return short + (whole - few) / (more - few) * (longer - short)


def refusal(job: Job, layout: Layout, device: Device) -> str | None:
    """Why this program cannot run a layout that the job's trainer may; None if it can."""
    first = next(_beyond(ProbeTask(id="", job={}, device=device), job, layout), None)
    return None if first is None else f"{first.field}={first.value!r} {first.rule}"


def _beyond(task: ProbeTask, job: Job, layout: Layout) -> Iterator[Fault]:
    """Faults of a layout that the job's trainer may run but this program cannot."""
    model, training, ac = job.model, job.training, parse_ac(layout.ac)[0]
    pipelines, split = schedules_of("torch"), SCHEDULES[layout.pp_schedule].splits_backward
    off = [name for name in ("dp", "tp", "pp") if not getattr(training.overlap, name)]
    rank, here = task.emulate_rank, "is not in the reference program"
    titan = "or probe with trainer torchtitan"
    learned, gpus = model.max_position_embeddings, layout.num_gpus
    rows: tuple[tuple[bool, str, object, str, str], ...] = (
        (not TRAINERS[training.trainer].sharding.in_plain_torch, "training.trainer",
         training.trainer, "shards its own way, which plain torch does not have",
         "use torchtitan or fsdp"),
        (layout.pp > 1 and layout.pp_schedule not in pipelines, "layout.pp_schedule",
         layout.pp_schedule, "is not in torch", f"use {', '.join(sorted(pipelines))}"),
        # torch.utils.checkpoint, _CachedTorchDispatchMode: "You are only allowed to backward once"
        # on a selective region
        (layout.pp > 1 and layout.ac == "selective-op" and split, "layout.ac", layout.ac,
         f"keeps tensors for one backward, and {layout.pp_schedule} runs backward in two parts",
         "use ac none or full, or pp_schedule Interleaved1F1B or 1F1B"),
        (bool(model.unusual), "model", model.name,
         f"has {', '.join(model.unusual)}, which the reference program does not have",
         "probe a model without them"),
        (layout.moe_dispatcher != "alltoall" and layout.ep > 1, "layout.moe_dispatcher",
         layout.moe_dispatcher, here, f"use alltoall, {titan}"),
        (training.cuda_graphs in ("partial", "full"), "training.cuda_graphs", training.cuda_graphs,
         here, f"leave cuda_graphs out, {titan}"),
        (bool(training.fused_cross_entropy), "training.fused_cross_entropy", True,
         "is Transformer Engine's", "leave fused_cross_entropy out"),
        (bool(training.chunked_loss), "training.chunked_loss", True, here,
         f"leave chunked_loss out, {titan}"),
        (layout.precision in ("float8-delayed", "nvfp4", "mxfp4"), "layout.precision",
         layout.precision, "exists in Transformer Engine only", "use float8-rowwise or bf16"),
        (layout.precision == "float8-tensorwise" and layout.tp > 1 and task.device == "cpu"
         and rank is None, "layout.precision", layout.precision,
         "gathers float8 over TP, which gloo cannot", "use float8-rowwise, or device cuda"),
        (layout.cpu_offload and task.device == "cpu", "layout.cpu_offload", True,
         "moves shards between a GPU and its host", "probe with device cuda, or set it to false"),
        (task.fake_tensors and rank is None, "fake_tensors", True, "runs one rank alone",
         "set emulate_rank"),
        (task.fake_tensors and ac == "memory-budget", "layout.ac", layout.ac,
         "is a pass of torch.compile, which fake tensors cannot go through", "probe on a GPU"),
        (ac == "modules", "layout.ac", layout.ac,
         "recomputes modules of Megatron-LM, which the reference program does not have",
         "probe with selective-attention or full"),
        (rank is not None and not 0 <= rank < gpus, "emulate_rank", rank,
         f"is no rank of {gpus}", f"use 0 to {gpus - 1}"),
        (bool(off), "training.overlap", off, "cannot be switched off in torch",
         "leave overlap out"),
        (model.position_embedding == "learned" and training.seq_len > learned, "training.seq_len",
         training.seq_len, f"exceeds the {learned} positions that {model.name} has learned",
         f"use at most {learned}"),
    )  # fmt: skip
    for broken, field, value, rule, remedy in rows:
        if broken:
            yield Fault(field, value, rule, remedy)
