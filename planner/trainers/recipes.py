"""NVIDIA's recipes for models with experts: dispatcher, graphs, overlap, and whether tokens drop.

NeMo and Megatron-Bridge run them by default. They differ by release, machine and number format. A
recipe is of a model with these experts: how many, the hidden size, and theirs.
Source: planner/catalog/expert_recipes.tsv, whose head says where its rows come from.
"""

import re
from dataclasses import dataclass

from planner.catalog.files import rows_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import CudaGraphs, TrainingSpec
from planner.trainers.megatron import NATIVE
from planner.trainers.registry import TRAINERS, training_release
from planner.trainers.release import named

DROPLESS_SINCE = "2025-11"
RECIPES = tuple(map(tuple, rows_of("expert_recipes")))
_PATCH = re.compile(r"\d\d\.\d\d(\.\d\d)")
MODELS = {
    (8, 4096, 14336): "mixtral-8x7b",
    (8, 6144, 16384): "mixtral-8x22b",
    (16, 5120, 8192): "llama4-scout",
    (128, 5120, 8192): "llama4-maverick",
    (256, 7168, 2048): "deepseek-v3",
    (128, 4096, 1536): "qwen3-235b",
    (128, 2048, 768): "qwen3-30b",
    (512, 2048, 512): "qwen3-next",
    (384, 7168, 2048): "kimi-k2",
    (128, 2880, 2880): "gpt-oss-120b",
    (128, 2688, 1856): "nemotron-3-nano",
    (512, 4096, 2688): "nemotron-3-super",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecipe:
    """Values of a recipe.

    since: the month of the NeMo release that it came with, and its patch ("2026-04.01").
    drops: each expert takes its mean share of rows (`training.moe_capacity_factor` 1).
    """

    since: str
    dispatcher: str
    graphs: CudaGraphs
    overlap: bool
    drops: bool


def expert_recipe(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    precision: str,
    *,
    newest: bool = False,
) -> ExpertRecipe | None:
    """The recipe of this model on this machine in the job's release; None where there is none.

    newest: a job that names no release takes the newest one.
    """
    rules, release = TRAINERS[training.trainer], training_release(training)
    month = _month(training, newest)
    name = MODELS.get((model.num_experts, model.hidden_size, model.moe_intermediate_size))
    machines, found = _machines(cluster), None
    for model_name, machine, formats, since, dispatcher, graphs, overlap in RECIPES:
        ended = overlap == "drops" and month >= DROPLESS_SINCE
        if model_name != name or machine not in machines or since > month or ended:
            continue
        if formats in ("-", precision) and dispatcher in rules.at(release).moe_dispatchers:
            found = ExpertRecipe(
                since=since,
                dispatcher=dispatcher,
                graphs=graphs,  # type: ignore[arg-type]  # a word of the table
                overlap=overlap == "yes",
                drops=overlap == "drops",
            )
    return found


def _month(training: TrainingSpec, newest: bool) -> str:
    """Month and patch of the NeMo release, or that a release of Megatron-Bridge came with.

    "" for no recipe.

    A job that names another release, or none, is of somebody who wrote the flags: a published run
    of Qwen3 30B-A3B under Megatron-Bridge (its issue 949) took 14.4 s without the recipe's values,
    where the newest gives 11.7.
    """
    rules, release = TRAINERS[training.trainer], training_release(training)
    if release.named.distribution == NATIVE:
        return release.named.month + "".join(_PATCH.findall(release.named.text)[:1])
    if newest and rules.expert_recipes and training.trainer_version is None:
        return release.known.day
    number = named(training.trainer_version).number
    ours = rules.expert_recipes and number and f"{number.major}.{number.minor}" in rules.ships
    return release.known.day if ours else ""


def _machines(cluster: ClusterSpec) -> tuple[str, str]:
    gpu = cluster.gpu
    kind = "rack" if gpu.scale_up.spans_nodes else "node"
    return gpu.name.partition("-")[0], kind if gpu.family == "blackwell" else gpu.family
