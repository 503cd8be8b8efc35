"""Seconds and bytes of one layer, the embedding or the head, for one microbatch on one rank.

They are what `unit_work` summed up, with what checkpointing saves and repeats.
Letters: U layouts that differ in the fields of `key`, K distinct layers. Arrays are (U,) or
(K + 2, U). Units are the model's distinct layers in the order of `ModelSpec.distinct_layers()`,
then the embedding, then the head.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from planner.columns import FloatColumn, IntColumn, LayoutBatch, in_order
from planner.cost.layer.trainer_kernels import fused_kernels
from planner.cost.layer.unit_work import QUANTITIES, EndBytes, Savings, UnitWork
from planner.precision import Recipe
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.registry import training_release
from planner.work.checkpointing import MEMORY_BUDGET, NONE, Mode, room, saved_by_budget

MODE = ("ac_kind", "ac_value")
SECONDS, FLOPS, *_, LAUNCHES, WAITS = range(len(QUANTITIES))
COMMUNICATION = slice(FLOPS + 1, LAUNCHES)
_KEY = (
    "tp", "cp", "ep", "etp", "sequence_parallel", "async_tp", "cp_method", "micro_batch_size",
    *MODE,
    "precision", "float8_all_gather", "param_dtype", "reduce_dtype", "compile", "moe_dispatcher",
)  # fmt: skip
PLANNED_WORKING = 0.5  # a compiled graph reuses its buffers (torch/_inductor/memory.py); judgement


def key(
    rank_order: tuple[str, ...], model: ModelSpec, recipes: tuple[Recipe, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layout fields that a unit's costs depend on: (their values, whether they are above 1).

    They are those of its own work, and the axes inside tp and cp, which place the groups of both.
    """
    outermost = max(rank_order.index("tp"), rank_order.index("cp"))
    places = tuple(name for name in rank_order[:outermost] if name not in _KEY)
    asks_for_pp = model.is_moe and any(recipe.experts_alone for recipe in recipes)
    return _KEY + places, ("pp",) if asks_for_pp and "pp" not in places else ()


