"""Seconds of the exchange of routed tokens between expert-parallel ranks, by dispatcher.

alltoall: every copy of a token is sent to the rank of its expert.
allgather: every rank gets all tokens of the group, and the outputs are reduced.
deepep, hybridep: a token is sent once to each node that has one of its experts, over the NICs of
    the rank of the same place there, and from there once to each rank that has one, over NVLink.

Letters: U distinct layouts.
Sources: Megatron-Core transformer/moe/token_dispatcher.py, torchtitan
distributed/expert_parallel.py, DeepEP README (normal kernels), micro.csv.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import BoolColumn, FloatColumn, in_order
from planner.cost.layer.context import AXES, CostContext, OpCall, OpCost, cost
from planner.specs.layout import MOE_DISPATCHERS
from planner.specs.model import ModelSpec
from planner.work import axes
from planner.work.ops import Collective, Op

ALLTOALL, ALLGATHER, DEEPEP, HYBRIDEP = (
    MOE_DISPATCHERS.index(name) for name in ("alltoall", "allgather", "deepep", "hybridep")
)
COUNT_BYTES = 8.0  # of an expert's number of tokens, int64
EXCHANGE_LAUNCHES = 4.0  # the call, the collective, its stream events and copies; judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One library's dispatch and combine in 16 bits, fitted to micro.csv.

    t = base + B max(own + copies c / bandwidth inside, n / (outer x bandwidth outside))

    B: bytes of a rank's tokens, each once.
    c, n: ranks and nodes that a token goes to, its own included.
    base_seconds: of one call.
    own_seconds: per byte of B, of reading, weighting and writing the tokens themselves.
    inner: share of the innermost level's bandwidth that its copies reach.
    outer: share of the NIC's, where the rank's own node counts as one of n.
    """

    base_seconds: float
    own_seconds: float
    inner: float
    outer: float


# micro.csv, DeepEP normal combine (16 bits): H100 and H200 on 1, 2 and 4 nodes; B200 and B300 on
# one node (its inner share is of twice the bandwidth: few SMs, not the links, are the limit).
_HOPPER = Kernels(base_seconds=59e-6, own_seconds=3.8e-12, inner=1.03, outer=1.25)
_BLACKWELL = Kernels(base_seconds=66e-6, own_seconds=4.5e-12, inner=0.72, outer=1.25)
# TMA moves whole tokens with 16 SMs, for which DeepEP takes 20 to 24 (DeepEP, branch hybrid-ep).
# Nobody published its curve: DeepEP's links without the time of the tokens themselves; judgement.
DISPATCHERS: Mapping[int, Callable[[str], Kernels]] = {
    DEEPEP: lambda family: _BLACKWELL if family == "blackwell" else _HOPPER,
    HYBRIDEP: lambda family: replace(
        _BLACKWELL if family == "blackwell" else _HOPPER, own_seconds=1.0e-12
    ),
}


def reached(places: FloatColumn, top_k: float) -> FloatColumn:
    """Number of places that a token is sent to, where each holds as many experts.

    places (1 - (1 - 1 / places)^top_k), for uniform choices.
    """
    return np.asarray(places * (1.0 - (1.0 - 1.0 / np.maximum(places, 1.0)) ** top_k))


def exchange_cost(context: CostContext, op: Collective, model: ModelSpec) -> OpCost:
    """Cost of one direction of the exchange: `dispatch` or `combine`.

    Alltoall also exchanges the counts of tokens before it dispatches, in the forward alone. Of any
    dispatcher (`axes.ANY`) it is the least that one of the trainer's takes.
    """
    batch, size = context.batch, len(context.batch)
    applies = batch.ep > 1
    forward, backward = np.zeros((len(AXES), size)), np.zeros((len(AXES), size))
    place = AXES.index("ep")
    hidden = hidden_share(context)
    asked = {int(kind) for kind in np.unique(batch.moe_dispatcher[applies])}
    every = sorted(map(MOE_DISPATCHERS.index, context.rules.moe_dispatchers))
    seconds = {
        kind: tuple(
            in_order([call.exposed for call in calls if call.backward is backward])
            for backward in (False, True)
        )
        for kind in (sorted(asked - {axes.ANY}) if axes.ANY not in asked else every)
        for calls in (_calls(context, op, model, kind, hidden),)
    }
    for kind in asked:
        those = list(seconds.values()) if kind == axes.ANY else [seconds[kind]]
        rows = applies & (batch.moe_dispatcher == kind)
        for target, of_each in zip((forward, backward), zip(*those, strict=True), strict=True):
            target[place] = np.where(rows, np.minimum.reduce(of_each), target[place])
    return cost(
        context,
        exposed_forward=forward,
        exposed_backward=backward,
        singles=np.where(applies, EXCHANGE_LAUNCHES, 0.0),
    )


def exchange_calls(context: CostContext, op: Collective, model: ModelSpec) -> list[OpCall]:
    """The collectives of one direction of the exchange, 0 where their dispatcher does not run."""
    batch, hidden, found = context.batch, hidden_share(context), []
    for kind in np.unique(batch.moe_dispatcher[batch.ep > 1]).tolist():
        runs = (batch.ep > 1) & (batch.moe_dispatcher == kind)
        found += [
            replace(
                call,
                payload=call.payload * runs,
                seconds=call.seconds * runs,
                exposed=call.exposed * runs,
            )
            for call in _calls(context, op, model, kind, hidden)
        ]
    return found


