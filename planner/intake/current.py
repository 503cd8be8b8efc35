"""Entry point for the current run: reads a job's `current` and completes the job from it."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.errors import Fault, PlannerError, SpecError, fault
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.intake.trainer_files import bridge, megatron, megatron_log, primus, titan_command
from planner.intake.trainer_files.config_files import PASSES
from planner.intake.trainer_files.statement import Run, StatedModel
from planner.intake.trainer_files.titan_registry import is_registry
from planner.intake.trainer_files.torchtitan import StatedTitan, check_keys, read_toml
from planner.specs.job import CurrentFormat, CurrentSpec
from planner.specs.model import ModelSpec
from planner.specs.validation import build
from planner.trainers.registry import trainer_name

# A job on standard input, in JSON or YAML: it may name torchtitan as its trainer.
_JOB = re.compile(r"\A\s*\{|^(?:cluster|training|layout):", re.M)
_TITAN_FLAG = re.compile(
    r"--(?:training|parallelism|activation_checkpoint|job|compile|model)\.\w"
    r"|run_train\.sh|torchtitan"
)
_MEGATRON_FLAG = re.compile(
    r"--(?:tensor-model-parallel-size|pipeline-model-parallel-size"
    r"|micro-batch-size|num-attention-heads)\b"
)
_NEMO = re.compile(r"megatron_\w+_pretraining\.py")  # of NeMo 1, with Hydra overrides
_LOG = re.compile(r"\[titan\] \d{4}-|\bstep:\s*\d+\s+loss:")
TABLES = frozenset(
    {"job", "model", "training", "parallelism", "activation_checkpoint", "compile", "optimizer",
        "metrics"}
)  # fmt: skip
Stated = StatedTitan | megatron.StatedMegatron
"""A text that was read."""
READERS: Mapping[str | None, Callable[[CurrentSpec], Stated]] = {
    "torchtitan-python": titan_command.of_module, "torchtitan-command": titan_command.say,
    "megatron-log": megatron.say_log, "megatron-bridge": bridge.say, "primus": primus.read_primus,
}  # fmt: skip
UNREAD = "is no trainer's configuration that can be read"
REMEDY = "give a TorchTitan TOML or command, a Megatron script, a log of either, or YAML or JSON"
EXAMPLES = {
    "model": "add --model, for example --model llama3-8b",
    "cluster.gpu": "add --gpu, for example --gpu h100-sxm-80gb",
    "cluster.num_gpus": "add --num-gpus, for example --num-gpus 8",
    "training.seq_len": "add --seq-len, for example --seq-len 8192",
    "training.global_batch_size": "add --global-batch-size, for example --global-batch-size 512",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The current run, as read.

    stated: what the text says; None where the job was read before (a log).
    run: the run that it describes; None likewise.
    """

    spec: CurrentSpec
    format: CurrentFormat
    stated: Stated | None
    run: Run | None


def format_of(text: str, name: str) -> CurrentFormat | None:
    """Format of this text, by its name and contents.

    None for a text that is no trainer's, such as a job or a layout in YAML.
    Raises SpecError for a command of NeMo, whose defaults are in files of its own.
    """
    suffix = name.lower().rpartition(".")[2]
    if suffix == "toml" or _is_toml(text):
        return "torchtitan-toml"
    if suffix in ("json", "yaml", "yml"):
        return None
    if suffix == "py":
        return "torchtitan-python" if is_registry(text) else None
    if _LOG.search(text):
        return "torchtitan-log"
    if megatron_log.is_log(text):
        return "megatron-log"
    if _MEGATRON_FLAG.search(text):
        return "megatron-arguments"
    if _NEMO.search(text):
        rule = "is a command of NeMo with Hydra overrides, which is not read"
        remedy = (
            "write a job with model, cluster, training {trainer: nemo, trainer_version: NeMo "
            "...} and layout, or give overrides of Megatron-Bridge"
        )
        raise fault("current", name, rule, remedy)
    if bridge.COMMAND.search(text):
        return "megatron-bridge"
    titan = _TITAN_FLAG.search(text) and not _JOB.search(text)
    return "torchtitan-command" if titan else None


