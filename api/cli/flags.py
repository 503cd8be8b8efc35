"""From flags to the mapping that a job file would hold; flags override the file."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.api.input.current import read_current_file, read_job_file
from planner.api.input.text import check_plain, read_mapping_file, read_yaml
from planner.catalog.clusters import cluster_document
from planner.errors import Fault, SpecError, fault

FILE_ENDINGS = (".yaml", ".yml", ".json")
CATALOG_LABELS = frozenset({"aliases", "source", "notes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """Flags of `recommend` as typed; None where not given."""

    job: str | None
    model: str | None
    gpu: str | None
    cluster: str | None
    num_gpus: str | None
    training: Mapping[str, Any]
    search: Mapping[str, Any]
    fix: Sequence[str]
    allow: Sequence[str]
    current: str | None
    probe: int | None
    price_per_gpu_hour: float | None = None

    def values(self) -> dict[str, Any]:
        """The job as a mapping. Raises SpecError."""
        values = read_job_file(self.job, "--job") if self.job is not None else {}
        if self.model is not None:
            values["model"] = self.model
        cluster = self._cluster(values.get("cluster"))
        if cluster is not None:
            values["cluster"] = cluster
        self._overlay(
            values,
            "training",
            {key: value for key, value in self.training.items() if value is not None},
        )
        self._overlay(values, "search", self._search(values.get("search")))
        if self.current is not None:
            values.update(read_current_file(self.current))
        if self.probe is not None:
            self._overlay(values, "probe", {"max_probes": self.probe})
        check_plain(values, "job")
        return values

    def _overlay(self, values: dict[str, Any], part: str, given: Mapping[str, Any]) -> None:
        before = values.get(part)
        if given and (before is None or isinstance(before, Mapping)):
            values[part] = {**(before or {}), **given}

    def _search(self, before: object) -> dict[str, Any]:
        given = {key: value for key, value in self.search.items() if value is not None}
        for key, pairs in (
            (
                "fix",
                _each_once(
                    (parse_pair(text, "--fix") for text in self.fix),
                    "--fix",
                    "use --allow for several values",
                ),
            ),
            (
                "allow",
                _each_once(
                    (parse_choices(text) for text in self.allow),
                    "--allow",
                    "list all its values after one --allow",
                ),
            ),
        ):
            if pairs:
                kept = before.get(key) if isinstance(before, Mapping) else None
                given[key] = {**(kept if isinstance(kept, Mapping) else {}), **pairs}
        return given

    def _cluster(self, before: object) -> object:
        if self.cluster is not None and self.gpu is not None:
            raise fault(
                "--gpu", self.gpu, "cannot be given beside --cluster", "leave one of the two out"
            )
        chosen = read_cluster(self.cluster if self.cluster is not None else before)
        if self.gpu is not None:
            chosen = {**(chosen if isinstance(chosen, Mapping) else {}), "gpu": self.gpu}
        if self.num_gpus is not None:
            chosen = {**spelled_out(chosen), "num_gpus": parse_count(self.num_gpus)}
        if self.price_per_gpu_hour is not None:
            chosen = {**spelled_out(chosen), "price_per_gpu_hour": self.price_per_gpu_hour}
        return chosen


def check_complete(values: Mapping[str, Any]) -> None:
    """Raises SpecError, in the words of the flags, when a whole part of the job is missing."""
    if all(values.get(part) is not None for part in ("model", "cluster", "training")):
        return
    training, cluster = values.get("training") or {}, values.get("cluster")
    named = {"gpu", "num_gpus"} if isinstance(cluster, str) else cluster or {}
    missing = [
        (flag, remedy)
        for flag, given, remedy in (
            (
                "--model",
                "model" in values,
                "for example --model llama3-8b; `planner-cli catalog models` lists them",
            ),
            ("--gpu", "gpu" in named, "for example --gpu h100-sxm-80gb"),
            ("--num-gpus", "num_gpus" in named, "for example --num-gpus 64"),
            ("--seq-len", "seq_len" in training, "for example --seq-len 8192"),
            (
                "--global-batch-size",
                "global_batch_size" in training,
                "for example --global-batch-size 512",
            ),
        )
        if not given
    ]
    raise SpecError(
        [Fault(flag, None, "is required without --job", remedy) for flag, remedy in missing]
    )


def read_cluster(value: object) -> object:
    """The mapping in a cluster's file, for a plan that needs no file; else the value."""
    if not isinstance(value, str) or not (value.lower().endswith(FILE_ENDINGS) or os.sep in value):
        return value
    mapping = read_mapping_file(value, "cluster")
    inner = mapping.get("cluster", mapping)
    return (
        {key: item for key, item in inner.items() if key not in CATALOG_LABELS}
        if isinstance(inner, Mapping)
        else inner
    )


def spelled_out(cluster: object) -> Mapping[str, Any]:
    """The mapping behind a catalogue name, so that one value of it can be changed."""
    if isinstance(cluster, str):
        return {
            key: item
            for key, item in cluster_document(cluster).items()
            if key not in CATALOG_LABELS
        }
    return cluster if isinstance(cluster, Mapping) else {}


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
        raise fault(
            "--checkpoint",
            text,
            "is not of the form STEPS or STEPS:MODE",
            "write for example --checkpoint 500:async",
        )
    return {"interval_steps": int(steps), **({"mode": mode.strip()} if colon else {})}


def parse_pair(text: str, flag: str) -> tuple[str, Any]:
    """("tp", 8) from "tp=8"; values are read as YAML. Raises SpecError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise fault(flag, text, "is not of the form key=value", f"write for example {flag} tp=8")
    return key.strip(), read_yaml(value, f"{flag} {key.strip()}")


def parse_choices(text: str) -> tuple[str, list[Any]]:
    """("precision", ["bf16", "mxfp8"]) from "precision=bf16,mxfp8"."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise fault(
            "--allow",
            text,
            "is not of the form key=value,value",
            "write for example --allow tp=4,8",
        )
    choices = read_yaml(f"[{value}]", f"--allow {key.strip()}")
    check_plain(choices, "--allow")
    return key.strip(), choices
