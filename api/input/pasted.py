"""A text that somebody pasted or dropped: a job, a part of one, or a trainer's file."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from planner.api.input.current import read_current_text
from planner.api.input.jobs import parse_job
from planner.api.input.text import check_plain, read_yaml
from planner.errors import SpecError, fault
from planner.specs.layout import Layout

NAME = "text"


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
