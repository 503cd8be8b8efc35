"""One training step of a recipe on one rank: build once, then step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from planner.probes.reference import initialise, meshes, optimizers, parallel, precision
from planner.probes.reference.context_parallel import local_sequence
from planner.probes.reference.gradients import Clipping, TiedEnds
from planner.probes.reference.model import ModelPart, Transformer
from planner.probes.reference.moe import MixtureOfExperts
from planner.probes.reference.recipe import ReferenceRecipe

if TYPE_CHECKING:
    from planner.probes.reference.pipeline import Loss, Pipeline

# lifts fp16 gradients of a mean over millions of tokens out of the subnormals;
# torch.amp's first scale
FP16_LOSS_SCALE = 2.0**16


def parts_of(recipe: ReferenceRecipe, pipeline_rank: int) -> Iterator[tuple[int, ModelPart]]:
    """(stage, its part of the model) for one pipeline rank, in ascending stages."""
    sizes = recipe.stage_sizes()
    for stage in recipe.stages_of(pipeline_rank):
        begin = sum(sizes[:stage])
        layers = tuple(range(begin, begin + sizes[stage]))
        yield stage, ModelPart(layers=layers, first=stage == 0, last=stage == len(sizes) - 1)


class Trainer:
    """A rank's part of the model, its optimizer and its data; `materialise` allocates memory."""

    def __init__(self, recipe: ReferenceRecipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.meshes = meshes.build(recipe, device.type)
        self.sequence = local_sequence(recipe, self.meshes, torch.device("cpu"))
        held = list(parts_of(recipe, self.meshes.place["pp"]))
        self.models = [self._model(part) for _, part in held]
        self.modules = [parallel.parallelise(one, recipe, self.meshes) for one in self.models]
        self._held = held
        self.ties = TiedEnds(self.models, recipe, self.meshes)

    def _model(self, part: ModelPart) -> Transformer:
        recipe = self.recipe
        unfused, seq_len = recipe.training.attention_kernel == "unfused", recipe.training.seq_len
        with torch.device("meta"):
            model = Transformer(recipe.model, part, unfused=unfused, seq_len=seq_len)
        return model.to(parallel.DTYPES[recipe.layout.master_dtype])

    def materialise(self) -> None:
        """Gives parameters storage and values, then builds replicas, optimizer and schedule."""
        recipe = self.recipe
        self.sequence = local_sequence(recipe, self.meshes, self.device)
        for index, model in enumerate(self.models):
            initialise.materialise(model, recipe, self.device)
            model.place(self.sequence)
            if recipe.uses_ddp:
                self.modules[index] = parallel.replicate(model, recipe, self.meshes)
        named = [
            (initialise.plain_name(n), p)
            for module in self.modules
            for n, p in module.named_parameters()
        ]
        kind, lr = recipe.training.optimizer, recipe.task.learning_rate
        prepare = self._unscale if recipe.layout.optimizer_in_backward else None
        self.updates = optimizers.Updates(named, kind, lr, prepare)
        self.clipping = Clipping(self.modules, self.meshes, self.ties.copies)
        self._pipelines: dict[int, Pipeline] = {}

    def schedule(self, microbatches: int) -> "Pipeline":
        """The schedule of a step of so many microbatches over this rank's stages."""
        from planner.probes.reference.pipeline import Pipeline  # imports for half a second

        if microbatches not in self._pipelines:
            held = zip(self._held, self.modules, strict=True)
            parts = [(stage, part, module) for (stage, part), module in held]
            self._pipelines[microbatches] = Pipeline(
                self.recipe, self.meshes, parts, self._loss_function(), self.device, microbatches
            )
        return self._pipelines[microbatches]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors on the device between steps."""
        for module in self.modules:
            for parameter in module.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from module.buffers()
        for optimizer in self.updates.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def scale(self) -> float:
        """Factor on the loss, which gradients carry until the update."""
        return FP16_LOSS_SCALE if self.recipe.layout.precision == "fp16" else 1.0

    def step(
        self, index: int, microbatches: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Share of the global mean loss on this rank, and the norm of gradients that are clipped.

        microbatches: fewer than the recipe's, where asked for.
        """
        recipe = self.recipe
        count = microbatches or recipe.num_microbatches
        tokens, targets = initialise.batch(
            recipe, index, self.meshes.replica, self.sequence.local, self.device, count
        )
        run = self._pipelined if recipe.layout.pp > 1 else self._accumulated
        with self._contexts():
            share = run(tokens, targets, count)
        share = share * (recipe.num_microbatches / count)
        self.ties.add_gradients()
        norm = None
        if not recipe.layout.optimizer_in_backward:
            if self.scale != 1.0:
                self.clipping.scale(1.0 / self.scale)
            if recipe.training.max_grad_norm is not None:
                norm = self.clipping.clip(recipe.training.max_grad_norm, self.device)
        self.updates.step()
        precision.after_step(self.modules, recipe.layout)
        return share / self.scale, norm

    def global_loss(self, share: torch.Tensor) -> torch.Tensor:
        """The mean loss over the global batch, from every rank's share."""
        total = share.clone()
        for axis in ("fsdp", "dp_replicate", "pp"):
            if self.meshes.dense[axis].size() > 1:
                dist.all_reduce(total, group=self.meshes.group(axis))
        return total

    def expert_imbalance(self) -> list[float]:
        """Busiest expert's load over the mean in the last microbatch, mean over layers.

        One number, or none without experts whose tokens were routed here.
        """
        loads = [
            moe.load.float()
            for model in self.models
            for moe in model.modules()
            if isinstance(moe, MixtureOfExperts) and moe.load is not None
        ]
        return [float(torch.stack([x.max() / x.mean() for x in loads]).mean())] if loads else []

    def _pipelined(self, tokens: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        share = self.schedule(count).step(tokens, targets)
        return torch.zeros((), device=self.device) if share is None else share

    def _accumulated(self, tokens: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        """Runs all microbatches. FSDP2 reduces after each (as TorchTitan), DDP after the last."""
        module, loss_of = self.modules[0], self._loss_function()
        total = torch.zeros((), device=self.device)
        batch = self.recipe.layout.micro_batch_size
        for i in range(count):
            last = i == count - 1
            self.updates.arm(last)
            waits = isinstance(module, DistributedDataParallel) and not last
            with module.no_sync() if waits else nullcontext():  # type: ignore[operator]
                own = slice(i * batch, (i + 1) * batch)
                loss = loss_of(module(tokens[own]), targets[own])
                (loss * self.loss_factor).backward()
            total += loss.detach()
        return total

    @property
    def loss_factor(self) -> float:
        """Factor on the loss: DistributedDataParallel divides by the replicas, FSDP2 here sums."""
        return float(self.recipe.layout.dp_replicate) if self.recipe.uses_ddp else 1.0

    def _loss_function(self) -> "Loss":
        tokens, scale = self.recipe.tokens_per_step, self.scale

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            rows = logits.flatten(0, 1).float()
            summed = F.cross_entropy(rows, targets.flatten(), reduction="sum")
            whole = summed.full_tensor() if isinstance(summed, DTensor) else summed
            return whole * (scale / tokens)

        compiled = self.recipe.compiles and not self.recipe.vocab_parallel
        return torch.compile(loss) if compiled else loss

    def _contexts(self) -> AbstractContextManager[object]:
        if self.recipe.vocab_parallel:
            return loss_parallel()
        dtype = parallel.compute_dtype(self.recipe)
        if self.recipe.autocasts and dtype is not torch.float32:
            return torch.autocast(self.device.type, dtype=dtype)
        return nullcontext()

    def _unscale(self, grad: torch.Tensor) -> None:
        if self.scale != 1.0:
            (grad.to_local() if isinstance(grad, DTensor) else grad).div_(self.scale)
