"""A question about one collective, as both edges ask it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from planner.errors import Fault, SpecError, fault
from planner.intake.machines import read_cluster
from planner.plan.collective import collective
from planner.specs.collective import CollectiveAnswer
from planner.specs.gpu import MAX_GPUS
from planner.specs.validation import build
from planner.units import EXAMPLES, PETA, parse_quantity


def _size(value: object) -> float:
    remedy = f"use for example {EXAMPLES['bytes']}"
    try:
        number = parse_quantity(value, "bytes")
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if not 0 < number <= PETA:
        raise ValueError(f"must be more than 0 and at most 1 PB; {remedy}")
    return number


Count = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]


class CollectiveRequest(BaseModel):
    """Body of POST /collective.

    size: the whole buffer (all-to-all: what one rank sends), in bytes or as text with a unit.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"example": {"op": "all-reduce", "size": "1 GiB", "cluster": "h100-64"}},
    )

    op: str = Field(
        description="all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all or p2p."
    )
    size: Annotated[float, BeforeValidator(_size, json_schema_input_type=float | str)]
    cluster: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = Field(
        description="Catalogue name, or gpu, num_gpus, fabric, ..."
    )
    algorithm: str | None = Field(
        None, description="Its closed form; without, the library's own choice with measured curves."
    )
    num_ranks: Count | None = Field(
        None, description="Ranks of the group; all GPUs unless given, two for p2p."
    )
    stride: Count = Field(1, description="Distance of neighbours in the group, in ranks.")


def ask_collective(values: object, *, allow_files: bool) -> CollectiveAnswer:
    """Seconds, steps and bytes of one operation. Raises SpecError with every fault."""
    if not isinstance(values, Mapping):
        remedy = f"known keys: {', '.join(CollectiveRequest.model_fields)}"
        raise fault("request", values, "must be a mapping of keys to values", remedy)
    faults: list[Fault] = []
    cluster = None
    try:
        asked = build(CollectiveRequest, values, "")
    except SpecError as error:
        faults.extend(error.faults)
    if "cluster" in values:
        try:
            cluster = read_cluster(values["cluster"], allow_files=allow_files)
        except SpecError as error:
            faults.extend(error.faults)
    if faults or cluster is None:
        raise SpecError(faults)
    how = asked.model_dump(include={"num_ranks", "stride", "algorithm"})
    return collective(asked.op, asked.size, cluster, **how)
