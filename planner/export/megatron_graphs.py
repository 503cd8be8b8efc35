"""CUDA graphs in Megatron-LM's arguments, by release, and the way back.

Sources: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of core
    0.14 (--enable-cuda-graph, --external-cuda-graph), 0.15 (--cuda-graph-impl) and 0.16 (scopes are
    a list); docs/user-guide/features/cuda_graph.md and paged_stash.md of core 0.18
    (--cuda-graph-modules, static buffers for experts' rows).
"""

from planner.columns import LayoutBatch
from planner.export.base import Draft, Settings
from planner.export.megatron_read import Words, word
from planner.rules import Context
from planner.rules.cuda_graphs import captured
from planner.rules.recomputed_modules import recomputes
from planner.specs.training import CUDA_GRAPHS, CudaGraphs
from planner.trainers.release import Release

WHOLE_STEP = "full_iteration"
# Room for the rows of experts over a balanced load; judgement. A step that needs more runs again.
RANK_CAPACITY = 1.5


def graph_settings(draft: Draft, release: Release) -> Settings:
    """The settings for the graphs that were priced; none without any."""
    graphs = _graphs(draft)
    if graphs == "none":
        return {}
    own = _step(draft, release) if graphs == "full" else _layers(draft, release)
    return {**own, "te_rng_tracker": True}


def environment(draft: Draft) -> dict[str, str]:
    """Variables that expandable segments need beside graphs (core 0.16 cuda_graphs.py)."""
    graphs = draft.training.expandable_segments and _graphs(draft) != "none"
    return {"NCCL_GRAPH_REGISTER": "0"} if graphs else {}


def _graphs(draft: Draft) -> CudaGraphs:
    """As the job says, else as its recipe does with this layout."""
    job = Context(model=draft.model, cluster=draft.cluster, training=draft.training)
    return CUDA_GRAPHS[int(captured(LayoutBatch.from_layouts([draft.layout]), job)[0])]


def _step(draft: Draft, release: Release) -> Settings:
    """A graph of the forward and backward of a step. NaN checks read the device."""
    unchecked: Settings = {"no_check_for_nan_in_loss_and_grad": True}
    if release.before("0.15"):
        return {"enable_cuda_graph": True, "cuda_graph_scope": WHOLE_STEP, **unchecked}
    if release.before("0.18"):
        # arguments.py of 0.16 and 0.17 asserts it; a step that trains does not read it
        padded = "moe_pad_experts_for_cuda_graph_inference"
        unchecked[padded] = release.since("0.16") and draft.layout.ep > 1
        return {"cuda_graph_impl": "local", "cuda_graph_scope": WHOLE_STEP, **unchecked}
    settings: Settings = {"cuda_graph_impl": WHOLE_STEP, **unchecked}
    if not draft.model.is_moe or draft.training.moe_capacity_factor is not None:
        return settings
    capacity = f"{draft.training.moe_imbalance or RANK_CAPACITY:g}"
    draft.notes.append(
        f"--moe-expert-rank-capacity-factor {capacity} makes room for so many times the rows of "
        "a balanced load; a step that needs more runs twice."
    )
    return {
        **settings,
        "use_transformer_engine_op_fuser": True,
        "moe_expert_rank_capacity_factor": capacity,
        "moe_paged_stash": True,
    }


def _layers(draft: Draft, release: Release) -> Settings:
    """Graphs of layers: whole, but with dropless experts only the operations before these."""
    if draft.training.expandable_segments and release.before("0.16"):
        rule = f"excludes expandable segments of the allocator in core {release.number}"
        remedy = "set training.expandable_segments to false"
        draft.gap("training.cuda_graphs", rule, remedy, shown="partial")
    kinds = draft.model.layer_kinds()
    drops = draft.training.moe_capacity_factor is not None
    experts = any(kind.moe for kind in kinds)
    dense = any(kind.feeds and not kind.moe for kind in kinds)
    scans = "mamba2" in draft.model.mixers
    engine: Settings = {"cuda_graph_impl": "transformer_engine"}
    if release.before("0.16"):
        by: Settings = {"external_cuda_graph": True} if release.before("0.15") else engine
        return {**by, "cuda_graph_scope": "attn" if experts and not drops else "full"}
    name = "cuda_graph_scope" if release.before("0.18") else "cuda_graph_modules"
    scopes = ["attn", *["mamba"] * scans, *["mlp"] * dense]
    if experts and drops:
        scopes.append("moe")
    elif experts and not recomputes(LayoutBatch.from_layouts([draft.layout]), "moe").any():
        scopes += ["moe_router", "moe_preprocess"]
    return {**engine, name: scopes}


def read_graphs(words: Words) -> CudaGraphs | None:
    """The graphs that arguments capture; None for no graphs, Megatron's default."""
    kind = word(words, "cuda_graph_impl") or "none"
    scopes = [*words.get("cuda_graph_scope", ()), *words.get("cuda_graph_modules", ())]
    if kind == "none" and not {"enable_cuda_graph", "external_cuda_graph"} & words.keys():
        return None
    return "full" if kind == WHOLE_STEP or WHOLE_STEP in scopes else "partial"
