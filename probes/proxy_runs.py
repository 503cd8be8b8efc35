"""Scaled-down proxy runs: predicts a layout on many GPUs from runs on the GPUs available.

Fewer replicas: the same model-parallel layout on fewer data-parallel ranks, with their share of the
batch. Parameters are then spread over fewer GPUs. If that no longer fits in memory, the runs also
have fewer layers, at two depths, because time and memory are affine in the number of equal layers.
What the smaller runs cannot show (communication over more ranks, smaller shards) is added as the
difference of two predictions of the cost model. The error comes from the noise of the runs, from
how far the cost model itself is from affine, and from how uncertain the added part is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.calibration.intervals import proxy_run_sd
from planner.catalog.clusters import cluster_document
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.rules import violations
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.specs.measurement import Measured
from planner.specs.model import ModelSpec
from planner.units import counted

QUANTITIES = ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
CATALOG_LABELS = ("aliases", "source", "notes")
# keys of a job's request that also hold for its proxy runs
KEPT = ("model", "cluster", "training", "layout", "group", "notes")
# depths tried: from the whole depth down, then the smallest ones, which may be all that fits
MAX_DEPTHS, LEAST_DEPTHS = 8, 3
LEAST_LAYERS = 2  # a single layer is both first and last, which no layer of the real model is
# step times of equal runs differ by about this (TorchTitan's published repeats differ by 0.5 to 2%)
RUN_NOISE = 0.01
TWO_SIDED_90 = 3.29  # widths of a normal's central 90% interval, in standard deviations
STATE_UNCERTAINTY = 0.01  # judgement: padding of shards and small buffers
MEDIAN_FACTOR = 1.2533  # standard error of a median over that of a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPlan:
    """The proxy runs that stand for a job.

    small: the job on fewer GPUs, at full depth.
    runs: what really runs: `small`, or the same at two depths.
    why: a sentence for the user.
    """

    job: Job
    small: Job
    runs: tuple[Job, ...]
    why: str


def plan_proxy_runs(job: Job, num_devices: int) -> ProxyPlan | None:
    """Plans the proxy runs of a job with a layout on this many devices.

    Returns None if no smaller layout resembles it. Raises SpecError.
    """
    small = fewer_replicas(job, num_devices)
    if small is None:
        return None
    why = f"proxy runs on {small.cluster.num_gpus} of {counted(job.cluster.num_gpus, 'GPU')}"
    if estimate_job(small).fits:
        return ProxyPlan(job=job, small=small, runs=(small,), why=why)
    depths = two_depths(small)
    if depths is None:
        return None
    layers = small.model.num_hidden_layers
    runs = tuple(fewer_layers(small, depth) for depth in (depths.shallow, depths.deep))
    return ProxyPlan(
        job=job,
        small=small,
        runs=runs,
        why=f"{why}, {counted(layers, 'layer')} by {depths.shallow} and {depths.deep}",
    )


def fewer_replicas(job: Job, num_devices: int) -> Job | None:
    """Returns the largest legal job of the same model-parallel layout on at most `num_devices`.

    Returns None if its tp, cp and pp need more.
    """
    layout = _layout(job)
    if layout.num_gpus <= num_devices:
        return job
    for small in sorted(layout.fewer_replicas(), key=lambda small: small.num_gpus, reverse=True):
        if small.num_gpus <= num_devices:
            resized = _resized(job, small)
            if resized is not None and not violations(
                small, resized.model, resized.cluster, resized.training
            ):
                return resized
    return None


def _resized(job: Job, layout: Layout) -> Job | None:
    before = _layout(job)
    batch = job.training.global_batch_size * layout.dp_degree
    if batch % before.dp_degree:
        return None
    typed = job.request["cluster"]
    cluster = dict(cluster_document(typed) if isinstance(typed, str) else typed)
    cluster = {key: value for key, value in cluster.items() if key not in CATALOG_LABELS} | {
        "num_gpus": layout.num_gpus
    }
    if layout.num_gpus % min(job.cluster.gpus_per_node, layout.num_gpus):
        return None
    training = {**job.request["training"], "global_batch_size": batch // before.dp_degree}
    try:
        return _rewritten(
            job,
            {"cluster": cluster, "training": training, "layout": layout.model_dump(mode="json")},
        )
    except SpecError:
        return None


def fewer_layers(job: Job, depth: int) -> Job:
    """The job with the first `depth` layers, split over stages as its trainer does it.

    Raises SpecError.
    """
    model = shallower(job.model, depth)
    layout = _layout(job).model_copy(update={"layers_per_stage": None})
    return _rewritten(job, {"model": inline_keys(model), "layout": layout.model_dump(mode="json")})


def shallower(model: ModelSpec, depth: int) -> ModelSpec:
    """The model with its first `depth` layers."""
    return model.model_copy(
        update={
            "name": f"{model.name}-{depth}-layers",
            "num_hidden_layers": depth,
            "sliding_mask": model.sliding_mask[:depth],
            "dense_layers": tuple(index for index in model.dense_layers if index < depth),
        }
    )


def _rewritten(job: Job, parts: Mapping[str, Any]) -> Job:
    kept = {key: value for key, value in job.request.items() if key in KEPT}
    return read_job({**kept, **parts}, allow_files=False)


def _layout(job: Job) -> Layout:
    assert job.layout is not None, "a probe's job has a layout"
    return job.layout


def period(model: ModelSpec) -> int:
    """How many layers it takes until the kinds of layers repeat, leading dense layers aside.

    Depths that differ by this number differ by equal groups of layers.
    """
    kinds = model.layer_kinds()
    lead = model.first_k_dense_replace if model.is_moe else 0
    for length in range(1, len(kinds) - lead):
        if all(kinds[index] == kinds[index - length] for index in range(lead + length, len(kinds))):
            return length
    return len(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Two depths in layers, and the depth they are extrapolated to."""

    shallow: int
    deep: int
    full: int

    def extrapolated(self, at_shallow: float, at_deep: float) -> float:
        """The affine function through the two readings, evaluated at full depth."""
        return at_shallow + (at_deep - at_shallow) * (self.full - self.shallow) / (
            self.deep - self.shallow
        )

    def spread(self, at_shallow: float, at_deep: float) -> float:
        """Standard deviation of `extrapolated`, from those of two independent readings."""
        span = self.deep - self.shallow
        return math.hypot(
            (self.deep - self.full) / span * at_shallow, (self.full - self.shallow) / span * at_deep
        )


