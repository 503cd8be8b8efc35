"""What keeps a whole job from running, whatever the layout: model, vendor, optimizer or attention
that the trainer lacks.

A rule on layouts makes one layout illegal; an obstacle here makes all of them so. The search asks
before it begins, an estimate lists it beside its price, an export refuses, and all name what could
run the job.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from planner.errors import UnsupportedError
from planner.rules.base import Context, choices
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Violation
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers import megatron_models, titan_models
from planner.trainers.release import Release, release_of

OWN_CODE = "the model's own code under PyTorch FSDP2, for example Hugging Face transformers"
OUTSIDE: Mapping[str, str] = {"google": "MaxText"}
"""Trainers we do not know, by the vendor on whose accelerators they run."""


def _nothing(model: ModelSpec, release: Release) -> list[str]:
    return []


def _titan_lacks(model: ModelSpec, release: Release) -> list[str]:
    return titan_models.lacking(model, titan_models.line_of(release))


def _megatron_lacks(model: ModelSpec, release: Release) -> list[str]:
    return megatron_models.lacking(model)


def _titan_optimizers(release: Release) -> tuple[str, ...]:
    return ("adamw", "adamw-bf16-states") if release.since("0.3") else ("adamw",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one trainer can train, and on what.

    title: as people write it.  vendors: whose GPUs it runs on, each with the fork that it takes (""
    for the trainer itself).  lacks: what of a model it has no class or argument for, in words.
    optimizers: those it has; None for any.  unfused: whether attention may run without a flash
        kernel.
    """

    title: str
    vendors: Mapping[str, str]
    lacks: Callable[[ModelSpec, Release], list[str]] = _nothing
    optimizers: Callable[[Release], tuple[str, ...]] | None = None
    unfused: bool = True
    source: str


