"""The programs that a probe can run, by the name that `probe.trainer` gives them."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

PROBE_TRAINERS = ["reference", "torchtitan"]


def _known(name: str) -> str:
    """The name itself. Raises ValueError "rule; remedy" for an unregistered program."""
    if name not in PROBE_TRAINERS:
        known = " or ".join(map(repr, PROBE_TRAINERS))
        raise ValueError(f"is not one of the known values; use {known}")
    return name


ProbeTrainerName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": PROBE_TRAINERS})
]
