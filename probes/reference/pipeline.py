"""Pipeline parallelism: a model's stages under torch's schedules.

The shapes that stages exchange are given, not inferred: nothing is sent before the first
microbatch, so that one rank can run by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from planner.probes.reference.meshes import Meshes
from planner.probes.reference.model import ModelPart
from planner.probes.reference.parallel import compute_dtype
from planner.probes.reference.recipe import ReferenceRecipe

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _LoneStage(PipelineStage):
    """A stage without real neighbours, of which torch 2.13 asks whether shapes are static."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        return Agreed()

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return Agreed()


class Agreed:
    """Stands in for a tensor whose `item` torch reads; a fake tensor could not answer."""

    def item(self) -> int:
        """One: every stage voted for static shapes."""
        return 1


class Pipeline:
    """One rank's stages and their schedule."""

    def __init__(
        self,
        recipe: ReferenceRecipe,
        meshes: Meshes,
        parts: list[tuple[int, ModelPart, nn.Module]],
        loss: Loss,
        device: torch.device,
        microbatches: int,
    ) -> None:
        kind = _LoneStage if recipe.emulated else PipelineStage
        count, group = len(recipe.stage_sizes()), meshes.group("pp")
        stages = []
        self.bytes_a_microbatch = 0  # torch has a buffer for everything that it will receive
        for stage, part, module in parts:
            taken, given = _shapes(recipe, part)
            self.bytes_a_microbatch += 0 if part.first else taken.nbytes
            self.bytes_a_microbatch += 0 if part.last else given.nbytes
            ends: Any = {"input_args": taken, "output_args": given, "group": group}
            stages.append(kind(module, stage, count, device, **ends))
        self._first = any(part.first for _, part, _ in parts)
        self._last = any(part.last for _, part, _ in parts)
        schedule = get_schedule_class(recipe.layout.pp_schedule)
        scheduled: Any = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
        self._schedule = schedule(
            scheduled, n_microbatches=microbatches, loss_fn=loss, scale_grads=False
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Sum of all microbatches' losses on the last stage's rank, after their backward."""
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self._first else ()
        target = targets if self._last else None
        self._schedule.step(
            *inputs, target=target, losses=losses if self._last else None, return_outputs=False
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None


def _shapes(recipe: ReferenceRecipe, part: ModelPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a part for one microbatch, on the meta device."""
    layout, model = recipe.layout, recipe.model
    batch, tokens = layout.micro_batch_size, recipe.local_seq_len
    held = tokens // layout.tp if layout.sequence_parallel and layout.tp > 1 else tokens
    wide: Any = {"dtype": compute_dtype(recipe), "device": "meta", "requires_grad": True}
    ids = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
    hidden = torch.empty(batch, held, model.hidden_size, **wide)
    logits = torch.empty(batch, tokens, model.vocab_size, **wide)
    return ids if part.first else hidden, logits if part.last else hidden
