"""CUDA graphs: those a job captures, and those its trainer's release refuses.

A graph repeats what was recorded: the same shapes, and no host that waits for the device in
between. Each refusal is the trainer's own check.
"""

from collections.abc import Callable

import numpy as np

from planner.columns import BoolColumn, IntColumn, LayoutBatch
from planner.rules.base import Context, Rule, under
from planner.rules.expert_recipes import recipes, runs_as
from planner.specs.layout import AC_KINDS, MOE_DISPATCHERS
from planner.specs.training import CUDA_GRAPHS
from planner.trainers.megatron import DEV_0_15

NONE, PARTIAL, FULL = (CUDA_GRAPHS.index(name) for name in ("none", "partial", "full"))
NO_AC, HYBRIDEP = AC_KINDS.index("none"), MOE_DISPATCHERS.index("hybridep")
WHOLE_LAYERS = [AC_KINDS.index(kind) for kind in ("full", "selective-layer", "block", "uniform")]
OFF = "set training.cuda_graphs to none"


def captured(x: LayoutBatch, c: Context) -> IntColumn:
    """The graphs of each layout, (N,): index into CUDA_GRAPHS.

    A job that names none captures as its trainer's release does, and with experts under the
    dispatcher of NVIDIA's recipe as the recipe does. Where the release would refuse that, one has
    to switch graphs off.
    """
    given, usual = c.training.cuda_graphs, c.released.default_cuda_graphs
    graphs = np.full(np.shape(x.ep), CUDA_GRAPHS.index(given or usual))
    if given is not None:
        return graphs
    if usual != "none" and c.model.is_moe:
        graphs[x.ep > 1] = NONE  # without waits buffers hold the worst case: one asks for that
    for precision, recipe in recipes(c).items():
        graphs[runs_as(x, precision, recipe)] = CUDA_GRAPHS.index(recipe.graphs)
    for kind in _by_itself(c):
        for rule in _limits(c, CUDA_GRAPHS[kind]):
            graphs[(graphs == kind) & rule.broken(x, c)] = NONE
    return graphs


def by_layout(c: Context) -> bool:
    """Whether layouts of this job differ in what they capture."""
    return c.training.cuda_graphs is None and bool(_by_itself(c))


def columns_read(c: Context) -> tuple[str, ...]:
    if not by_layout(c):
        return ()
    limits = (rule for kind in _by_itself(c) for rule in _limits(c, CUDA_GRAPHS[kind]))
    own = {"ep", "moe_dispatcher", "precision"} if recipes(c) else set[str]()
    return tuple(sorted(own.union(*(rule.reads for rule in limits))))


def _by_itself(c: Context) -> set[int]:
    """Kinds of graphs that layouts may capture though the job names none."""
    kinds = {c.released.default_cuda_graphs, *(one.graphs for one in recipes(c).values())}
    return {CUDA_GRAPHS.index(kind) for kind in kinds - {"none"}}


def _limits(c: Context, graphs: str) -> tuple[Rule, ...]:
    training = c.training.model_copy(update={"cuda_graphs": graphs})
    job = Context(model=c.model, cluster=c.cluster, training=training)
    return tuple(rule for rule in CUDA_GRAPH_RULES if rule.applies(job))


def _capturing(
    trainer: str, *graphs: str, since: str = "", before: str = "", before_day: str = ""
) -> Callable[[Context], bool]:
    """Whether a job asks this trainer's releases for one of these graphs."""
    runs = under(trainer, since=since, before=before, before_day=before_day)
    return lambda c: c.training.cuda_graphs in graphs and runs(c)


def _eager_dispatch(ep: IntColumn, moe_dispatcher: IntColumn, c: Context) -> BoolColumn:
    """Whether the host waits; under Megatron-LM it does for the counts of one rank as well."""
    waits = np.asarray(moe_dispatcher != HYBRIDEP)
    eager = (ep == 1) | waits if c.released.fused_kernels else (ep > 1) & waits
    return np.asarray(eager & (c.training.moe_capacity_factor is None))


CUDA_GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        key="CUDA graphs exclude recomputation",
        field="ac",
        # core 0.10 to 0.15 transformer_config.py: "CUDA graphs not supported with activation
        # recomputation." NeMo 25.11 ships the dev branch behind 0.15 (Megatron-Bridge
        # docs/releases/software-versions.md: "dev:0.15.0"), whose recipes capture routers beside
        # recomputed modules (0.2.0 scripts/performance/configs/deepseek)
        applies=_capturing("megatron", "partial", "full", before="0.16", before_day=DEV_0_15),
        broken=lambda ac_kind: ac_kind != NO_AC,
        rule="{c.trainer.title} {c.release.number} has no CUDA graphs under activation "
        "recomputation",
        remedy=f"set ac to none, or {OFF}",
    ),
    Rule(
        key="CUDA graphs of layers exclude their recomputation",
        field="ac",
        # core 0.16 transformer_config.py: "full recompute is only supported with full iteration
        # CUDA graph."
        applies=_capturing("megatron", "partial", since="0.16"),
        broken=lambda ac_kind: np.isin(ac_kind, WHOLE_LAYERS),
        rule="{c.trainer.title} {c.release.number} recomputes whole layers only in CUDA graphs of "
        "a whole step",
        remedy=f"set ac to none or selective-attention, or {OFF}",
    ),
    Rule(
        key="CUDA graphs exclude pipelines",
        field="pp",
        # torchtitan 0.3 trainer.py, _validate_cuda_graphs
        applies=_capturing("torchtitan", "full"),
        broken=lambda pp: pp > 1,
        rule="{c.trainer.title} {c.release.number} has no CUDA graphs under pipeline parallelism; "
        "pp is {x.pp}",
        remedy=f"{OFF}, or pp to 1",
    ),
    Rule(
        key="CUDA graphs need a dispatcher that the host does not wait for",
        field="moe_dispatcher",
        # torchtitan 0.3 trainer.py, _validate_cuda_graphs: HybridEP with
        # non_blocking_capacity_factor; Megatron-LM core 0.18 docs/user-guide/features/
        # cuda_graph.md and paged_stash.md: HybridEP with moe_expert_rank_capacity_factor
        applies=lambda c: (
            c.model.is_moe
            and (
                _capturing("torchtitan", "full")(c)
                or _capturing("megatron", "full", since="0.18")(c)
            )
        ),
        broken=_eager_dispatch,
        rule="{c.trainer.title} {c.release.number} captures expert parallelism only where the "
        "host does not wait for the dispatch; {x.moe_dispatcher} makes it wait",
        remedy=f"{OFF}, or moe_dispatcher to hybridep and ep above 1",
    ),
    Rule(
        key="CUDA graphs exclude activation offload",
        field="activation_offload_layers",
        # core 0.15 transformer_config.py: "CUDA graphs not supported with CPU offloading."
        applies=_capturing("megatron", "partial", "full"),
        broken=lambda activation_offload_layers: activation_offload_layers > 0,
        rule="{c.trainer.title} {c.release.number} has no CUDA graphs with activations on the host",
        remedy=f"{OFF}, or activation_offload_layers to 0",
    ),
    Rule(
        key="CUDA graphs exclude CPU offload",
        field="cpu_offload",
        # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: the backward waits on the host
        # for gradients that are copied there, which a capture forbids
        applies=_capturing("torchtitan", "full"),
        broken=lambda cpu_offload: np.asarray(cpu_offload),
        rule="CUDA graphs cannot hold the host's waits for offloaded gradients",
        remedy=f"{OFF}, or cpu_offload to false",
    ),
)