def _is_toml(text: str) -> bool:
    try:
        return bool(TABLES & set(tomllib.loads(text)))
    except (tomllib.TOMLDecodeError, RecursionError):
        return False


def read(spec: CurrentSpec, release: str | None = None) -> Stated:
    """Reads a config or a script. Raises SpecError for any other text.

    release: of the trainer, where the job names one.
    """
    kind = spec.format or format_of(spec.text, spec.name)
    if kind == "torchtitan-toml":
        modules = {
            name.removesuffix(".py"): text
            for name, text in spec.files.items()
            if name.endswith(".py")
        }
        given, spelling = read_toml(spec.text, spec.name)
        check_keys(given, "0.2")
        return StatedTitan(line="0.2", given=given, spelling=spelling, modules=modules)
    if kind == "megatron-arguments":
        return megatron.say(spec, release)
    if kind not in READERS:
        raise fault("current", spec.name, UNREAD, REMEDY)
    return READERS[kind](spec)


def named_files(name: str, text: str) -> tuple[str, ...]:
    """Paths of further files that a text names: a module with a model, a script's TOML."""
    kind = format_of(text, name)
    if kind == "torchtitan-toml":
        given, _ = read_toml(text, name)
        module = given.get("experimental.custom_import")
        return (f"{module.replace('.', '/')}.py",) if isinstance(module, str) and module else ()
    if kind == "megatron-arguments":
        return tuple(megatron.named_by(text))
    return titan_command.named_by(text) if kind == "torchtitan-command" else ()


def complete(values: Mapping[str, object]) -> dict[str, object]:
    """The job with model, cluster, training and layout filled in from its `current`.

    What the job states itself takes precedence. A job without `current`, or with a layout of its
    own, stays as it is.
    Raises SpecError naming everything that neither states.
    """
    raw = values.get("current")
    if raw is None or values.get("layout") is not None:
        return dict(values)
    spec = build(CurrentSpec, raw, "current")
    if spec.job:
        job = _derived(_merged(spec.job, values))
        _raise_missing(spec.name, job, StatedModel(value=None))
        return job
    stated = read(spec, _release(values))
    job = dict(values)
    job["cluster"] = _cluster(stated.machine.keys(), values.get("cluster"))
    named = stated.model
    if values.get("model") is None:
        job["model"] = named.value
    _raise_missing(spec.name, job, named)
    model = read_model(job["model"])
    run = stated.run(model, _num_gpus(stated, job["cluster"]))
    asked = values.get("training")
    given = asked.get("trainer") if isinstance(asked, Mapping) else None
    if isinstance(given, str) and trainer_name(given) != stated.trainer:
        remedy = "leave the trainer out, or compare with a layout in JSON"
        rule = f"is not what {spec.name} is written for: {stated.trainer}"
        raise fault("training.trainer", given, rule, remedy)
    job["training"] = {**run.training, **(asked if isinstance(asked, Mapping) else {})}
    job["layout"] = dict(run.layout)
    _raise_missing(spec.name, job, named)
    return job


def _release(values: Mapping[str, object]) -> str | None:
    training = values.get("training")
    named = training.get("trainer_version") if isinstance(training, Mapping) else None
    return named if isinstance(named, str) else None