def two_depths(job: Job) -> Depths | None:
    """The two depths that fit and promise the smallest error.

    They are far apart, but not so shallow that memory peaks in another phase.
    """
    layout, model = _layout(job), job.model
    step = math.lcm(period(model), layout.pp * layout.virtual_stages)
    least = max(
        LEAST_LAYERS,
        layout.pp * layout.virtual_stages,
        (model.first_k_dense_replace + 1) if model.is_moe else 1,
    )
    depths = range(model.num_hidden_layers - step, least - 1, -step)
    tried = sorted(
        {*depths[:: max(1, math.ceil(len(depths) / MAX_DEPTHS))], *depths[-LEAST_DEPTHS:]},
        reverse=True,
    )
    estimates: dict[int, Estimate] = {}
    for depth in tried:
        shallow = fewer_layers(job, depth)
        if not violations(_layout(shallow), shallow.model, shallow.cluster, shallow.training):
            estimate = estimate_job(shallow)
            if estimate.fits:
                estimates[depth] = estimate
    if len(estimates) < 2:
        return None
    deep, full = max(estimates), estimate_job(job)
    choices = [
        Depths(shallow=depth, deep=deep, full=model.num_hidden_layers)
        for depth in estimates
        if depth != deep
    ]
    return min(
        choices,
        key=lambda chosen: _expected_error(
            chosen, estimates[chosen.shallow], estimates[deep], full
        ),
    )


def _expected_error(depths: Depths, shallow: Estimate, deep: Estimate, full: Estimate) -> float:
    """The largest relative error of any quantity, noise of step times included."""
    errors = []
    for key in QUANTITIES:
        low, high, whole = (_number(estimate, key) for estimate in (shallow, deep, full))
        noise = depths.spread(low, high) * RUN_NOISE if key == "step_seconds" else 0.0
        errors.append(math.hypot(noise, depths.extrapolated(low, high) - whole) / whole)
    return max(errors)


def _number(estimate: Estimate, key: str) -> float:
    value = getattr(estimate, key)
    assert value is not None, "a legal layout has a price"
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """One quantity of the whole job: its value, standard error, and the cost model's part of it."""

    value: float
    error: float
    from_model: float


