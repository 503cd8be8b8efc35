"""What the host adds to the time of one unit: launches that the device waits for, and host waits.

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
the host's wait for their number stay.
Sources: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution" and "CUDA Graphs";
    Megatron-LM core 0.16 megatron/core/full_cuda_graph.py, transformer/cuda_graphs.py (scopes attn,
    mlp, moe_router, moe_preprocess).
Letters: O operations of the unit, U distinct layouts.
"""

from collections.abc import Sequence

import numpy as np

from planner.columns import FloatColumn, in_order
from planner.cost.layer.context import CostContext, OpCost
from planner.rules.cuda_graphs import FULL, PARTIAL
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


def host_time(
    context: CostContext,
    ops: Sequence[Op],
    costs: Sequence[OpCost],
    redone_OU: FloatColumn,
    *,
    is_layer: bool,
) -> dict[str, FloatColumn]:
    """Seconds that launches and waits add to one microbatch of a unit, (U,) each.

    redone_OU: share of each operation that the backward computes again. The layer's backward
        follows at once, so both share one queue.
    is_layer: not the embedding or the head, which `partial` leaves out.
    """
    single, module = context.device.profile.launch_seconds, _module_seconds(context)
    release = training_release(context.training)
    blocks, routers = release.named.launches_block, context.rules.at(release).captures_routing
    by_layer = is_layer & (context.graphs == PARTIAL)
    eager_OU = np.array([~by_layer | _stays_eager(op, routers) for op in ops]) & (
        context.graphs != FULL
    )
    forward_OU = eager_OU * [c.forward_kernels * module + c.singles * single for c in costs]
    backward_OU = eager_OU * [c.backward_kernels * module + c.singles * single for c in costs]
    kernels_OU = np.array([c.forward + c.exposed_forward.sum(axis=0) for c in costs])
    weight_grad = in_order([c.weight_grad for c in costs])
    grads = weight_grad + in_order([c.input_grad for c in costs])
    exposed = in_order([c.exposed_backward.sum(axis=0) for c in costs])
    waits_OU = np.array([c.waits for c in costs]) * (
        0.0 if blocks else REFILL_LAUNCHES * single * (context.graphs != FULL)
    )
    replays = module * by_layer

    def beyond(device: FloatColumn, host: FloatColumn) -> FloatColumn:
        return host if blocks else np.maximum(0.0, host - device)

    waits, waits_again = in_order(waits_OU), in_order(redone_OU * waits_OU)
    again = in_order(redone_OU * forward_OU)
    backward = beyond(
        grads + exposed + in_order(redone_OU * kernels_OU) + waits_again,
        in_order(backward_OU) + again + replays,
    )
    share = weight_grad / np.maximum(grads, 1e-12)
    return {
        "launch_forward_seconds": beyond(
            in_order(kernels_OU) + waits, in_order(forward_OU) + replays
        ),
        "launch_input_grad_seconds": (1.0 - share) * backward,
        "launch_weight_grad_seconds": share * backward,
        "wait_forward_seconds": waits,
        "wait_backward_seconds": waits_again,
    }


def _module_seconds(context: CostContext) -> FloatColumn:
    """Host seconds of one launch, (U,): of a fused module, or of one kernel."""
    in_modules = context.rules.fused_kernels & ~context.batch.compile
    profile = context.device.profile
    return np.where(in_modules, profile.fused_launch_seconds, profile.launch_seconds)


def _stays_eager(op: Op, captures_routing: bool) -> bool:
    """Whether graphs of layers leave it out.

    Its size is known only after routing, or it is the router and the release captures none.
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
    return not ROUTED.isdisjoint(dims) or ("experts" in dims and not captures_routing)
