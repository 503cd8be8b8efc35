"""What one text says of a run, before anything is filled in from elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from planner.errors import Fault
from planner.specs.model import ModelSpec

LABELS = {
    "torchtitan-toml": "TorchTitan TOML", "torchtitan-command": "TorchTitan command",
    "megatron-arguments": "Megatron arguments", "torchtitan-log": "TorchTitan log",
    "layout": "layout",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run in the planner's words. training, layout: keys as in a job, those the text and its
    trainer's defaults settle.

    notes: what was read and is not priced.  refusals: what the trainer stops at, beyond the rules
        of a layout.
    """

    training: Mapping[str, object]
    layout: Mapping[str, object]
    notes: tuple[str, ...] = ()
    refusals: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a launcher says of the machine; None where it does not."""

    num_gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None

    def keys(self) -> dict[str, object]:
        """As a job's `cluster` has them."""
        pairs = (
            ("gpu", self.gpu),
            ("num_gpus", self.num_gpus),
            ("gpus_per_node", self.gpus_per_node),
        )
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSaid:
    """The model that a text names: as a job's `model`, or None and why not."""

    value: object | None
    lacking: str = ""
    notes: tuple[str, ...] = field(default=())


class Said(Protocol):
    """A text that was read. trainer, version: the software it is written for."""

    @property
    def trainer(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str | None: ...  # noqa: D102
    @property
    def machine(self) -> Machine: ...  # noqa: D102
    @property
    def model(self) -> ModelSaid: ...  # noqa: D102

    def run(self, model: ModelSpec, num_gpus: int) -> Run:
        """The run on this many GPUs. Raises SpecError for values that no trainer takes."""
        ...
