"""Limits of hardware that no run can pass, and numbers of a run that contradict each other.

A row that breaks one of them is a mistake of who wrote it, never news about the cost model.
"""

from collections.abc import Iterator

from planner.precision import PRECISIONS
from planner.specs.job import Job
from planner.specs.measurement import Measured, Measurement
from planner.units import format_bytes

# Judgements. Clocks: above the datasheet's, at which peaks are stated (an H100's 1980 MHz over
# 1830). Memory: capacities of one part differ by driver (79.10 to 79.25 GiB).
CLOCK_MARGIN, MEMORY_MARGIN = 1.1, 1.02
# Tokens a second against step seconds, of which a log rounds both or takes another mean.
TOLERANCE = 0.2
FORWARD_AND_BACKWARD = 6  # FLOP a token and matrix parameter


def implausible(measurement: Measurement) -> list[str]:
    """Why these numbers cannot be of this job; empty where they can.

    Peaks and capacity are those of the catalogue or of the job's own GPU. The CPU pool has neither:
    its figures are judgements about no particular machine.
    """
    numbers, job = measurement.measured, measurement.job
    return [*_contradictions(numbers, job), *_beyond_hardware(numbers, job)]


def least_step_seconds(job: Job) -> float:
    """Seconds below which no step can be: its matrix products at the peak of its precision.

    t = 6 * active matrix parameters * tokens / (GPUs * peak)

    Attention, recomputation and communication are left out, so it is a lower bound. 0 where the GPU
    has no stated peak for the precision.
    """
    layout, gpu, training = job.layout, job.cluster.gpu, job.training
    if layout is None or gpu.vendor == "cpu":
        return 0.0
    precision = PRECISIONS[layout.precision]
    recipes = [one for one in (precision.torchao, precision.transformer_engine) if one is not None]
    stated = [gpu.peak_flops_per_second.get(recipe.peak, 0.0) for recipe in recipes]
    peak = max(stated)
    if peak <= 0.0:
        return 0.0
    tokens = training.global_batch_size * training.seq_len
    flops = FORWARD_AND_BACKWARD * float(job.model.matmul_parameters_per_token()) * tokens
    return flops / (job.cluster.num_gpus * peak * CLOCK_MARGIN)


def _contradictions(numbers: Measured, job: Job) -> Iterator[str]:
    seconds, rate = numbers.step_seconds, numbers.tokens_per_second_per_gpu
    if numbers.status == "ok" and (seconds == 0 or rate == 0):
        yield "a step of no time, or without a token, is none that ran"
    if seconds and rate and numbers.rung != "emulated":
        tokens = job.training.global_batch_size * job.training.seq_len
        stated = rate * job.cluster.num_gpus * seconds
        if not 1 / (1 + TOLERANCE) <= stated / tokens <= 1 + TOLERANCE:
            yield (
                f"{rate:.6g} tokens a second and GPU over a step of {seconds:.6g} s are "
                f"{stated:.4g} tokens, and a step has {tokens}"
            )
    if numbers.steps is not None and numbers.steps < (1 if seconds else 0):
        yield f"steps={numbers.steps} cannot have been timed"
    allocated, reserved = numbers.peak_allocated_bytes, numbers.peak_reserved_bytes
    if allocated and reserved and allocated > reserved * MEMORY_MARGIN:
        yield (
            f"{format_bytes(allocated)} allocated are more than the {format_bytes(reserved)} "
            "reserved for them"
        )


def _beyond_hardware(numbers: Measured, job: Job) -> Iterator[str]:
    gpu, cluster = job.cluster.gpu, job.cluster
    if gpu.vendor == "cpu":
        return
    least = 0.0 if numbers.rung == "emulated" else least_step_seconds(job)
    tokens = job.training.global_batch_size * job.training.seq_len
    rate = numbers.tokens_per_second_per_gpu
    stated = [numbers.step_seconds, tokens / cluster.num_gpus / rate if rate else None]
    fastest = min((one for one in stated if one), default=None)
    if fastest is not None and fastest < least:
        assert job.layout is not None, "a job without layout has no least time"
        yield (
            f"a step of {fastest:.4g} s is faster than {cluster.num_gpus} {gpu.name} can multiply "
            f"its matrices in {job.layout.precision}: at their peak that takes {least:.4g} s"
        )
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"):
        value = getattr(numbers, name)
        if value and value > gpu.memory_bytes * MEMORY_MARGIN:
            yield (
                f"{name}={format_bytes(value)} is more than the {format_bytes(gpu.memory_bytes)} "
                f"of a {gpu.name}"
            )
