"""NVIDIA's recipes for models with experts: dispatcher, graphs, overlap, and whether tokens drop.

NeMo and Megatron-Bridge run them by default. They differ by release, machine and number format. A
recipe is of a model with these experts: how many, the hidden size, and theirs.
Source: Megatron-Bridge 0.2 to 0.5 scripts/performance/configs (moe_flex_dispatcher_backend,
cuda_graph_impl, moe_a2a_overlap; of several variants the last), 0.6
src/megatron/bridge/perf_recipes. Until NeMo 25.09 recipes dropped tokens: NeMo 2.0 to 2.4
nemo/collections/llm/recipes and scripts/performance (MegatronTokenDropCallback, cuda_graphs of
recommended_model_configs), Megatron-Bridge 0.1 scripts/performance (apply_moe_token_drop); those
from 25.11 on are "token-dropless" (docs/performance-summary.md).
"""

import re
from dataclasses import dataclass

from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import CudaGraphs, TrainingSpec
from planner.trainers.megatron import NATIVE
from planner.trainers.registry import TRAINERS, training_release
from planner.trainers.release import named

DROPLESS_SINCE = "2025-11"
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


# model, machines (rack: GB200 and GB300; node: B200 and B300; hopper; or one of these alone),
# formats ("-": all), since, dispatcher, graphs, whether the exchange is overlapped ("drops": tokens
# are dropped instead, which no recipe does from 25.11 on); a later row outranks an earlier one
_ROWS = """
mixtral-8x7b      hopper  -      2024-09     alltoall  none     drops
mixtral-8x7b      rack    -      2025-04     alltoall  partial  drops
mixtral-8x7b      node    -      2025-04     alltoall  partial  drops
mixtral-8x22b     hopper  -      2024-09     alltoall  none     drops
mixtral-8x22b     node    -      2025-04     alltoall  none     drops
llama4-scout      rack    -      2025-04     alltoall  none     drops
llama4-scout      rack    -      2025-07     alltoall  partial  drops
llama4-scout      node    -      2025-04     alltoall  none     drops
llama4-scout      hopper  -      2025-04     alltoall  partial  drops
llama4-maverick   rack    -      2025-04     alltoall  none     drops
llama4-maverick   node    -      2025-04     alltoall  none     drops
llama4-maverick   hopper  -      2025-04     alltoall  partial  drops
deepseek-v3       rack    -      2025-04     alltoall  none     drops
deepseek-v3       rack    -      2025-07     alltoall  partial  drops
deepseek-v3       rack    -      2025-09     alltoall  none     drops
deepseek-v3       node    -      2025-04     alltoall  none     drops
deepseek-v3       hopper  -      2025-04     alltoall  none     drops
deepseek-v3       hopper  -      2025-07     deepep    none     no
deepseek-v3       hopper  -      2025-09     deepep    none     yes
qwen3-235b        rack    -      2025-07     alltoall  partial  drops
qwen3-235b        node    -      2025-07     alltoall  none     drops
qwen3-235b        hopper  -      2025-07     alltoall  none     drops
qwen3-30b         rack    -      2025-07     alltoall  partial  drops
qwen3-30b         node    -      2025-07     alltoall  partial  drops
qwen3-30b         hopper  -      2025-07     alltoall  none     drops
deepseek-v3       rack    -      2025-11     hybridep  partial  no
deepseek-v3       rack    mxfp8  2026-06     hybridep  full     yes
deepseek-v3       node    -      2026-02     hybridep  none     no
deepseek-v3       node    mxfp8  2026-04.01  deepep    partial  yes
deepseek-v3       node    nvfp4  2026-04.01  deepep    none     yes
deepseek-v3       hopper  -      2025-11     deepep    none     yes
deepseek-v3       hopper  -      2026-02     hybridep  none     no
qwen3-235b        rack    -      2025-11     hybridep  partial  no
qwen3-235b        rack    mxfp8  2026-06     hybridep  full     yes
qwen3-235b        node    -      2025-11     alltoall  none     yes
qwen3-235b        node    -      2026-02     alltoall  none     no
qwen3-235b        node    mxfp8  2026-06.01  hybridep  full     yes
qwen3-235b        hopper  -      2025-11     alltoall  none     yes
qwen3-30b         rack    -      2025-11     hybridep  partial  no
qwen3-30b         rack    mxfp8  2026-06     hybridep  full     yes
qwen3-30b         node    -      2025-11     alltoall  partial  no
qwen3-30b         node    -      2026-02.01  hybridep  partial  no
qwen3-30b         node    mxfp8  2026-06.01  hybridep  full     yes
qwen3-30b         hopper  -      2025-11     alltoall  none     yes
qwen3-30b         hopper  bf16   2025-11     alltoall  partial  yes
qwen3-30b         hopper  -      2026-02     deepep    none     yes
qwen3-30b         hopper  bf16   2026-02     deepep    partial  yes
qwen3-30b         hopper  -      2026-02.01  hybridep  none     no
qwen3-30b         hopper  bf16   2026-02.01  hybridep  partial  no
qwen3-next        rack    -      2026-04     hybridep  partial  no
qwen3-next        node    -      2026-04     deepep    none     no
kimi-k2           rack    -      2026-02.01  hybridep  partial  no
gpt-oss-120b      rack    -      2026-04     hybridep  none     yes
gpt-oss-120b      rack    -      2026-04.01  alltoall  none     yes
gpt-oss-120b      rack    mxfp8  2026-06     hybridep  full     yes
gpt-oss-120b      node    -      2026-04     hybridep  none     no
gpt-oss-120b      node    -      2026-04.01  alltoall  none     no
nemotron-3-nano   rack    -      2026-02.01  hybridep  partial  no
nemotron-3-nano   node    -      2026-02.01  hybridep  partial  no
nemotron-3-nano   hopper  -      2026-02.01  hybridep  partial  no
nemotron-3-super  rack    -      2026-04     hybridep  partial  no
nemotron-3-super  node    -      2026-04     hybridep  none     no
nemotron-3-super  node    nvfp4  2026-04     hybridep  partial  no
deepseek-v3       gb300   -      2026-02     hybridep  none     no
deepseek-v3       gb300   bf16   2026-02     hybridep  partial  no
deepseek-v3       gb300   mxfp8  2026-06     hybridep  full     yes
deepseek-v3       b300    -      2026-04.01  hybridep  partial  no
deepseek-v3       b300    mxfp8  2026-06.01  hybridep  full     yes
qwen3-235b        b300    -      2026-02     alltoall  none     yes
qwen3-235b        b300    -      2026-02.01  alltoall  none     no
qwen3-235b        b300    -      2026-04.01  hybridep  none     no
qwen3-235b        b300    mxfp8  2026-06.01  hybridep  full     yes
qwen3-30b         b300    -      2026-02     hybridep  partial  no
qwen3-30b         b300    mxfp8  2026-06     hybridep  full     yes
kimi-k2           gb300   -      2026-02.01  hybridep  none     no
gpt-oss-120b      gb300   -      2025-11     alltoall  partial  no
gpt-oss-120b      gb300   mxfp8  2026-06     hybridep  full     yes
gpt-oss-120b      b300    -      2026-02     alltoall  partial  no
gpt-oss-120b      b300    -      2026-04     hybridep  partial  no
nemotron-3-super  b300    -      2026-04     hybridep  partial  no
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
