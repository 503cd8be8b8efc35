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
from dataclasses import dataclass

import numpy as np

from planner.columns import BoolColumn, FloatColumn
from planner.cost.layer.context import CostContext, OpCost
from planner.rules.cuda_graphs import FULL, PARTIAL
from planner.rules.recomputed_modules import recomputes
from planner.specs.training import TrainingSpec
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


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds of the host for one microbatch of a unit.

    forward_OU: launches of each operation's forward, which a recomputation repeats.
    waits_OU: its waits for the device.
    backward_OU: launches of each operation's backward, recomputation left out.
    """

    forward_OU: FloatColumn
    waits_OU: FloatColumn
    backward_OU: FloatColumn


def launches(
    context: CostContext, ops: Sequence[Op], costs: Sequence[OpCost], *, is_layer: bool
) -> Launches:
    """Launches by the host for one microbatch of a unit.

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
    return Launches(
        forward_OU=eager_OU * [c.forward_kernels * module + c.singles * single for c in costs],
        waits_OU=np.array([c.waits for c in costs]) * refill,
        backward_OU=eager_OU * [c.backward_kernels * module + c.singles * single for c in costs],
    )


def replays(context: CostContext, *, is_layer: bool) -> FloatColumn:
    """Seconds of the host for replaying what graphs captured of a unit, in each direction, (U,)."""
    by_layer = is_layer & (context.graphs == PARTIAL)
    return np.asarray(_module_seconds(context) * by_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """One microbatch of units: what the device works, and what the host does; all of one shape.

    forward, again: kernels and communication that nothing hides, in forward and recomputed.
    input_grad, weight_grad, exposed_backward: the same of the rest of the backward.
    launch_forward, launch_again, launch_backward: the host's launches for these.
    wait_forward, wait_again: its waits for the device, in forward and in recomputation.
    replays: of captured graphs, in each direction.
    """

    forward: FloatColumn
    again: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn
    exposed_backward: FloatColumn
    launch_forward: FloatColumn
    launch_again: FloatColumn
    launch_backward: FloatColumn
    wait_forward: FloatColumn
    wait_again: FloatColumn
    replays: FloatColumn


def host_time(training: TrainingSpec, unit: UnitSeconds) -> dict[str, FloatColumn]:
    """Seconds that launches and waits add to one microbatch of units.

    The layer's backward follows its recomputation at once, so both share one queue.
    """
    blocks = training_release(training).named.launches_block

    def beyond(device: FloatColumn, host: FloatColumn) -> FloatColumn:
        return host if blocks else np.maximum(0.0, host - device)

    grads = unit.weight_grad + unit.input_grad
    backward = beyond(
        grads + unit.exposed_backward + unit.again + unit.wait_again,
        unit.launch_backward + unit.launch_again + unit.replays,
    )
    share = unit.weight_grad / np.maximum(grads, 1e-12)
    return {
        "launch_forward_seconds": beyond(
            unit.forward + unit.wait_forward, unit.launch_forward + unit.replays
        ),
        "launch_input_grad_seconds": (1.0 - share) * backward,
        "launch_weight_grad_seconds": share * backward,
        "wait_forward_seconds": unit.wait_forward,
        "wait_backward_seconds": unit.wait_again,
    }


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