SUPPORT: Mapping[str, Support] = {
    "torchtitan": Support(
        title="TorchTitan", vendors={"nvidia": "", "amd": ""}, lacks=_titan_lacks,
        optimizers=_titan_optimizers, unfused=False,
        source="torchtitan README (CUDA; ROCm in its CI, "
            ".github/workflows/integration_test_8gpu_features.yaml); "
        "0.3.0 config/configs.py (fused_opt_states_bf16)",
    ),
    "megatron": Support(
        title="Megatron-LM", vendors={"nvidia": "", "amd": "ROCm/Megatron-LM"},
        lacks=_megatron_lacks,
        optimizers=lambda release: ("adamw", "adamw-bf16-states", "sgd"),
        source="Megatron-LM core 0.14 arguments.py; AMD maintains the fork "
            "github.com/ROCm/Megatron-LM",
    ),
    "megatron-deepspeed": Support(
        title="Megatron-DeepSpeed", vendors={"nvidia": "", "amd": "ROCm/Megatron-DeepSpeed"},
        source="github.com/deepspeedai/Megatron-DeepSpeed; AMD's fork "
            "github.com/ROCm/Megatron-DeepSpeed",
    ),
    "fsdp": Support(
        title="plain FSDP", vendors={"nvidia": "", "amd": ""},
        source="pytorch.org/get-started: CUDA and ROCm builds; the model's code is the user's own",
    ),
    "internevo": Support(
        title="InternEvo", vendors={"nvidia": ""},
        source="github.com/InternLM/InternEvo doc/en/install.md",
    ),
}  # fmt: skip
OFFERED: tuple[tuple[str, str | None], ...] = (
    ("torchtitan", "0.2.2"),
    ("torchtitan", "0.3.0"),
    ("megatron", "0.14"),
    ("fsdp", None),
)
"""Trainers and releases that a message may point to, best known first."""
STAND_IN = "cpu"
"""A pool of CPU processes stands for GPUs: there the planner's own reference program runs a
trainer's layouts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Able:
    """A trainer that can run a job.  version: the release it takes; None where releases do not
    matter.
    """

    trainer: str
    version: str | None

    def remedy(self, training: TrainingSpec) -> str:
        """What to set in this job to use it."""
        if self.trainer == training.trainer:
            return f"set training.trainer_version to {self.version}"
        by = f", with {OWN_CODE}" if self.trainer == "fsdp" else ""
        release = release_of(self.trainer, None)
        other = self.version is not None and release_of(self.trainer, self.version) != release
        newer = other and release_of(self.trainer, self.version).number != release.number
        return f"set training.trainer to {self.trainer}{f' {self.version}' if newer else ''}{by}"


def obstacles(context: Context) -> list[Violation]:
    """Everything that keeps the job's trainer from running any layout of it; empty where nothing
    does.
    """
    return [
        Violation(field=field, value=value, rule=rule, remedy=remedy)
        for field, value, rule, remedy in _obstacles(context)
    ]


def fork_needed(context: Context) -> str | None:
    """The fork of the trainer that this vendor's GPUs take; None where the trainer itself runs
    there.
    """
    return SUPPORT[context.training.trainer].vendors.get(context.cluster.gpu.vendor) or None


def trainers_that_can(model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> list[Able]:
    """The trainers we know that can run this job, best known first: what every message about
    another trainer asks.
    """
    found = []
    for trainer, version in OFFERED:
        other = training.model_copy(update={"trainer": trainer, "trainer_version": version})
        if not any(_faults(Context(model=model, cluster=cluster, training=other))):
            found.append(Able(trainer=trainer, version=version))
    return found


def check_supported(contexts: Iterable[Context]) -> None:
    """Raises UnsupportedError where the trainer can run none of these jobs, which differ in their
    cluster alone.
    """
    for context in contexts:
        found = obstacles(context)
        if not found:
            return
    if found:
        able = trainers_that_can(context.model, context.cluster, context.training)
        raise UnsupportedError(
            "; ".join(one.rule for one in found),
            remedy=_remedy(context, able),
            field=found[0].field,
            could=[
                one.trainer if one.version is None else f"{one.trainer} {one.version}"
                for one in able
            ],
            violations=[one.model_dump(mode="json") for one in found],
        )


def _obstacles(c: Context) -> Iterable[tuple[str, object, str, str]]:
    faults = list(_faults(c))
    if faults:
        remedy = _remedy(c, trainers_that_can(c.model, c.cluster, c.training))
        for field, value, rule, own in faults:
            yield field, value, rule, f"{own}; or {remedy}" if own else remedy


def _faults(c: Context) -> Iterable[tuple[str, object, str, str]]:
    """(field, value, rule, what would pass without another trainer, if anything)."""
    support, gpu = SUPPORT[c.training.trainer], c.cluster.gpu
    name = (
        f"{support.title} {c.training.release.line}"
        if c.trainer.name in ("torchtitan", "megatron")
        else support.title
    )
    if gpu.vendor not in support.vendors and gpu.vendor != STAND_IN:
        owners = choices(sorted(support.vendors))
        yield (
            "cluster.gpu",
            gpu.name,
            f"{support.title} does not run on {gpu.name}: it is for GPUs of {owners}",
            "",
        )
    lacking = support.lacks(c.model, c.training.release)
    if lacking:
        yield (
            "model",
            c.model.name,
            f"{name} cannot train {c.model.name}, for lack of: {', '.join(lacking)}",
            "",
        )
    optimizers = None if support.optimizers is None else support.optimizers(c.training.release)
    if optimizers is not None and c.training.optimizer not in optimizers:
        rule = f"{name} has no optimizer {c.training.optimizer}"
        yield "training.optimizer", c.training.optimizer, rule, f"use {choices(optimizers)}"
    if c.training.attention_kernel == "unfused" and not support.unfused:
        rule = f"{name} attends with a flash kernel"
        yield "training.attention_kernel", "unfused", rule, "leave attention_kernel out"


def _remedy(c: Context, able: list[Able]) -> str:
    if able:
        return "; or ".join(one.remedy(c.training) for one in able)
    vendor, gpu = c.cluster.gpu.vendor, c.cluster.gpu.name
    if all(vendor not in support.vendors for support in SUPPORT.values()) and vendor != STAND_IN:
        other = f"; {OUTSIDE[vendor]} could" if vendor in OUTSIDE else ""
        return f"no trainer we know trains on {gpu}{other}"
    return "no trainer we know can train this job"
