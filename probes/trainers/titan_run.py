"""Imports a user's own TorchTitan run as a measurement, from its log or event files.

A log gives the mesh, batch and sequence, the version and the GPU, and most of what was applied. An
event file gives only numbers. Where the log and the person both name a value, the two must agree;
what neither names has to be asked for. The format of the lines is that of torchtitan 0.2.0 to 0.3.0
(train.py, trainer.py, distributed/parallel_dims.py, distributed/activation_checkpoint.py,
models/*/parallelize.py).
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

from planner.catalog.clusters import gpu_names
from planner.catalog.models import model_names
from planner.errors import Fault, SpecError, fault
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu
from planner.intake.models import load_model
from planner.probes.evidence import Evidence
from planner.probes.pools.nvidia import Gpu, is_same_gpu
from planner.probes.protocol import OutOfMemory
from planner.probes.trainers.tensorboard_events import read_scalars
from planner.probes.trainers.titan_log import ANSI, TitanLog, failure, read_log
from planner.probes.trainers.titan_outcome import ACTIVE, RESERVED, SECONDS
from planner.specs.job import Job
from planner.specs.network import NETWORK_FIELDS
from planner.units import GIB

TPS = "throughput(tps)"
# logged steps at the start: compilation, first collectives, the allocator still growing
UNTIMED = 2
MESH = re.compile(r"device mesh with parallelism: ([a-z_=\d, ]+)")
TRAINER = re.compile(
    r"local batch size (?P<local>\d+), global batch size (?P<batch>\d+), .*?sequence length "
    r"(?P<seq>\d+)"
)
SCHEDULE = re.compile(
    r"Using pipeline schedule (?P<name>\w+) with (?P<microbatches>\d+) microbatches"
)
PARAMETERS = re.compile(r"Model .* size: (?P<count>[\d,]+) total parameters")
CHECKPOINTING = re.compile(
    r"Applied (?P<mode>selective|full|memory_budget) activation checkpointing"
)
COMPILED = re.compile(r"Compiling (?:each|the) \w+ with torch\.compile|Compiling the loss function")
FLOAT8 = re.compile(r"Float8 .*(?:active|training)|Swapped to Float8Linear|MXFP8", re.IGNORECASE)
DEGREES = frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"})
NEEDED = (
    ("model", "model: llama3-8b"), ("cluster.gpu", "cluster: {gpu: h100-sxm-80gb}"),
    ("cluster.num_gpus", "cluster: {num_gpus: 8}"),
    ("training.seq_len", "training: {seq_len: 8192}"),
    ("training.global_batch_size", "training: {global_batch_size: 64}"),
    ("layout", "layout: {dp_shard: 8}"),
)  # fmt: skip

# one thing may have several; the person's is taken
NAMES = frozenset({"model", "gpu", "trainer_version"})
SIMPLE = frozenset({bool, int, str})

Values = dict[str, Any]


def check_log(text: str, source: str) -> None:
    """Raises SpecError for a text without any TorchTitan line, before asking about its job."""
    log, plain = read_log(text), ANSI.sub("", text)
    told = log.steps or log.version or MESH.search(plain) or TRAINER.search(plain)
    if told or isinstance(failure(log, Evidence(log=text)), OutOfMemory):
        return
    remedy = (
        "give a log with lines such as `step: 3  loss: ...  memory: ...  tps: ...`, rows, or a "
        "folder of event files"
    )
    raise fault("steps", source, "holds no line of TorchTitan", remedy)


def stated_by(text: str) -> tuple[Values, list[Fault]]:
    """Returns (what a log gives of its job, as nested keys of a job; the fields it leaves open)."""
    plain, log = ANSI.sub("", text), read_log(text)
    layout, doubts = _layout(plain)
    training: Values = {"trainer": "torchtitan"}
    if log.version:
        training["trainer_version"] = log.version
    trainer = TRAINER.search(plain)
    if trainer is not None:
        training |= {"seq_len": int(trainer["seq"]), "global_batch_size": int(trainer["batch"])}
        schedule = SCHEDULE.search(plain)
        microbatches = int(schedule["microbatches"]) if schedule else 1
        layout["micro_batch_size"] = int(trainer["local"]) // microbatches
    cluster: Values = {"gpu": gpu} if (gpu := _gpu(log)) is not None else {}
    found = DEGREES & set(layout)
    if found:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        cluster["num_gpus"] = math.prod(layout.get(axis, 1) for axis in axes)
    said: Values = {"training": training, "cluster": cluster, "layout": layout if found else {}}
    model = _model(plain)
    return said | ({"model": model} if model is not None else {}), doubts


def _layout(plain: str) -> tuple[Values, list[Fault]]:
    layout: Values = {}
    doubts = []
    mesh = MESH.search(plain)
    if mesh is not None:
        pairs = (pair.split("=") for pair in mesh[1].replace(" ", "").split(",") if "=" in pair)
        layout |= {axis: int(degree) for axis, degree in pairs if axis in DEGREES}
    schedule = SCHEDULE.search(plain)
    if schedule is not None:
        layout["pp_schedule"] = schedule["name"]
    checkpointing = CHECKPOINTING.search(plain)
    if checkpointing is None:
        layout |= {"ac": "none"} if mesh is not None else {}
    elif checkpointing["mode"] == "full":
        layout["ac"] = "full"
    else:
        mode = checkpointing["mode"].replace("_", "-")
        rule, example = f"the log says {mode}, not which", "ac: selective-op, or selective-layer-2"
        doubts.append(Fault("layout.ac", None, rule, _give(f"layout: {{{example}}}")))
    if COMPILED.search(plain):
        layout["compile"] = True
    if FLOAT8.search(plain):
        rule, remedy = "the log mentions float8, not which", "layout: {precision: float8-rowwise}"
        doubts.append(Fault("layout.precision", None, rule, _give(remedy)))
    return layout, doubts


def _gpu(log: TitanLog) -> str | None:
    """The one catalogue GPU that the log's device may be; None if none or several may be."""
    if log.gpu_name is None or log.device_bytes is None:
        return None
    device = Gpu(name=log.gpu_name, memory_bytes=log.device_bytes)
    fitting = [name for name in gpu_names() if is_same_gpu(load_gpu(name), device)]
    return fitting[0] if len(fitting) == 1 else None