@dataclass(frozen=True, kw_only=True)
class UnitCosts(EndBytes):
    """One microbatch of each unit on one rank; (K + 2, U) unless said otherwise.

    Seconds:
    forward_seconds, input_grad_seconds, weight_grad_seconds, recompute_seconds: kernels alone.
    launch_forward_seconds, launch_input_grad_seconds, launch_weight_grad_seconds: what the device
        idles because launches take longer than kernels (`host_time`).
    wait_forward_seconds, wait_backward_seconds: what it idles because the host waited for it.
    exposed_forward, exposed_backward (3 axes tp, cp, ep; K + 2; U): seconds of communication that
        nothing hides.
    redone_seconds: what weight gradients that are computed later recompute
        (`cost.layer.weight_grads`).

    Flops, of matmuls and attention:
    forward_flops, recompute_flops, redone_flops: of forward, `recompute_seconds`, `redone_seconds`.

    Bytes, those of ends as in `EndBytes`:
    saved_bytes: saved from forward to backward.
    transient_bytes, done_bytes, next_bytes, second_bytes: in backward: transient, done, following
        and second of `checkpointing.Kept`.
    working_bytes: computed in forward and freed there.
    held_bytes: bytes that wait for weight gradients computed later (`cost.layer.weight_grads`).
    """

    forward_seconds: FloatColumn
    input_grad_seconds: FloatColumn
    weight_grad_seconds: FloatColumn
    recompute_seconds: FloatColumn
    launch_forward_seconds: FloatColumn
    launch_input_grad_seconds: FloatColumn
    launch_weight_grad_seconds: FloatColumn
    wait_forward_seconds: FloatColumn
    wait_backward_seconds: FloatColumn
    exposed_forward: FloatColumn
    exposed_backward: FloatColumn
    redone_seconds: FloatColumn
    forward_flops: FloatColumn
    recompute_flops: FloatColumn
    redone_flops: FloatColumn
    saved_bytes: FloatColumn
    transient_bytes: FloatColumn
    done_bytes: FloatColumn
    next_bytes: FloatColumn
    second_bytes: FloatColumn
    working_bytes: FloatColumn
    held_bytes: FloatColumn

    @cached_property
    def forward(self) -> FloatColumn:
        """Seconds with exposed communication and what the host adds."""
        kernels = self.forward_seconds + self.exposed_forward.sum(axis=0)
        return np.asarray(kernels + self.launch_forward_seconds + self.wait_forward_seconds)

    @cached_property
    def input_grad(self) -> FloatColumn:
        """Costs of the backward without weight gradients; recomputation included."""
        kernels = self.input_grad_seconds + self.recompute_seconds
        kernels = kernels + self.exposed_backward.sum(axis=0)
        return np.asarray(kernels + self.launch_input_grad_seconds + self.wait_backward_seconds)

    @cached_property
    def weight_grad(self) -> FloatColumn:
        return self.weight_grad_seconds + self.launch_weight_grad_seconds

    @property
    def total(self) -> FloatColumn:
        """Seconds of forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def unit_costs(
    work: UnitWork,
    savings: Savings | None,
    rows: LayoutBatch,
    model: ModelSpec,
    training: TrainingSpec,
    rules: TrainerRules,
) -> UnitCosts:
    """Seconds and bytes of every unit of the model at U rows.

    work: of these rows, whatever their checkpointing.
    savings: of those rows that have a memory budget; None where none has.
    """
    again = _again(work, savings, rows, model.num_hidden_layers)
    once, exposed = work.again_all, again[COMMUNICATION]
    seconds, flops = again[SECONDS], again[FLOPS]
    redone = _device(again)
    mode = _mode(rows, seconds.shape, model.num_hidden_layers)
    keeps, stays = mode.kept(work), mode.graph_share
    by_group = rules.framework.splits_backward_by_group
    saved = keeps.saved + stays * work.weight_bytes
    return UnitCosts(
        forward_seconds=once[SECONDS],
        input_grad_seconds=work.input_grad_seconds,
        weight_grad_seconds=work.weight_grad_seconds,
        recompute_seconds=seconds,
        **host_time(training, work, again),
        exposed_forward=once[COMMUNICATION],
        exposed_backward=work.exposed_backward + exposed,
        redone_seconds=redone * work.weight_groups,
        forward_flops=once[FLOPS],
        recompute_flops=flops,
        redone_flops=flops * work.weight_groups,
        saved_bytes=saved,
        transient_bytes=keeps.transient + (1.0 - stays) * work.weight_bytes,
        done_bytes=keeps.done - stays * work.weight_bytes,
        next_bytes=keeps.following + (1.0 - 2.0 * stays) * work.weight_bytes,
        second_bytes=keeps.second + (1.0 + stays) * work.weight_bytes,
        working_bytes=keeps.working * np.where(fused_kernels(rows, rules), PLANNED_WORKING, 1.0),
        held_bytes=work.incoming_bytes + (saved if by_group else work.input_bytes),
        **{field.name: getattr(work, field.name) for field in fields(EndBytes)},
    )


def host_time(training: TrainingSpec, work: UnitWork, again: FloatColumn) -> dict[str, FloatColumn]:
    """Seconds that launches and waits add to one microbatch of units (`cost.layer.host_time`).

    The layer's backward follows its recomputation at once, so both share one queue.
    again (Q, K + 2, U): repeated by the backward.
    """
    blocks = training_release(training).named.launches_block

    def beyond(device: FloatColumn, host: FloatColumn) -> FloatColumn:
        return host if blocks else np.maximum(0.0, host - device)

    once, replays = work.again_all, work.replay_seconds
    grads = work.weight_grad_seconds + work.input_grad_seconds
    backward = beyond(
        grads + in_order(work.exposed_backward) + _device(again) + again[WAITS],
        work.launch_backward_seconds + again[LAUNCHES] + replays,
    )
    share = work.weight_grad_seconds / np.maximum(grads, 1e-12)
    return {
        "launch_forward_seconds": beyond(_device(once) + once[WAITS], once[LAUNCHES] + replays),
        "launch_input_grad_seconds": (1.0 - share) * backward,
        "launch_weight_grad_seconds": share * backward,
        "wait_forward_seconds": once[WAITS],
        "wait_backward_seconds": again[WAITS],
    }


def _device(quantities: FloatColumn) -> FloatColumn:
    """Seconds of kernels and communication that nothing hides."""
    return np.asarray(quantities[SECONDS] + in_order(quantities[COMMUNICATION]))


def _mode(rows: LayoutBatch, shape: tuple[int, ...], num_layers: int) -> Mode:
    """How units checkpoint, (K + 2, U); embedding and head never do."""
    kind = np.full(shape, NONE)
    kind[:-2] = rows.ac_kind
    return Mode(kind, np.broadcast_to(rows.ac_value, shape), num_layers)


def _again(
    work: UnitWork, savings: Savings | None, rows: LayoutBatch, num_layers: int
) -> FloatColumn:
    """Costs that the backwards of units repeat, (Q, K + 2, U)."""
    again = np.zeros_like(work.again_all)
    layers, mode = again[:, :-2], Mode(rows.ac_kind, rows.ac_value, num_layers)
    for name, share in mode.repeats():
        at = np.flatnonzero(share)
        if len(at):
            layers[:, :, at] += share[at] * getattr(work, f"again_{name}")[:, : layers.shape[1], at]
    if savings is not None:
        budgeted = np.flatnonzero(rows.ac_kind == MEMORY_BUDGET)
        budget = mode.budget[budgeted]
        layers[:, :, budgeted] = _under_budget(work, savings, budgeted, budget)
    return again


def _under_budget(
    work: UnitWork, savings: Savings, rows: IntColumn, budget: FloatColumn
) -> FloatColumn:
    """Costs that backwards of layers repeat under these memory budgets of rows, (Q, K, their U)."""
    least, every = work.layer_input_bytes[:-2, rows], work.every_bytes[:-2, rows]
    spared = saved_by_budget(savings.bytes, savings.again, least, room(least, every, budget))
    rest = np.maximum(work.again_needed[..., rows] - spared, 0.0)
    return np.where(budget >= 1.0, 0.0, rest)
