"""The stack that a run belongs to: what all of its runs share and a model of kernels cannot know.

A stack is one trainer on one GPU at one place: its containers, clocks, network and settings that
nobody wrote down. Its units are its runs in one number format, dense or with experts. A run of
one's own shows how far off its unit is, and by part how far its stack is.
"""

from planner.precision import PRECISIONS
from planner.specs.model import ModelSpec

STACK, UNIT = "stack", "unit"  # first halves of a calibration's keys
DENSE, EXPERTS = "dense", "experts"  # last words of a unit's name


def stack_name(trainer: str, gpu: str, source: str = "") -> str:
    """For example "torchtitan on h100-sxm-80gb".

    source: who published the runs; empty for one's own.
    """
    return f"{source}: {trainer} on {gpu}" if source else f"{trainer} on {gpu}"


def unit_name(stack: str, precision: str, model: ModelSpec) -> str:
    """For example "torchtitan on h100-sxm-80gb, bf16, dense"."""
    return f"{stack}, {precision}, {EXPERTS if model.is_moe else DENSE}"


def kind_of(unit: str) -> str:
    """DENSE or EXPERTS: the models of a unit of this name."""
    return unit.rpartition(", ")[2]


def unit_names(stack: str, model: ModelSpec) -> tuple[str, ...]:
    """The units of a stack that train this model, in the order of the precision codes."""
    return tuple(unit_name(stack, precision, model) for precision in PRECISIONS.names)


def memory_class(trainer: str, vendor: str, *, experts: bool) -> str:
    """Name of the class whose peaks deviate alike; each vendor has libraries of its own."""
    return f"memory of {trainer} on {vendor}: {EXPERTS if experts else DENSE}"