def _model(plain: str) -> str | None:
    """The catalogue model of exactly this many parameters; None for none, or several shapes."""
    found = PARAMETERS.search(plain)
    if found is None:
        return None
    count = int(found["count"].replace(",", ""))
    models = [one for one in map(load_model, model_names()) if one.total_parameters() == count]
    elsewhere = {"name", "max_position_embeddings", *NETWORK_FIELDS}
    shapes = {str(model.model_dump(exclude=elsewhere)) for model in models}
    return models[0].name if len(shapes) == 1 else None


def completed(said: Values, doubts: Sequence[Fault], given: Mapping[str, Any], source: str) -> Job:
    """The job of a run. Raises SpecError that names every open field and every contradiction."""
    remedy = "correct the job, or import another run"
    contradictions = [
        Fault(path, theirs, f"is not what {source} says: {ours}", remedy)
        for path, ours, theirs in _contradictions(said, given)
    ]
    if contradictions:
        raise SpecError(contradictions)
    job = _merged(said, given)
    rule, known = f"could not be read from {source}", given.get("layout") or {}
    missing = [Fault(path, None, rule, _give(example)) for path, example in _missing(job)]
    missing += [doubt for doubt in doubts if doubt.field.split(".")[1] not in known]
    if missing:
        raise SpecError(missing)
    return read_job(job)


def _give(example: str) -> str:
    return f"give --job FILE with {example}"


