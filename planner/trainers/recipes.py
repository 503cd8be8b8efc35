"""NVIDIA's recipes for models with experts: dispatcher, CUDA graphs and overlap of the exchange.

NeMo and Megatron-Bridge run them by default. They differ by release, machine and number format. A
recipe is of a model with these experts: how many, and the hidden size.
Source: Megatron-Bridge 0.2 to 0.5 scripts/performance/configs (moe_flex_dispatcher_backend,
cuda_graph_impl, moe_a2a_overlap; of several variants the last), 0.6
src/megatron/bridge/perf_recipes.
"""

from dataclasses import dataclass

from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import CudaGraphs, TrainingSpec
from planner.trainers.megatron import NATIVE
from planner.trainers.registry import TRAINERS, training_release
from planner.trainers.release import named

MODELS = {
    (256, 7168): "deepseek-v3",
    (128, 4096): "qwen3-235b",
    (128, 2048): "qwen3-30b",
    (512, 2048): "qwen3-next",
    (384, 7168): "kimi-k2",
    (128, 2880): "gpt-oss-120b",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecipe:
    """One recipe's values; `since` is the month of the NeMo release that it came with."""

    since: str
    dispatcher: str
    graphs: CudaGraphs
    overlap: bool


# model, machines (rack: GB200 and GB300; node: B200 and B300; hopper), formats ("": all), since,
# dispatcher, graphs, whether the exchange is overlapped; a later row outranks an earlier one
_ROWS = """
deepseek-v3   rack    -      2025-11  hybridep  partial  no
deepseek-v3   rack    mxfp8  2026-06  hybridep  full     yes
deepseek-v3   node    -      2026-02  hybridep  none     no
deepseek-v3   node    mxfp8  2026-06  deepep    partial  yes
deepseek-v3   hopper  -      2025-11  deepep    none     yes
deepseek-v3   hopper  -      2026-02  hybridep  none     no
qwen3-235b    rack    -      2025-11  hybridep  partial  no
qwen3-235b    rack    mxfp8  2026-06  hybridep  full     yes
qwen3-235b    node    -      2025-11  alltoall  none     yes
qwen3-235b    node    -      2026-02  alltoall  none     no
qwen3-235b    node    mxfp8  2026-08  hybridep  full     yes
qwen3-235b    hopper  -      2025-11  alltoall  none     yes
qwen3-30b     rack    -      2025-11  hybridep  partial  no
qwen3-30b     rack    mxfp8  2026-06  hybridep  full     yes
qwen3-30b     node    -      2025-11  alltoall  partial  no
qwen3-30b     node    -      2026-04  hybridep  partial  no
qwen3-30b     node    mxfp8  2026-08  hybridep  full     yes
qwen3-30b     hopper  -      2025-11  alltoall  none     yes
qwen3-30b     hopper  -      2026-02  deepep    none     yes
qwen3-30b     hopper  -      2026-04  hybridep  none     no
qwen3-30b     hopper  bf16   2026-04  hybridep  partial  no
qwen3-next    rack    -      2026-04  hybridep  partial  no
qwen3-next    node    -      2026-04  deepep    none     no
kimi-k2       rack    -      2026-04  hybridep  partial  no
gpt-oss-120b  rack    -      2026-04  hybridep  none     yes
gpt-oss-120b  rack    bf16   2026-06  alltoall  none     yes
gpt-oss-120b  rack    mxfp8  2026-06  hybridep  full     yes
gpt-oss-120b  node    -      2026-04  hybridep  none     no
gpt-oss-120b  node    -      2026-06  alltoall  none     no
"""
RECIPES = tuple(tuple(line.split()) for line in _ROWS.strip().splitlines())


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
    name = MODELS.get((model.num_experts, model.hidden_size))
    found = None
    for model_name, machine, formats, since, dispatcher, graphs, overlap in RECIPES:
        if (model_name, machine) != (name, _machine(cluster)) or since > month:
            continue
        if formats in ("-", precision) and dispatcher in rules.at(release).moe_dispatchers:
            found = ExpertRecipe(
                since=since,
                dispatcher=dispatcher,
                graphs=graphs,  # type: ignore[arg-type]  # a word of the table
                overlap=overlap == "yes",
            )
    return found


def _month(training: TrainingSpec, newest: bool) -> str:
    """Month of the NeMo release, or that a release of Megatron-Bridge came with; "" for no recipe.

    A job that names another release, or none, is of somebody who wrote the flags: a published run
    of Qwen3 30B-A3B under Megatron-Bridge (its issue 949) took 14.4 s without the recipe's values,
    where the newest gives 11.7.
    """
    rules, release = TRAINERS[training.trainer], training_release(training)
    if release.named.distribution == NATIVE:
        return release.named.month
    if newest and rules.expert_recipes and training.trainer_version is None:
        return release.known.day
    number = named(training.trainer_version).number
    ours = rules.expert_recipes and number and f"{number.major}.{number.minor}" in rules.ships
    return release.known.day if ours else ""


def _machine(cluster: ClusterSpec) -> str:
    if cluster.gpu.family != "blackwell":
        return cluster.gpu.family
    return "rack" if cluster.gpu.scale_up.spans_nodes else "node"
