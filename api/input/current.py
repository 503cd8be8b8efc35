"""A user's file or pasted text: a trainer's file or log, a job or a part of one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.api.input.jobs import parse_job
from planner.api.input.text import check_plain, mapping_in, read_text, read_yaml
from planner.errors import SpecError, fault
from planner.intake.current import REMEDY, UNREAD, format_of
from planner.intake.jobs import read_job
from planner.intake.trainer_files.config_files import read_config
from planner.intake.trainer_files.files import beside, gather, with_arguments
from planner.intake.trainer_files.titan_printed import printed_run, words_of_precision
from planner.probes.trainers.titan_run import check_log, log_numbers, stated_by
from planner.specs.job import KEYS, LABELS
from planner.specs.layout import Layout

MEASURED = ("status", "step_seconds", "tokens_per_second_per_gpu", "peak_reserved_bytes", "steps")
NAME = "text"


def read_job_file(path: str, field: str) -> dict[str, Any]:
    """The job in a file; a trainer's file is put under `current`. Raises SpecError."""
    theirs, mapping = _read(path, field)
    return mapping if theirs is None else {"current": theirs}


def read_current_file(path: str) -> dict[str, Any]:
    """Keys that `--current` adds to a job: `current` for a trainer's file, else `layout`."""
    theirs, mapping = _read(path, "--current")
    if theirs is not None:
        return {"current": theirs}
    inner = mapping.get("layout", mapping)
    if not isinstance(inner, Mapping):
        raise fault("--current", path, "holds no layout", "write keys such as dp_shard, tp and pp")
    return {"layout": inner}


def _read(path: str, field: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The `current` of a trainer's file, or None and the mapping in any other."""
    path, arguments = with_arguments(path)
    text = read_text(path, field, REMEDY).replace("\r\n", "\n")
    file = Path(path).expanduser()
    name = "standard input" if path == "-" else file.name
    lookup = beside(file)
    theirs = read_current_text(name, text, lookup, arguments)
    mapping = _mapping(path, text, field) if theirs is None else {}
    theirs = theirs or read_config(file.name, mapping, text, lookup)
    others = [key for key in mapping if key not in (*KEYS, *LABELS, *Layout.model_fields)]
    if theirs is None and len(others) > max(3, len(mapping) // 2):  # one line, not one for each key
        raise fault(field, path, UNREAD, REMEDY)
    return theirs, mapping


def read_current_text(
    name: str, text: str, lookup: Callable[[str], str | None] = lambda _: None, arguments: str = ""
) -> dict[str, Any] | None:
    """The job's `current` for a text; None where it is no trainer's. Raises SpecError.

    lookup: the text of a file that it names; unless given, no file is read.
    arguments: parameters of a script.
    """
    if format_of(text, name) == "torchtitan-log":
        return _log(name, text)
    return gather(name, text, lookup, arguments)


def _log(name: str, text: str) -> dict[str, Any]:
    """The job that a log describes, and what it measured.

    Raises SpecError for a log without a layout.
    """
    check_log(text, name)
    stated, doubts = stated_by(text)
    stated = dict(printed_run(text, stated) or stated)
    notes = []
    for doubt in doubts:
        field = doubt.field.partition(".")[2]
        if field not in stated["layout"]:
            taken = words_of_precision(text) if field == "precision" else "selective-op"
            stated["layout"] = {**stated["layout"], field: taken}
            notes += [] if taken == "bf16" else [f"{doubt.rule}: taken as {taken}"]
    if not stated["layout"]:
        remedy = "give the log from its first line on, or the config itself"
        raise fault("current", name, "names no mesh of GPUs", remedy)
    # the numbers need neither the GPU nor the model
    stand_in = {"gpu": "h100-sxm-80gb", **stated["cluster"]}
    measured: Mapping[str, Any] = {}
    if "num_gpus" in stand_in and {"seq_len", "global_batch_size"} <= stated["training"].keys():
        try:
            model = stated.get("model") or "llama3-8b"
            job = read_job({**stated, "cluster": stand_in, "model": model})
            measured = log_numbers(text, job, name)
        except SpecError:
            notes.append("no step of it was timed")
    numbers = {key: measured[key] for key in MEASURED if measured.get(key) is not None}
    head = {"name": name, "format": "torchtitan-log", "job": stated, "notes": notes}
    return {**head, **({"measured": numbers} if numbers else {})}


def _mapping(path: str, text: str, field: str) -> dict[str, Any]:
    if text.startswith("#!") or path.endswith((".sh", ".slurm", ".sbatch", ".py")):
        raise fault(field, path, UNREAD, REMEDY)
    return mapping_in(read_yaml(text, field, shown=path), path, field)


class StillWrong(BaseModel):
    """A field that is missing or wrong, with what would pass."""

    field: str
    message: str
    remedy: str


class PastedJob(BaseModel):
    """The job that a text means.

    kind: "job", "config.json", "layout", or a trainer's format.
    job: what POST /plan takes, once nothing is wrong any more.
    wrong: what is missing or wrong until then.
    """

    kind: str
    job: dict[str, Any]
    wrong: list[StillWrong]


def read_pasted(text: str, name: str) -> PastedJob:
    """The job that the text states, and what it still lacks.

    name: of the file it comes from, which tells TOML from YAML.

    Raises SpecError for a text that is none of these.
    """
    kind, job = _meant(text, name)
    check_plain(job, NAME)
    wrong: list[StillWrong] = []
    try:
        parse_job(job, allow_files=False)
    except SpecError as error:
        wrong = [
            StillWrong(field=one.field, message=one.rule, remedy=one.remedy) for one in error.faults
        ]
    return PastedJob(kind=kind, job=job, wrong=wrong)


def _meant(text: str, name: str) -> tuple[str, dict[str, Any]]:
    theirs = read_current_text(name, text.replace("\r\n", "\n"))
    if theirs is not None:
        return str(theirs["format"]), {"current": theirs}
    value = read_yaml(text, NAME, shown=name)
    if not isinstance(value, Mapping):
        rule = "is no mapping of keys to values"
        remedy = "paste a job, a config.json, a layout, a TorchTitan TOML or a Megatron-LM script"
        raise fault(NAME, name, rule, remedy)
    keys = set(map(str, value))
    if keys & {"hidden_size", "architectures", "model_type", "num_hidden_layers"}:
        return "config.json", {"model": dict(value)}
    if keys and keys <= set(Layout.model_fields):
        return "layout", {"layout": dict(value)}
    return "job", dict(value)