def _merged(read_job: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    job = dict(values)
    for part, ours in read_job.items():
        theirs = values.get(part)
        if part == "cluster" and isinstance(ours, Mapping):
            job[part] = _cluster(ours, theirs)
        elif isinstance(ours, Mapping) and (theirs is None or isinstance(theirs, Mapping)):
            job[part] = {**ours, **(theirs or {})}
        elif theirs is None:
            job[part] = ours
    return job


def _derived(job: dict[str, object]) -> dict[str, object]:
    """The job with what follows from its number of GPUs: replicas of DDP, and the global batch."""
    passes, layout, cluster = job.pop(PASSES, 0), job.get("layout"), job.get("cluster")
    num_gpus = cluster.get("num_gpus") if isinstance(cluster, Mapping) else None
    if not isinstance(layout, Mapping) or not isinstance(num_gpus, int):
        return job
    replicas = max(1, num_gpus // (layout.get("tp", 1) * layout.get("cp", 1)))
    training, micro = job.get("training"), layout.get("micro_batch_size")
    if isinstance(training, Mapping) and passes and micro:
        job["training"] = {"global_batch_size": micro * passes * replicas, **training}
    if layout.get("zero_stage") == 0 and "dp_replicate" not in layout:
        job["layout"] = {**layout, "dp_replicate": replicas, "dp_shard": 1}
    return job


def _cluster(launched: Mapping[str, object], given: object) -> object:
    """The job's cluster, completed by what the launcher says.

    A cluster given by name stays as it is. One with another number of GPUs keeps its own node size.
    """
    if isinstance(given, str):
        return given
    known = dict(given) if isinstance(given, Mapping) else {}
    machine = dict(launched)
    if known.get("num_gpus") not in (None, machine.get("num_gpus")):
        machine.pop("gpus_per_node", None)
    return {**machine, **known}


def _num_gpus(stated: Stated, cluster: object) -> int:
    """GPUs of the run: the launcher's, else those of the job (of several sizes, the largest)."""
    given = cluster.get("num_gpus") if isinstance(cluster, Mapping) else None
    launched = stated.machine.num_gpus
    if launched is not None and (given is None or given == launched):
        return launched
    return read_cluster(cluster, allow_files=False).num_gpus


def _raise_missing(name: str, job: Mapping[str, object], model: StatedModel) -> None:
    """Raises SpecError with everything that neither the text nor the job states.

    Each fault names the flag that sets the missing value.
    """
    cluster, training = job.get("cluster"), job.get("training")
    known = cluster if isinstance(cluster, Mapping) else {"gpu": cluster, "num_gpus": cluster}
    trained = training if isinstance(training, Mapping) else {}
    fields = [f"cluster.{key}" for key in ("gpu", "num_gpus") if known.get(key) is None]
    if job.get("layout") is not None:  # only a log's job has one; configs have defaults for both
        fields += [
            f"training.{key}"
            for key in ("seq_len", "global_batch_size")
            if trained.get(key) is None
        ]
    why = f": {model.lacking}" if model.lacking else ""
    missing = [Fault(field, None, f"is not in {name}", EXAMPLES[field]) for field in fields]
    if job.get("model") is None:
        missing.insert(0, Fault("model", None, f"is not in {name}{why}", EXAMPLES["model"]))
    if missing:
        raise SpecError(missing)


def read_again(values: Mapping[str, object], model: ModelSpec, num_gpus: int) -> Current | None:
    """Reads a stored job's `current` again, for comparison; None where the job has none.

    `stated` and `run` are None where the layout came without a config, or where reading fails.
    """
    raw = values.get("current")
    if raw is None:
        return None
    spec = build(CurrentSpec, raw, "current")
    kind = spec.format or format_of(spec.text, spec.name) or "layout"
    if spec.job or kind in ("layout", "torchtitan-log"):
        return Current(spec=spec, format=kind, stated=None, run=None)
    try:
        stated = read(spec, _release(values))
        return Current(spec=spec, format=kind, stated=stated, run=stated.run(model, num_gpus))
    except PlannerError:
        return Current(spec=spec, format=kind, stated=None, run=None)


def own_run(values: Mapping[str, object], model: ModelSpec, num_gpus: int) -> Run | None:
    """The run that a job's own file describes; None for a job without one, or with a log."""
    current = read_again(values, model, num_gpus)
    return None if current is None else current.run
