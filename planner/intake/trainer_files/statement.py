"""Statements of one text about a run, before anything else completes it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

from planner.errors import Fault
from planner.specs.model import ModelSpec

LABELS = {
    "torchtitan-toml": "TorchTitan TOML", "torchtitan-command": "TorchTitan command",
    "torchtitan-python": "TorchTitan configuration in Python",
    "megatron-arguments": "Megatron arguments", "megatron-log": "Megatron log",
    "megatron-bridge": "overrides of Megatron-Bridge", "primus": "Primus configuration",
    "torchtitan-log": "TorchTitan log", "configuration": "configuration",
    "layout": "layout",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run in the planner's terms.

    training, layout: keys as in a job, as far as the text and its trainer's defaults set them.
    notes: what was read but is not priced.
    refusals: what makes the trainer stop, besides the rules on layouts.
    """

    training: Mapping[str, object]
    layout: Mapping[str, object]
    notes: tuple[str, ...] = ()
    refusals: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as a launcher states it; None where it does not."""

    gpu: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None

    def keys(self) -> dict[str, object]:
        """Keys of a job's `cluster`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedModel:
    """The model that a text names.

    value: as in a job's `model`; None where it cannot be found.
    lacking: why it cannot be found.
    """

    value: object | None
    lacking: str = ""
    notes: tuple[str, ...] = field(default=())


class Stated(Protocol):
    """A text that was read.

    trainer, version: the software that it is written for.
    """

    @property
    def trainer(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def model(self) -> StatedModel: ...

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        """The run on this many GPUs. Raises SpecError for values that no trainer takes."""
        ...
