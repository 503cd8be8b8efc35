"""Flags as the job's mapping that they mean: over a job's file, or a layout of a stored plan."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from planner.api.cli.typed import complete_plan
from planner.api.input.current import read_current_file, read_job_file
from planner.api.input.names import plan_id_of
from planner.api.input.text import check_plain, read_mapping_file, read_yaml
from planner.api.jobs.plans import entry_of, job_of
from planner.api.wiring import Wiring
from planner.catalog.clusters import cluster_document
from planner.errors import Fault, SpecError, fault

FILE_ENDINGS = (".yaml", ".yml", ".json")
CATALOG_LABELS = frozenset({"aliases", "source", "notes"})


# of `training` and of `search`, under the names of their flags
TRAINING = (
    "seq_len", "global_batch_size", "trainer", "trainer_version", "total_tokens", "checkpoint",
)  # fmt: skip
SEARCH = ("top_k", "objective", "sampler", "seed", "prefer")
# what has to be given without a job's file, with an example of each
REQUIRED = {
    "model": "llama3-8b; `planner-cli catalog models` lists them",
    "gpu": "h100-sxm-80gb",
    "num_gpus": "64",
    "seq_len": "8192",
    "global_batch_size": "512",
}
PlanId = Annotated[
    str,
    typer.Argument(
        metavar="PLAN_ID",
        autocompletion=complete_plan,
        help="Id that `recommend` printed, or its beginning.",
    ),
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN_ID",
        autocompletion=complete_plan,
        help="A stored plan, by its id or the beginning of it.",
    ),
]


def job_of_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The job as a mapping, of the flags of `recommend` by name; None where one is not given.

    Raises SpecError.
    """
    training = {name: given.get(name) for name in TRAINING}
    if training["checkpoint"] is not None:
        training["checkpoint"] = parse_checkpoint(training["checkpoint"])
    job, gpu, cluster = given.get("job"), given.get("gpu"), given.get("cluster")
    values = read_job_file(job, "--job") if job is not None else {}
    if given.get("model") is not None:
        values["model"] = given["model"]
    if cluster is not None and gpu is not None:
        raise fault("--gpu", gpu, "cannot be given beside --cluster", "leave one of the two out")
    chosen = read_cluster(cluster if cluster is not None else values.get("cluster"))
    if gpu is not None:
        chosen = {**(chosen if isinstance(chosen, Mapping) else {}), "gpu": gpu}
    if given.get("num_gpus") is not None:
        chosen = {**spelled_out(chosen), "num_gpus": parse_count(given["num_gpus"])}
    if given.get("price_per_gpu_hour") is not None:
        chosen = {**spelled_out(chosen), "price_per_gpu_hour": given["price_per_gpu_hour"]}
    if chosen is not None:
        values["cluster"] = chosen
    _overlay(values, "training", training)
    search, before = {name: given.get(name) for name in SEARCH}, values.get("search")
    for key, parse, remedy in REPEATED:
        pairs = _each_once(map(parse, given.get(key) or ()), f"--{key}", remedy)
        if pairs:
            kept = before.get(key) if isinstance(before, Mapping) else None
            search[key] = {**(kept if isinstance(kept, Mapping) else {}), **pairs}
    _overlay(values, "search", search)
    if given.get("current") is not None:
        values.update(read_current_file(given["current"]))
    _overlay(values, "probe", {"max_probes": given.get("probe")})
    check_plain(values, "job")
    return values


def _overlay(values: dict[str, Any], part: str, flags: Mapping[str, Any]) -> None:
    before = values.get(part)
    given = {key: value for key, value in flags.items() if value is not None}
    if given and (before is None or isinstance(before, Mapping)):
        values[part] = {**(before or {}), **given}


def check_complete(values: Mapping[str, Any]) -> None:
    """Raises SpecError, in the words of the flags, when a whole part of the job is missing."""
    if all(values.get(part) is not None for part in ("model", "cluster", "training")):
        return
    training, cluster = values.get("training") or {}, values.get("cluster")
    named = {"gpu", "num_gpus"} if isinstance(cluster, str) else cluster or {}
    faults = []
    for key, example in REQUIRED.items():
        if key not in {*values, *named, *training}:
            flag = f"--{key.replace('_', '-')}"
            remedy = f"for example {flag} {example}"
            faults.append(Fault(flag, None, "is required without --job", remedy))
    raise SpecError(faults)


