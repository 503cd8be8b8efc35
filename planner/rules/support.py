"""Obstacles that keep a whole job from running with any layout.

The trainer may lack the model, the vendor, the optimizer or the attention. A rule on layouts makes
one layout illegal; an obstacle here makes all of them illegal. The search checks them before it
begins, an estimate lists them beside its price, and an export refuses the job. All of them name
what could run it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.errors import UnsupportedError
from planner.rules.base import Context, choices
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Violation
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.attention import AMD, TENSOR_CORES, library
from planner.trainers.registry import TRAINERS

OWN_CODE = "the model's own code under PyTorch FSDP2, for example Hugging Face transformers"
OUTSIDE: Mapping[str, str] = {"google": "MaxText"}
"""Trainers that the planner does not have, by the vendor whose accelerators they run on."""

NEEDS_FAMILY: Mapping[str, tuple[str, ...]] = {
    "flash2": (*TENSOR_CORES, *AMD),
    "flash3": ("hopper",),
    "cudnn": TENSOR_CORES,
}
"""Rows of kernel curves with kernels of an attention generation.

Sources: flash-attention README (2: Ampere or newer, and AMD's; 3: Hopper); cuDNN frontend,
Attention (compute capability 8.0 or newer).
"""

STAND_IN = "cpu"
"""Vendor of a pool of CPU processes that stand for GPUs.

There the planner's own reference program runs a trainer's layouts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Able:
    """A trainer that can run a job.

    version: the release to use; None where releases do not matter.
    """

    trainer: str
    version: str | None

    def remedy(self, training: TrainingSpec) -> str:
        if self.trainer == training.trainer:
            return f"set training.trainer_version to {self.version}"
        trainer = TRAINERS[self.trainer]
        by = f", with {OWN_CODE}" if trainer.own_code else ""
        newer = trainer.release(self.version).number != trainer.release(None).number
        release = f" and training.trainer_version {self.version}" if newer else ""
        return f"use --trainer {self.trainer} (training.trainer in a job){release}{by}"


def obstacles(context: Context) -> list[Violation]:
    """Everything that keeps the job's trainer from running it with any layout, if anything."""
    faults = list(_faults(context))
    if not faults:
        return []
    able = trainers_that_can(context.model, context.cluster, context.training)
    others = _remedy(context, able)
    return [
        Violation(
            field=field,
            value=value,
            rule=rule,
            remedy=f"{own}; or {others}" if own and able else own or others,
        )
        for field, value, rule, own in faults
    ]


def fork_needed(context: Context) -> str | None:
    """The fork of the trainer that this vendor's GPUs need.

    None where the trainer itself runs there.
    """
    return context.trainer.vendors.get(context.cluster.gpu.vendor) or None


def trainers_that_can(model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> list[Able]:
    """The trainers that can run this job, best known first.

    Every message that suggests another trainer calls this.
    """
    found: list[Able] = []
    own = TRAINERS[training.trainer]
    offered = [(name, version) for name, one in TRAINERS.items() for version in one.offered]
    newer = [
        one.number for one in own.history if own.release(one.number).since(own.default_release)
    ]
    for trainer, version in [*((own.name, number) for number in newer), *offered]:
        if trainer == own.name and any(one.trainer == trainer for one in found):
            continue
        other = training.model_copy(update={"trainer": trainer, "trainer_version": version})
        if not any(_faults(Context(model=model, cluster=cluster, training=other))):
            found.append(Able(trainer=trainer, version=version))
    return found


def check_supported(contexts: Iterable[Context]) -> None:
    """Raises UnsupportedError where the trainer can run none of these jobs.

    The jobs differ only in their cluster.
    """
    for context in contexts:
        found = obstacles(context)
        if not found:
            return
    if found:
        able = trainers_that_can(context.model, context.cluster, context.training)
        raise UnsupportedError(
            "; ".join(one.rule for one in found),
            remedy=found[0].remedy if len(found) == 1 else _remedy(context, able),
            field=found[0].field,
            could=[
                one.trainer if one.version is None else f"{one.trainer} {one.version}"
                for one in able
            ],
            violations=[one.model_dump(mode="json") for one in found],
        )


def _faults(c: Context) -> Iterable[tuple[str, object, str, str]]:
    """(field, value, rule, what would pass with the same trainer or "")."""
    trainer, gpu = c.released, c.cluster.gpu
    line = next((own for own, code in trainer.ships.items() if code == c.release.line), None)
    name = f"{trainer.title} {line or c.release.line}" if trainer.history else trainer.title
    if gpu.vendor not in trainer.vendors and gpu.vendor != STAND_IN:
        owners = choices(sorted(trainer.vendors))
        rule = f"{trainer.title} does not run on {gpu.name}: it is for GPUs of {owners}"
        yield "cluster.gpu", gpu.name, rule, ""
    lacking = trainer.lacks(c.model, c.release)
    if lacking:
        rule = f"{name} cannot train {c.model.name}, for lack of: {', '.join(lacking)}"
        yield "model", c.model.name, rule, ""
    if trainer.optimizers and c.training.optimizer not in trainer.optimizers:
        rule = f"{name} has no optimizer {c.training.optimizer}"
        yield "training.optimizer", c.training.optimizer, rule, f"use {choices(trainer.optimizers)}"
    yield from _attention_faults(c, name)
    if c.training.muon_tp_mode and (c.training.optimizer != "muon" or trainer.muon.tp_mode is None):
        rule = f"{name} with optimizer {c.training.optimizer} has no such mode"
        yield "training.muon_tp_mode", c.training.muon_tp_mode, rule, "leave muon_tp_mode out"
    if c.training.qk_clip and not trainer.clips_qk:
        rule = f"{name} scales no weights of queries and keys by their scores"
        yield "training.qk_clip", True, rule, "leave qk_clip out"
    elif c.training.qk_clip and c.training.attention_kernel in ("flash2", "flash3"):
        # Transformer Engine attention/dot_product_attention/utils.py ("for max_logit")
        rule = "flash-attn does not give the largest scores, by which qk_clip scales"
        kernel = c.training.attention_kernel
        yield "training.attention_kernel", kernel, rule, "use cudnn, or leave qk_clip out"
    yield from _capacity_faults(c, name)
    if c.training.chunked_loss and not trainer.chunks_loss:
        rule = f"{name} computes its loss from whole logits"
        yield "training.chunked_loss", True, rule, "leave chunked_loss out"
    if c.training.fused_cross_entropy and not (
        trainer.fuses_cross_entropy or trainer.compiles_loss
    ):
        rule = f"{name} has no loss whose gradient overwrites its logits"
        yield "training.fused_cross_entropy", True, rule, "leave fused_cross_entropy out"
    graphs = c.training.cuda_graphs
    if graphs is not None and graphs not in trainer.cuda_graphs:
        rule = f"{name} has no CUDA graphs of this kind"
        yield "training.cuda_graphs", graphs, rule, f"use {choices(sorted(trainer.cuda_graphs))}"
    elif (
        graphs == "full"
        and c.model.is_moe
        and not (trainer.captures_dropless or c.training.moe_capacity_factor)
    ):
        rule = f"{name} captures no step in which the host reads how many rows each expert gets"
        yield "training.cuda_graphs", graphs, rule, "use partial or none"


def _capacity_faults(c: Context, name: str) -> Iterable[tuple[str, object, str, str]]:
    capacity, load = c.training.moe_capacity_factor, c.training.moe_imbalance
    field, remedy = "training.moe_capacity_factor", "leave moe_capacity_factor out"
    if capacity is None:
        return
    if not c.model.is_moe:
        yield field, capacity, f"{c.model.name} has no experts", remedy
    elif not c.released.drops_tokens:
        yield field, capacity, f"{name} drops no tokens of experts", remedy
    elif load is not None:
        rule = "experts that take just their capacity are loaded alike"
        yield "training.moe_imbalance", load, rule, "leave moe_imbalance or moe_capacity_factor out"


def _attention_faults(c: Context, name: str) -> Iterable[tuple[str, object, str, str]]:
    """Lacks of the GPU or the release for the attention kernel that the job names."""
    kernel, gpu = c.training.attention_kernel, c.cluster.gpu
    sparse = (c.model.indexed or c.model.compresses) and c.trainer.fused_kernels
    if sparse and gpu.family not in ("hopper", "blackwell"):
        rule = f"{name} has kernels of sparse attention for Hopper and newer GPUs"
        yield "cluster.gpu", gpu.name, rule, ""
    brought = c.released.fused_attention(
        c.training.model_copy(update={"attention_kernel": "flash"}), gpu, c.model
    )
    names = dict.fromkeys(map(library, brought))
    if kernel == "flash" or kernel in names:
        return
    field, remedy = "training.attention_kernel", "leave attention_kernel out"
    if (
        gpu.vendor != STAND_IN
        and kernel in NEEDS_FAMILY
        and gpu.kernel_family not in NEEDS_FAMILY[kernel]
    ):
        rule = f"{kernel} attention has no kernels for {gpu.name}"
        yield field, kernel, rule, remedy
    elif kernel not in c.released.attention_kernels:
        rule = (
            f"{name} has no setting for {kernel} attention, and on {gpu.name} it attends with "
            f"{' or '.join(names)}"
        )
        yield field, kernel, rule, remedy


def _remedy(c: Context, able: list[Able]) -> str:
    if able:
        return "; or ".join(one.remedy(c.training) for one in able)
    vendor, gpu = c.cluster.gpu.vendor, c.cluster.gpu.name
    if vendor != STAND_IN and not any(vendor in one.vendors for one in TRAINERS.values()):
        other = f"; {OUTSIDE[vendor]} could" if vendor in OUTSIDE else ""
        return f"no trainer we know trains on {gpu}{other}"
    return "no trainer we know can train this job"
