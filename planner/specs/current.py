"""The current run in a job: text of a trainer's config, script or log, or the job read from it."""

from typing import Any, Literal

from pydantic import Field

from planner.specs.validation import Name, Value

CurrentFormat = Literal[
    "torchtitan-toml", "torchtitan-command", "torchtitan-python", "megatron-arguments",
    "megatron-log", "megatron-bridge", "primus", "torchtitan-log", "configuration", "layout",
]  # fmt: skip
MAX_TEXT = 2_000_000


class CurrentSpec(Value, extra="forbid"):
    """The job's `current`.

    name: of the file.
    format: None means that the text decides.
    text: the file itself.
    files: other files that the text names, by the name it uses (a script's TOML).
    job: for a log, what was read from it, in the form of a job.
    measured: the measurements of that run.
    notes: what had to be assumed about it.
    """

    name: Name = Field(default="current", max_length=400)
    format: CurrentFormat | None = None
    text: str = Field(default="", max_length=MAX_TEXT)
    files: dict[str, str] = Field(default_factory=dict)
    job: dict[str, Any] = Field(default_factory=dict)
    measured: dict[str, Any] | None = None
    notes: list[str] = Field(default_factory=list)