def read_cluster(value: object) -> object:
    """The mapping in a cluster's file, for a plan that needs no file; else the value."""
    if not isinstance(value, str) or not (value.lower().endswith(FILE_ENDINGS) or os.sep in value):
        return value
    mapping = read_mapping_file(value, "cluster")
    inner = mapping.get("cluster", mapping)
    return _unlabelled(inner) if isinstance(inner, Mapping) else inner


def spelled_out(cluster: object) -> Mapping[str, Any]:
    """The mapping behind a catalogue name, so that one value of it can be changed."""
    if isinstance(cluster, str):
        return _unlabelled(cluster_document(cluster))
    return cluster if isinstance(cluster, Mapping) else {}


def _unlabelled(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in entry.items() if key not in CATALOG_LABELS}


def _each_once(pairs: Iterable[tuple[str, Any]], flag: str, remedy: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise fault(flag, key, "is given twice", remedy)
        values[key] = value
    return values


def parse_count(text: str) -> object:
    """256 as a number, "64..1024" as the range it is, "64,96" as a list."""
    return read_yaml(f"[{text}]" if "," in text and "[" not in text else text, "--num-gpus")


def parse_checkpoint(text: str) -> dict[str, Any]:
    """{"interval_steps": 500, "mode": "async-pinned"} from "500:async-pinned".

    The mode may be left out.
    """
    steps, colon, mode = text.partition(":")
    if not (steps.strip().isascii() and steps.strip().isdigit()) or (colon and not mode.strip()):
        rule = "is not of the form STEPS or STEPS:MODE"
        raise fault("--checkpoint", text, rule, "write for example --checkpoint 500:async")
    return {"interval_steps": int(steps), **({"mode": mode.strip()} if colon else {})}


def parse_pair(text: str) -> tuple[str, Any]:
    """("tp", 8) from "tp=8"; values are read as YAML. Raises SpecError."""
    key, value = _parted(text, "--fix", "key=value", "tp=8")
    return key, read_yaml(value, f"--fix {key}")


def parse_choices(text: str) -> tuple[str, list[Any]]:
    """("precision", ["bf16", "mxfp8"]) from "precision=bf16,mxfp8"."""
    key, value = _parted(text, "--allow", "key=value,value", "tp=4,8")
    choices = read_yaml(f"[{value}]", f"--allow {key}")
    check_plain(choices, "--allow")
    return key, choices


def _parted(text: str, flag: str, form: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise fault(flag, text, f"is not of the form {form}", f"write for example {flag} {example}")
    return key.strip(), value


REPEATED: tuple[tuple[str, Callable[[str], tuple[str, Any]], str], ...] = (
    ("fix", parse_pair, "use --allow for several values"),
    ("allow", parse_choices, "list all its values after one --allow"),
)


def check_one(job: str | None, plan: str | None, which: str) -> None:
    """Raises SpecError unless exactly one of file and plan is given. which: of its layouts."""
    if (job is None) == (plan is None):
        rule = "exactly one of --job and --plan is needed"
        raise fault("--job", job, rule, f"give --job FILE, or --plan PLAN_ID {which}")


def layout_given(
    wiring: Wiring, job: str | None, plan: str | None, rank: int | None
) -> dict[str, Any]:
    """The job with its layout, as a mapping.

    Raises SpecError unless exactly one of file and plan is given.
    """
    check_one(job, plan, "--rank N")
    if job is not None:
        if rank is not None:
            remedy = "add --plan PLAN_ID, or leave --rank out"
            raise fault("--rank", rank, "is of a plan's layouts", remedy)
        return read_job_file(job, "--job")
    stored = wiring.store.get_plan(plan_id_of(wiring, str(plan), "--plan"))
    return job_of(stored, entry_of(stored, 1 if rank is None else rank, "--rank"))


def completed_by(
    values: dict[str, Any], *, model: str | None, gpu: str | None, num_gpus: str | None
) -> dict[str, Any]:
    """The job of a file with the flags given beside it. Raises SpecError.

    A trainer's file often names no GPU.
    """
    found = values if model is None else {**values, "model": model}
    given = {"gpu": gpu, "num_gpus": None if num_gpus is None else parse_count(num_gpus)}
    more = {key: value for key, value in given.items() if value is not None}
    if not more:
        return found
    return {**found, "cluster": {**spelled_out(read_cluster(values.get("cluster"))), **more}}
