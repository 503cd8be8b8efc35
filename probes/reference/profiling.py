"""Seconds by kernel of one step, from torch's profiler."""

from collections import defaultdict

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from planner.probes.reference.step import Trainer

SHOWN = 40  # kernels listed by name; the rest are one number
NAME_LENGTH = 120


def kernel_seconds(trainer: Trainer, step: int) -> dict[str, float]:
    """Device seconds of each kernel in one more step, longest first.

    On a CPU they are the operators' own seconds.
    """
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
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
    listed = {
        name: value
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:SHOWN]
        if value > 0
    }
    rest = sum(seconds.values()) - sum(listed.values())
    return listed | ({"other": rest} if rest > 0 else {})