def hidden_share(context: CostContext) -> FloatColumn:
    """Share of the exchange that runs under another microbatch's compute, (U,).

    DualPipeV hides it in another way (`forward_backward_overlap`).
    """
    return np.where(context.overlaps_exchange, context.device.profile.ep_hidden, 0.0)


def unpaired_exchange(
    overlaps: BoolColumn, exposed: FloatColumn, idle: FloatColumn, ep_hidden: FloatColumn | float
) -> FloatColumn:
    """Seconds that all exchanges would add to a step if none overlapped with compute, (N,).

    overlaps (N,): see `rules.experts.overlaps_exchange`.
    exposed (N,): seconds of their exchanges that nothing hides.
    idle (N,): seconds in which the device waits for launches, and would for fewer instead.
    """
    hidden = exposed * ep_hidden / (1.0 - ep_hidden)
    return np.where(overlaps, np.maximum(hidden - idle, 0.0), 0.0)


def under_shared_experts(ops: Sequence[Op], costs: list[OpCost]) -> list[OpCost]:
    """Hides the forward's combine under the compute of shared experts.

    The routed outputs come back on their own stream; shared experts are called before they are
    read. The backward waits.
    """
    at = next((index for index, op in enumerate(ops) if op.name == "combine"), None)
    shared = [c.forward for op, c in zip(ops, costs, strict=True) if op.name.startswith("shared_")]
    if at is None or not shared:
        return costs
    place, exposed = AXES.index("ep"), costs[at].exposed_forward.copy()
    exposed[place] = np.maximum(exposed[place] - np.sum(shared, axis=0), 0.0)
    return [*costs[:at], replace(costs[at], exposed_forward=exposed), *costs[at + 1 :]]


def _calls(
    context: CostContext, op: Collective, model: ModelSpec, kind: int, hidden: FloatColumn
) -> list[OpCall]:
    """The collectives with this dispatcher, forward and backward.

    hidden: share of the exchange that runs under compute; counts are always waited for.
    """
    group, sizes = context.group("ep"), context.sizes
    names: tuple[str, str] = ("all-to-all", "all-to-all")
    kernels = None
    top_k = model.num_computing_per_tok
    tokens = sizes["tokens_sent"] / top_k
    sent = tokens * sizes["expert_hidden"] * context.width_bytes("compute")
    if kind in DISPATCHERS:
        fabric, payload = context.fabric, sent
        kernels = MOE_DISPATCHERS[kind], reached(group[0], top_k)
        both = kernel_seconds(
            sent,
            (top_k, model.topk_group if model.n_group else 0),
            DISPATCHERS[kind](context.device.gpu.family),
            group,
            fabric.gpus[0],
            (fabric.bandwidth[0], fabric.bandwidth[min(1, len(fabric.bandwidth) - 1)]),
        )
        seconds = both, both
    elif kind == ALLGATHER:
        payload = sent * group[0]
        gathers = context.collective_seconds("all-gather", payload, "ep")
        reduces = context.collective_seconds("reduce-scatter", payload, "ep")
        dispatches = op.name == "dispatch"
        names = ("all-gather", "reduce-scatter") if dispatches else ("reduce-scatter", "all-gather")
        seconds = (gathers, reduces) if dispatches else (reduces, gathers)
    else:
        payload = context.bytes_of(op.tensor)
        both = context.collective_seconds("all-to-all", payload, "ep")
        seconds = both, both
    found = [
        OpCall(
            axis="ep",
            operation=name,
            backward=backward,
            payload=payload,
            seconds=took,
            exposed=took * (1.0 - hidden),
            kernels=kernels,
        )
        for backward, name, took in zip((False, True), names, seconds, strict=True)
    ]
    if op.name == "dispatch" and kind == ALLTOALL:
        counts = np.full(len(context.batch), COUNT_BYTES * model.num_experts)
        took = context.collective_seconds("all-to-all", counts, "ep")
        found.append(replace(found[0], payload=counts, seconds=took, exposed=took))
    return found


def kernel_seconds(
    sent_bytes: FloatColumn,
    routing: tuple[float, int],
    kernels: Kernels,
    group: tuple[FloatColumn, FloatColumn],
    domain: float,
    bandwidth: tuple[float, float],
) -> FloatColumn:
    """Seconds of one dispatch or combine, (U,).

    sent_bytes (U,): of the tokens, each once; the busiest rank's are its imbalance more.
    routing: experts of a token; groups of experts (DeepSeek-V3), which bound its nodes, or 0.
    group: degree and stride of the ranks.
    domain: GPUs of the innermost level.
    bandwidth: of that level and of the next.
    """
    (top_k, groups), (degree, stride) = routing, group
    inside = np.clip(np.floor(domain / stride), 1.0, degree)
    nodes, ranks = reached(np.ceil(degree / inside), top_k), reached(degree, top_k)
    nodes = np.minimum(nodes, float(groups)) if groups else nodes
    own = kernels.own_seconds + ranks / (kernels.inner * bandwidth[0])
    across = np.where(degree > inside, nodes / (kernels.outer * bandwidth[1]), 0.0)
    return np.asarray(kernels.base_seconds + sent_bytes * np.maximum(own, across))
