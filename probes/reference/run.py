"""Runs one recipe on this process's rank and returns what it measured.

An emulated rank runs in one process over torch's fake process group, whose collectives move nothing
and return at once: on a GPU compute and memory are real, but it never waits for others. With fake
tensors nothing is computed: memory and counts come from shapes. Parallelism is then applied to meta
tensors outside the mode, and storage is given inside it.
"""

import os
import time
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from planner.errors import fault
from planner.estimates import model_flops_utilisation
from planner.probes.protocol import Environment, MeasuredRun, RankMemory
from planner.probes.reference import memory, optimizers, precision, timing
from planner.probes.reference.environment import Sample, check_device, describe
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer

SHOWN_KERNELS = 40  # by name; the rest are one number
NAME_LENGTH = 120


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
        """Does everything from process groups to numbers."""
        recipe, task = self.recipe, self.recipe.task
        used_before = self._take_device()
        if recipe.emulated:
            enter_world(recipe)
        else:
            limit = timedelta(seconds=task.time_limit_seconds)
            dist.init_process_group(self._backend(), timeout=limit)
        if task.fake_tensors:
            return self._counted()
        trainer = Trainer(recipe, self.device)
        trainer.materialise()
        self.timed = timed = timing.run(trainer, self._begin, self.started)
        self.sample.stop()
        own = self._memory(trainer, used_before, timed)
        kernels = kernel_seconds(trainer, len(timed.losses) + 1) if task.breakdown else None
        tokens = recipe.tokens_per_step / recipe.layout.num_gpus / timed.median
        mfu = model_flops_utilisation(recipe.model, recipe.cluster, tokens, recipe.training.seq_len)
        return MeasuredRun(
            step_seconds=timed.median,
            step_seconds_each=timed.seconds,
            tokens_per_second_per_gpu=tokens,
            mfu=mfu,
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
        recipe, short = self.recipe, self.timed.microbatches
        few, more = short or (0, 0)
        known = (
            (short, f"steps of {few} and {more} of its {recipe.num_microbatches} microbatches were "
             "timed; the whole step follows from both"),
            (recipe.emulated, "emulated: one rank alone; its step holds no communication and no "
             "bubble, and its loss means nothing"),
            (recipe.task.fake_tensors, "fake tensors: nothing was computed; memory and counts come "
             "from shapes"),
            (recipe.layout.compile and not recipe.compiles, "fake tensors: blocks were not "
             "compiled, so what fusion saves is counted as kept"),
            (recipe.emulated and recipe.layout.async_tp, "emulated: async TP was left out, there "
             "is no communication to hide"),
            (not recipe.emulated and not recipe.whole_init, "weights were drawn where they live: "
             "the loss differs between layouts"),
            (recipe.layout.precision in precision.LOW and recipe.model.is_moe, "routed experts "
             "computed in the parameter dtype: torchao converts linear layers only"),
        )  # fmt: skip
        return [note for holds, note in known if holds]

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
        if self.device.type == "cuda":
            unseen = 0
            if self.recipe.layout.pp > 1 and timed.microbatches:
                unseen = self.recipe.num_microbatches - sum(timed.microbatches)
                unseen *= trainer.schedule(timed.microbatches[0]).bytes_a_microbatch
            return memory.of_gpu(dist.get_rank(), self.device, used_before, unseen)
        if self.recipe.layout.compile:
            return _live(None)
        tracker = memory.Tracker()
        with tracker:
            tracker.adopt(trainer.tensors())
            tracker.reset()
            trainer.step(len(timed.losses), max(timed.microbatches or (), default=None))
        return _live(tracker.peak)

    def _gathered(self, own: RankMemory) -> list[RankMemory]:
        if self.recipe.emulated or dist.get_world_size() == 1:
            return [own]
        everyone: list[RankMemory | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return [rank for rank in everyone if rank is not None]

    def _counted(self) -> MeasuredRun:
        tracker = shapes_alone(self.recipe)
        moved = {f"{kind}_bytes": float(n) for kind, n in tracker.collective_bytes.items()}
        return MeasuredRun(memory=[_live(tracker.peak)], counts={"flops": tracker.flops} | moved)


def _live(peak: int | None) -> RankMemory:
    """Memory of a rank of which only live tensors are known."""
    return RankMemory(rank=dist.get_rank(), peak_allocated_bytes=peak)


def enter_world(recipe: ReferenceRecipe) -> None:
    """Initialises the fake process group as the layout's rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert recipe.task.emulate_rank is not None
    dist.init_process_group(
        "fake", rank=recipe.task.emulate_rank, world_size=recipe.layout.num_gpus, store=FakeStore()
    )


def shapes_alone(recipe: ReferenceRecipe) -> memory.Tracker:
    """Memory and counts of one steady step, with optimizer states, from shapes."""
    trainer = Trainer(recipe, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), memory.Tracker() as tracker:
        trainer.materialise()
        optimizers.prime(trainer.updates.optimizers)
        tracker.reset()
        trainer.step(0)
    return tracker


def kernel_seconds(trainer: Trainer, step: int) -> dict[str, float]:
    """Device seconds of each kernel in one more step, longest first; on a CPU each operator's."""
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as trace:
        trainer.step(step)
        if on_gpu:
            torch.cuda.synchronize(trainer.device)
    seconds: dict[str, float] = defaultdict(float)
    for event in trace.key_averages():
        if on_gpu and event.device_type == DeviceType.CUDA:
            seconds[event.key[:NAME_LENGTH]] += event.self_device_time_total / 1e6
        elif not on_gpu:
            seconds[event.key[:NAME_LENGTH]] += event.self_cpu_time_total / 1e6
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:SHOWN_KERNELS]
    listed = {name: value for name, value in longest if value > 0}
    rest = sum(seconds.values()) - sum(listed.values())
    return listed | ({"other": rest} if rest > 0 else {})
