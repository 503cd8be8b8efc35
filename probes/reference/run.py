"""Runs one recipe on this process's rank and returns what it measured."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.errors import fault
from planner.estimates import model_flops_utilisation
from planner.probes.protocol import Environment, MeasuredRun, RankMemory
from planner.probes.reference import emulate, memory, precision, profiling, timing
from planner.probes.reference.environment import Sample, check_device, describe
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer


class ReferenceRun:
    """One probe on one rank. `device` is set before anything can fail on it."""

    def __init__(self, recipe: ReferenceRecipe) -> None:
        """Raises SpecError if this process does not match the task."""
        self.recipe = recipe
        task, gpus = recipe.task, recipe.layout.num_gpus
        read = os.environ.get
        world, local = int(read("WORLD_SIZE", "1")), int(read("LOCAL_RANK", "0"))
        check_device(task.device)
        if not recipe.emulated and world != gpus:
            rule = f"needs one process a rank, and there are {world}"
            raise fault("layout", gpus, rule, f"start {gpus} processes")
        on_gpu = task.device == "cuda" and not task.fake_tensors
        self.device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        self.sample = Sample(self.device)
        self.started = time.monotonic()
        self.timed = timing.StepTiming()

    def measure(self) -> MeasuredRun:
        """Does everything from process groups to numbers. `close` leaves the process groups."""
        recipe, task = self.recipe, self.recipe.task
        used_before = self._take_device()
        if recipe.emulated:
            emulate.enter_world(recipe)
        else:
            dist.init_process_group(
                self._backend(), timeout=timedelta(seconds=task.time_limit_seconds)
            )
        if task.fake_tensors:
            return self._counted()
        trainer = Trainer(recipe, self.device)
        trainer.materialise()
        self.timed = timed = timing.run(trainer, self._begin, self.started)
        self.sample.stop()
        own = self._memory(trainer, used_before, timed)
        kernels = (
            profiling.kernel_seconds(trainer, len(timed.losses) + 1) if task.breakdown else None
        )
        tokens = recipe.tokens_per_step / recipe.layout.num_gpus / timed.median
        return MeasuredRun(
            step_seconds=timed.median,
            step_seconds_each=timed.seconds,
            tokens_per_second_per_gpu=tokens,
            mfu=model_flops_utilisation(
                recipe.model, recipe.cluster, tokens, recipe.training.seq_len
            ),
            losses=[] if recipe.emulated else timed.losses,
            gradient_norms=[] if recipe.emulated else timed.norms,
            memory=self._gathered(own),
            kernel_seconds=kernels,
            expert_imbalance=timed.imbalance or None,
            timed_microbatches=list(timed.microbatches or ()) or None,
        )

    def environment(self) -> Environment:
        self.sample.stop()
        return describe(self.device, self.sample)

    def notes(self) -> list[str]:
        recipe, notes = self.recipe, []
        if self.timed.microbatches:
            few, more = self.timed.microbatches
            notes.append(
                f"steps of {few} and {more} of its {recipe.num_microbatches} microbatches were "
                "timed; the whole step follows from both"
            )
        if recipe.emulated:
            notes.append(
                "emulated: one rank alone; its step holds no communication and no bubble, and its "
                "loss means nothing"
            )
        if recipe.task.fake_tensors:
            notes.append("fake tensors: nothing was computed; memory and counts come from shapes")
        if recipe.layout.compile and not recipe.compiles:
            notes.append(
                "fake tensors: blocks were not compiled, so what fusion saves is counted as kept"
            )
        if recipe.emulated and recipe.layout.async_tp:
            notes.append("emulated: async TP was left out, there is no communication to hide")
        if not recipe.emulated and not recipe.whole_init:
            notes.append("weights were drawn where they live: the loss differs between layouts")
        if precision.converts(recipe.layout) and recipe.model.is_moe:
            notes.append(
                "routed experts computed in the parameter dtype: torchao converts linear layers "
                "only"
            )
        return notes

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _backend(self) -> str:
        if self.device.type == "cpu":
            return "gloo"
        return "cuda:nccl,cpu:gloo" if self.recipe.layout.cpu_offload else "nccl"

    def _take_device(self) -> int:
        """Bytes in use on the GPU once this process has its context; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        torch.cuda.synchronize(self.device)
        return memory.device_used_bytes(self.device) - torch.cuda.memory_reserved(self.device)

    def _begin(self) -> None:
        if self.device.type == "cuda":
            memory.reset_gpu(self.device)
        self.sample.start()

    def _memory(self, trainer: Trainer, used_before: int, timed: timing.StepTiming) -> RankMemory:
        """Memory of this rank.

        Where shorter steps were timed, with the buffers that the whole one receives into besides.
        On a CPU one more step runs under the tracker, which counts live tensors but cannot see
        into compiled code.
        """
        rank = dist.get_rank()
        if self.device.type == "cuda":
            unseen = 0
            if self.recipe.layout.pp > 1 and timed.microbatches:
                unseen = self.recipe.num_microbatches - sum(timed.microbatches)
                unseen *= trainer.schedule(timed.microbatches[0]).bytes_a_microbatch
            return memory.of_gpu(rank, self.device, used_before, unseen)
        if self.recipe.layout.compile:
            return RankMemory(rank=rank, peak_allocated_bytes=None, peak_reserved_bytes=None)
        tracker = memory.Tracker()
        with tracker:
            tracker.adopt(trainer.tensors())
            tracker.reset()
            trainer.step(len(timed.losses), max(timed.microbatches or (), default=None))
        return RankMemory(rank=rank, peak_allocated_bytes=tracker.peak, peak_reserved_bytes=None)

    def _gathered(self, own: RankMemory) -> list[RankMemory]:
        if self.recipe.emulated or dist.get_world_size() == 1:
            return [own]
        everyone: list[RankMemory | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return [rank for rank in everyone if rank is not None]

    def _counted(self) -> MeasuredRun:
        tracker = emulate.shapes_alone(self.recipe)
        counts = {"flops": tracker.flops} | {
            f"{kind}_bytes": float(n) for kind, n in tracker.collective_bytes.items()
        }
        rank = RankMemory(
            rank=dist.get_rank(), peak_allocated_bytes=tracker.peak, peak_reserved_bytes=None
        )
        return MeasuredRun(memory=[rank], counts=counts)
