"""Time that the host adds to one unit: launches that the device waits for, and host waits.

The host launches kernels ahead of the device. A unit whose launches take longer than its kernels
and exposed communication leaves the device idle for the rest. Where the host must read a number
from the device (dropless experts: how many rows each rank sends), the queue runs dry, and the
device idles until it is refilled. The launches that refill it are launches of the unit, so a
launch-bound unit does not pay them twice:
    seconds = max(device + waits, host)
CUDA_LAUNCH_BLOCKING=1 makes every launch wait for its kernel, so that nothing runs ahead:
    seconds = device + host

CUDA graphs replay many kernels by one launch. `full` captures the forward and backward of a whole
step, which can hold no host wait. `partial` captures of each layer what has sizes known in advance,
as one graph in each direction. Experts' rows are known only after routing, so their launches and
the host's wait for their number stay, unless each expert takes just its capacity
(`training.moe_capacity_factor`): then nothing waits, and graphs of layers hold experts too.
Sources: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution" and "CUDA Graphs";
    Megatron-LM core 0.16 megatron/core/full_cuda_graph.py, transformer/cuda_graphs.py (scopes attn,
    mlp, moe_router, moe_preprocess; moe only for drop-padding), transformer/moe/
    token_dispatcher.py (_maybe_dtoh_and_synchronize).
Letters: O operations of the unit, U distinct layouts.
"""

from collections.abc import Sequence

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.layer.context import CostContext, OpCost
from planner.rules.cuda_graphs import FULL, PARTIAL
from planner.rules.recomputed_modules import recomputes
from planner.trainers.registry import training_release
from planner.work.ops import Attention, Collective, Elementwise, Gemm, Op

# Launches that it takes, after the host has waited for the device, until the host is ahead of it
# again; judgement.
REFILL_LAUNCHES = 5.0
# Sizes that only routing decides
ROUTED = frozenset(
    {
        "tokens_routed", "tokens_grouped", "tokens_per_expert", "tokens_exchanged", "tokens_sent",
        "tokens_copied", "tokens_unsorted", "tokens_regrouped",
    }
)  # fmt: skip


def launches(
    context: CostContext, ops: Sequence[Op], costs: Sequence[OpCost], *, is_layer: bool
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Seconds of the host for one microbatch of a unit, (O, U) each.

    (launches of the forwards, which a recomputation repeats, waits for the device, launches of the
    backwards, recomputation left out).
    is_layer: not the embedding or the head, which `partial` leaves out.
    """
    single, module = context.device.profile.launch_seconds, _module_seconds(context)
    release = training_release(context.training)
    routers = context.rules.at(release).captures_routing & ~recomputes(context.batch, "moe")
    dropless = context.training.moe_capacity_factor is None
    by_layer = is_layer & (context.graphs == PARTIAL)
    captures = context.graphs != FULL
    eager = [~by_layer | (dropless & _stays_eager(op, routers)) for op in ops]
    eager_OU = np.array(eager) & captures
    refills = dropless and not release.named.launches_block
    refill = REFILL_LAUNCHES * single * captures if refills else 0.0
    return (
        eager_OU * [c.forward_kernels * module + c.singles * single for c in costs],
        np.array([c.waits for c in costs]) * refill,
        eager_OU * [c.backward_kernels * module + c.singles * single for c in costs],
    )


def replays(context: CostContext, *, is_layer: bool) -> FloatColumn:
    """Seconds of the host for replaying what graphs captured of a unit, in each direction, (U,)."""
    by_layer = is_layer & (context.graphs == PARTIAL)
    return np.asarray(_module_seconds(context) * by_layer)


def _module_seconds(context: CostContext) -> FloatColumn:
    """Host seconds of one launch, (U,): of a fused module, or of one kernel."""
    in_modules = context.rules.fused_kernels & ~context.batch.compile
    profile = context.device.profile
    return np.where(in_modules, profile.fused_launch_seconds, profile.launch_seconds)


def _stays_eager(op: Op, captures_routing: BoolColumn) -> BoolColumn:
    """Whether graphs of layers leave an operation out, (U,).

    Its size is known only after routing, or it is the router, which the release does not capture or
    recomputes with its experts.
    Source: Megatron-LM core 0.16 transformer_config.py (moe recompute and moe_router).
    """
    match op:
        case Gemm():
            dims = op.rows + op.cols
        case Collective():
            dims = op.tensor.dims
        case Elementwise():
            dims = op.dims
        case Attention():
            dims = ()
    return (not ROUTED.isdisjoint(dims)) | (("experts" in dims) & ~captures_routing)
