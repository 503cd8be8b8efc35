"""The JSON schema of a job as a person writes it, with a line of help for every field.

The web page makes its form of it; editors complete and check job files with it.
"""

import inspect
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from planner.api.docstrings import notes_in
from planner.specs.cluster import ClusterRequest
from planner.specs.job import CurrentSpec, ProbeSpec, SearchSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PARTS: dict[str, type[BaseModel]] = {
    "model": ModelSpec, "cluster": ClusterRequest, "training": TrainingSpec, "layout": Layout,
    "search": SearchSpec, "probe": ProbeSpec, "current": CurrentSpec,
}  # fmt: skip
REQUIRED = {"cluster": ("num_gpus",), "training": ("seq_len", "global_batch_size")}
ABOUT = {
    "model": "A catalogue name, a Hugging Face id, or the keys of a config.json.",
    "cluster": "A catalogue name, or its GPU, how many there are, and the fabric between them.",
    "training": "What a search never changes.",
    "layout": "To plan: what runs today, for comparison. To estimate: the layout to price.",
    "search": "How many answers, what is fixed, what may vary, what is optimised.",
    "probe": "Measure the best layouts on a pool of GPUs, within a budget.",
    "current": "What runs today, as text: a TorchTitan TOML or command, a Megatron-LM script.",
}
NUMBER_OR_TEXT = {"type": ["number", "string"]}
GPU = {"type": ["string", "object"], "description": "Name in the catalogue, or its own figures."}
NUM_GPUS = {
    "type": ["integer", "string", "array"],
    "description": "A number, a range such as 64..1024, or a list: how many GPUs?",
}
COUNT = {"type": ["integer", "string"]}


@lru_cache(maxsize=2)
def job_schema(reference: str = "#/$defs/{model}") -> dict[str, Any]:
    """The schema of `POST /plan`'s body and of a job file.

    reference: how its parts refer to each other, which are listed under `$defs`.
    """
    properties: dict[str, Any] = {"id": {"type": ["string", "integer"], "description": "Echoed."}}
    definitions: dict[str, Any] = {}
    for name, spec in PARTS.items():
        part = spec.model_json_schema(ref_template=reference, by_alias=True)
        definitions |= part.pop("$defs", {})
        shape = _as_written(name, part)
        if name in ("model", "cluster"):  # a name will do
            shape = {"anyOf": [{"type": "string"}, shape]}
        properties[name] = {**shape, "description": ABOUT[name]}
    return {
        "$schema": DIALECT,
        "title": "Job",
        "type": "object",
        "properties": properties,
        "required": ["model", "cluster", "training"],
        "$defs": definitions,
    }


def meanings(spec: type[BaseModel]) -> dict[str, str]:
    """Describes each field, from the docstrings of its class and the class's bases."""
    found: dict[str, str] = {}
    for cls in reversed(spec.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= notes_in(inspect.cleandoc(cls.__doc__ or ""))
    return found


def _as_written(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Relaxes a part of the schema to what a person may omit or write as text."""
    fields: dict[str, Any] = dict(part["properties"])
    if name == "cluster":
        # quantities are written with their units: "400 Gb/s"
        fields = {key: _with_units(field) for key, field in fields.items()}
        fields = {"gpu": GPU, **fields, "num_gpus": NUM_GPUS}
    if name == "training":
        fields |= {"seq_len": COUNT, "total_tokens": NUMBER_OR_TEXT}
    if name == "model":
        fields = {"base": {"type": "string", "description": "Overridden by the rest."}, **fields}
    known = meanings(PARTS[name])
    fields = {
        key: {"description": known[key], **field} if key in known else field
        for key, field in fields.items()
    }
    required = list(REQUIRED.get(name, ()))
    return {
        "type": "object",
        "properties": fields,
        "additionalProperties": name == "model",
        **({"required": required} if required else {}),
    }


def _with_units(field: dict[str, Any]) -> dict[str, Any]:
    kinds = [one.get("type") for one in field.get("anyOf", [field])]
    if "number" not in kinds:
        return field
    return {**NUMBER_OR_TEXT, **({"default": field["default"]} if field.get("default") else {})}
