"""Context of the costs of a layer's operations, and the cost of one operation.

Letters: U distinct layouts.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from planner.columns import BoolColumn, FloatColumn, IntColumn, LayoutBatch
from planner.cost.layer.quantisation import Quantisation
from planner.cost.machine.device import Device
from planner.cost.network.collectives import fastest_lines, seconds_along
from planner.cost.network.topology import Fabric
from planner.specs.training import TrainingSpec
from planner.trainers.attention import library
from planner.trainers.base import TrainerRules
from planner.trainers.tp_overlap import Mechanism
from planner.work.axes import Group, group
from planner.work.ops import Attention, Collective, Gemm, Tensor

AXES = ("tp", "cp", "ep")
T = TypeVar("T")
FIXED_BYTES = {"fp32": 4.0, "index": 8.0, "byte": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostContext:
    """Inputs to the costs of a layer's operations besides the operation itself.

    graphs (U,): what is captured, index into CUDA_GRAPHS.
    overlaps_exchange (U,): see `rules.experts`.
    one_kernel (U,): experts in one kernel (`trainer_kernels.one_kernel_experts`).
    known: what was asked for already, by what it is of. What is handed out may not be changed.
    tp_hidden: by mechanism the share hidden of what it can hide of TP communication, (U,).
    """

    batch: LayoutBatch
    sizes: Mapping[str, FloatColumn]
    device: Device
    fabric: Fabric
    rules: TrainerRules
    training: TrainingSpec
    rank_order: tuple[str, ...]
    fused: BoolColumn
    quantisation: Quantisation
    experts: Quantisation
    graphs: IntColumn
    overlaps_exchange: BoolColumn
    one_kernel: BoolColumn
    tp_hidden: tuple[tuple[Mechanism, FloatColumn], ...] = ()
    amax_seconds: FloatColumn = field(default_factory=lambda: np.zeros(1))
    known: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value made for this key, once."""
        if key not in self.known:
            self.known[key] = make()
        found: T = self.known[key]
        return found

    def quantises(self, op: Gemm) -> Quantisation:
        """The precision recipes of this GEMM: those of linear layers or of routed experts."""
        return self.experts if op.role == "expert" else self.quantisation

    def listed(self, op: Gemm | Attention | Collective) -> FloatColumn:
        """Share of the layers, (U,), in which selective-op knows an operation's kernel."""
        if isinstance(op, Gemm):
            quantised = self.quantises(op)
            return 1.0 - quantised.share(op) * (1.0 - quantised.number("listed"))
        name = library(self.device.generation) if isinstance(op, Attention) else op.site
        return np.full(len(self.batch), float(name not in self.rules.unlisted))

    def collective_seconds(self, operation: str, payload: FloatColumn, axis: str) -> FloatColumn:
        """Seconds of one collective over the groups of this axis, (U,)."""
        profile, (degree, stride) = self.device.profile, self.group(axis)
        lines = self.remembered(
            ("lines", operation, axis),
            lambda: fastest_lines(operation, degree, stride, self.fabric, profile.nvls_gain),
        )
        return seconds_along(lines, payload, degree, profile.collective_seconds)

    def group(self, axis: str) -> Group:
        """(degree, stride) of a group of this axis, (U,) each; see `axes.group`."""
        return self.remembered(("group", axis), lambda: group(axis, self.batch, self.rank_order))

    def product(self, dims: Sequence[str]) -> FloatColumn:
        """Elements of a tensor with these dimensions, (U,)."""
        return self.remembered(tuple(dims), lambda: self._product(dims))

    def _product(self, dims: Sequence[str]) -> FloatColumn:
        found = np.ones(len(self.batch))
        for name in dims:
            found = found * self.sizes[name]
        return found

    @property
    def no_costs(self) -> dict[str, FloatColumn]:
        """A cost of zero for every field of `OpCost`; operations share the arrays."""
        return self.remembered("no costs", self._no_costs)

    def _no_costs(self) -> dict[str, FloatColumn]:
        zero, zeros3 = np.zeros(len(self.batch)), np.zeros((len(AXES), len(self.batch)))
        exposed = ("exposed_forward", "exposed_backward")
        for column in (zero, zeros3):
            column.flags.writeable = False
        return {one.name: zeros3 if one.name in exposed else zero for one in fields(OpCost)}

    def width_bytes(self, width: str) -> FloatColumn:
        return self.remembered(("width", width), lambda: self._width_bytes(width))

    def _width_bytes(self, width: str) -> FloatColumn:
        compute = self.batch.param_bytes
        if width == "linear":
            return self.quantisation.saved_bytes(compute)
        if width == "expert":
            return self.experts.saved_bytes(compute)
        if width == "weight":
            return np.zeros_like(compute) if self.rules.sharding.keeps_copies else compute
        return compute if width == "compute" else np.full_like(compute, FIXED_BYTES[width])

    def bytes_of(self, tensor: Tensor) -> FloatColumn:
        return self.remembered(
            (tensor.width, tensor.dims),
            lambda: self.product(tensor.dims) * self.width_bytes(tensor.width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One collective of an operation, for one microbatch, (U,).

    axis: whose group carries it; those that cut experts (`etp`) count as tensor parallelism.
    backward: of which direction.
    payload: bytes, as `collectives` counts them; 0 where it does not run.
    seconds: of the collective alone.
    exposed: of them, those that nothing hides.
    kernels: the library whose kernels do it instead of NCCL's, and the ranks that it reaches.
    """

    axis: str
    operation: str
    backward: bool
    payload: FloatColumn
    seconds: FloatColumn
    exposed: FloatColumn
    kernels: tuple[str, FloatColumn] | None = None

    @property
    def dimension(self) -> str:
        """The parallel dimension that it belongs to, one of AXES."""
        return "tp" if self.axis == "etp" else self.axis


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One operation for one microbatch; arrays are (U,), exposed ones (3 axes tp, cp, ep; U).

    forward, input_grad, weight_grad: seconds on the device, communication excluded.
    forward_kernels, backward_kernels: kernel launches, fused in the layouts that fuse.
    singles: kernels that are launched one by one in any case, in each direction.
    flops: of matrix products and attention in forward, on a rank with a mean share of the tokens.
    waits: times that the forward makes the host wait for the device.
    exposed_forward, exposed_backward: seconds of communication that nothing hides.
    """

    forward: FloatColumn
    input_grad: FloatColumn
    weight_grad: FloatColumn
    forward_kernels: FloatColumn
    backward_kernels: FloatColumn
    singles: FloatColumn
    waits: FloatColumn
    flops: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn


def cost(context: CostContext, **given: FloatColumn) -> OpCost:
    """An operation that has the given costs; all others are zero."""
    return OpCost(**(context.no_costs | given))