def _contradictions(
    said: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key, ours in said.items():
        theirs = given.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += _contradictions(ours, theirs, f"{prefix}{key}.")
        elif key not in NAMES and ours != theirs and {type(ours), type(theirs)} <= SIMPLE:
            found.append((f"{prefix}{key}", ours, theirs))
    return found


def _merged(said: Mapping[str, Any], given: Mapping[str, Any]) -> Values:
    merged = {**said, **given}
    for key, ours in said.items():
        if isinstance(ours, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = _merged(ours, merged[key])
    return merged


def _missing(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    missing = []
    for path, example in NEEDED:
        part, _, key = path.partition(".")
        value = job.get(part)
        if isinstance(value, str) and key:
            continue  # a catalogue name sets all these fields
        if not value or (key and not value.get(key)):
            missing.append((path, example))
    return missing


def log_numbers(text: str, job: Job, source: str) -> Values:
    """The `measured` fields of a row, from a log of steps or a failure. Raises SpecError."""
    log = read_log(text)
    tokens = job.training.global_batch_size * job.training.seq_len / job.cluster.num_gpus
    rates: dict[int, list[float]] = {}
    for line in log.steps:
        rates.setdefault(line.step, []).append(line.tokens_per_second)
    slowest = [min(rates[step]) for step in sorted(rates)[UNTIMED:]]
    seconds = [tokens / rate for rate in slowest if rate > 0]
    told = {"trainer_version": log.version, "gpu_name": log.gpu_name}
    software = {name: value for name, value in told.items() if value}
    if seconds:
        peak = max(line.reserved_bytes for line in log.steps)
        return _measured(seconds, tokens, {"peak_reserved_bytes": peak, "software": software})
    outcome = failure(log, Evidence(log=text))
    if isinstance(outcome, OutOfMemory):
        return {
            "status": "oom",
            "message": outcome.message,
            "attempted_bytes": outcome.attempted_bytes,
            "software": software,
        }
    rule = f"has {len(rates)} logged steps, of which the first {UNTIMED} do not count"
    remedy = "give a log with more lines such as `step: 3  loss: ...  memory: ...  tps: ...`"
    raise fault("steps", source, rule, remedy)


def event_numbers(place: Path, job: Job) -> Values:
    """The `measured` fields of a row, from a run's TensorBoard files. Raises SpecError."""
    files = sorted(place.glob("**/events.out.tfevents.*")) if place.is_dir() else [place]
    ranks = [read_scalars(path) for path in files]
    tokens = job.training.global_batch_size * job.training.seq_len / job.cluster.num_gpus
    each = [_seconds(scalars, tokens) for scalars in ranks]
    steps = sorted(set.intersection(*(set(seconds) for seconds in each)))[UNTIMED:] if each else []
    if not steps:
        rule = f"no rank's events hold `{SECONDS}` or `{TPS}` after step {UNTIMED}"
        remedy = "give the folder that holds events.out.tfevents.* of one run"
        raise fault("steps", str(place), rule, remedy)
    memory: Values = {}
    for key, tag in (("peak_allocated_bytes", ACTIVE), ("peak_reserved_bytes", RESERVED)):
        values = [value for scalars in ranks for value in scalars.get(tag, {}).values()]
        memory |= {key: max(values) * GIB} if values else {}
    return _measured([max(seconds[step] for seconds in each) for step in steps], tokens, memory)


def _seconds(scalars: Mapping[str, Mapping[int, float]], tokens: float) -> dict[int, float]:
    """Seconds by step number, from the logged seconds, or else from tokens per second."""
    if SECONDS in scalars:
        return dict(scalars[SECONDS])
    return {step: tokens / rate for step, rate in scalars.get(TPS, {}).items() if rate > 0}


def _measured(seconds: Sequence[float], tokens: float, more: Mapping[str, Any]) -> Values:
    middle = median(seconds)
    return {
        "status": "ok",
        "rung": "probed",
        "step_seconds": middle,
        "steps": len(seconds),
        "step_seconds_sd": stdev(seconds) if len(seconds) > 1 else None,
        "tokens_per_second_per_gpu": tokens / middle,
        "trainer": "torchtitan",
        **more,
    }