def extrapolate(proxy: ProxyPlan, runs: Sequence[Measured], ids: Sequence[str]) -> Measured:
    """Predicts the whole job's numbers from its proxy runs.

    Adds `relative_error` and the part added by the cost model (`from_model`), both by quantity.
    ids: the ids of the runs' own measurements.
    """
    guesses = {key: guess for key in QUANTITIES if (guess := _guess(proxy, runs, key)) is not None}
    job, step = proxy.job, guesses.get("step_seconds")
    tokens = job.training.global_batch_size * job.training.seq_len / job.cluster.num_gpus
    numbers: dict[str, Any] = {key: guess.value for key, guess in guesses.items()}
    shown = ("steps", "step_seconds_sd", *QUANTITIES)
    return Measured.model_validate(
        {
            **numbers,
            "status": "ok",
            "rung": "imitated",
            "steps": min((run.steps or 0 for run in runs), default=0),
            "tokens_per_second_per_gpu": None if step is None else tokens / step.value,
            "relative_error": {key: guess.error / guess.value for key, guess in guesses.items()},
            "from_model": {key: guess.from_model for key, guess in guesses.items()},
            "imitated_by": [
                {
                    "measurement": name,
                    "num_gpus": small.cluster.num_gpus,
                    "num_layers": small.model.num_hidden_layers,
                    **{key: getattr(run, key) for key in shown},
                }
                for small, run, name in zip(proxy.runs, runs, ids, strict=True)
            ],
        }
    )


def _guess(proxy: ProxyPlan, runs: Sequence[Measured], key: str) -> _Guess | None:
    """Extrapolates one quantity of the runs to the whole job.

    Value = readings at full depth + (model of the whole job - model of the small one).
    """
    readings = [value for run in runs if (value := getattr(run, key)) is not None]
    if len(readings) < len(proxy.runs):
        return None
    noises = [_noise(run) if key == "step_seconds" else 0.0 for run in runs]
    small, whole = estimate_job(proxy.small), estimate_job(proxy.job)
    before, after = _number(small, key), _number(whole, key)
    if len(readings) == 1:
        read, variance = readings[0], noises[0] ** 2
    else:
        shallow, deep = (job.model.num_hidden_layers for job in proxy.runs)
        depths = Depths(shallow=shallow, deep=deep, full=proxy.small.model.num_hidden_layers)
        read = depths.extrapolated(*readings)
        curved = (
            depths.extrapolated(*(_number(estimate_job(job), key) for job in proxy.runs)) / before
            - 1.0
        )
        variance = depths.spread(*noises) ** 2 + (curved * read) ** 2
    value = read + after - before if read + after - before > 0 else read * after / before
    counted = _states(whole) - _states(small)  # bytes; step times have no such part
    if key == "step_seconds":
        off = proxy_run_sd(proxy.job.cluster, proxy.small.cluster, abs(value - read) / value)
        variance += (off * value) ** 2
    else:
        variance += ((value - read - counted) * _uncertainty(whole, key)) ** 2 + (
            counted * STATE_UNCERTAINTY
        ) ** 2
    return _Guess(value=value, error=math.sqrt(variance), from_model=value - read)


def _states(estimate: Estimate) -> float:
    """Bytes of parameters, gradients and optimizer states on the worst rank.

    They are counted from shapes and shards, not modelled.
    """
    assert estimate.memory is not None, "a legal layout has its memory"
    worst = estimate.memory.stages[estimate.memory.worst_stage]
    return worst.parameters_bytes + worst.gradients_bytes + worst.optimizer_bytes


def _noise(run: Measured) -> float:
    """Standard error of a run's median step time.

    At least the difference seen between repeated runs, or its own spread if that is larger.
    """
    own = MEDIAN_FACTOR * (run.step_seconds_sd or 0.0) / math.sqrt(max(run.steps or 1, 1))
    return math.hypot(own, RUN_NOISE * (run.step_seconds or 0.0))


def _uncertainty(estimate: Estimate, key: str) -> float:
    """Relative standard deviation that the estimate itself claims, from its central interval.

    Device bytes use the interval of reserved bytes.
    """
    assert estimate.interval is not None, "a legal layout has intervals"
    low, high = getattr(estimate.interval, "peak_reserved_bytes" if key == "device_bytes" else key)
    return math.log(high / low) / TWO_SIDED_90
