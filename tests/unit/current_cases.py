"""Real-looking files of users, and helpers that the intake tests share."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_cases import layout, layouts, model, training
from hypothesis import assume
from hypothesis import strategies as st

from planner.export import export
from planner.export.base import Export
from planner.intake.current import complete
from planner.intake.jobs import read_job
from planner.intake.machines import read_cluster
from planner.intake.trainer_files.canonical import canonical
from planner.intake.trainer_files.files import gather
from planner.specs.job import Job
from planner.specs.layout import Layout

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
FOLDER = Path(__file__).parents[1] / "fixtures" / "current"
EXAMPLES = Path(__file__).parents[2] / "examples"


def job_of_text(
    name: str, text: str, files: Mapping[str, str] | None = None, **given: object
) -> Job:
    """The job of a text, on H100s unless it says so."""
    current = gather(name, text, dict(files or {}).get)
    assert current is not None, f"{name} was not taken for a trainer's file"
    given.setdefault("cluster", {"gpu": "h100-sxm-80gb"})
    return read_job(complete({"current": current, **given}))


def fixture_job(name: str, **given: object) -> Job:
    return job_of_text(name, (FOLDER / name).read_text(encoding="utf-8"), **given)


def machine(num_gpus: int) -> dict[str, object]:
    """A cluster of any size: whole nodes of at most 8."""
    return {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus, "gpus_per_node": math.gcd(8, num_gpus)}


@st.composite
def runnable(draw: Any, name: str, to: str, version: str) -> Layout:
    """Any layout that the export of this trainer can run, however odd."""
    chosen = draw(layouts(model(name).num_hidden_layers))
    for _ in range(4):  # a value that is refused gives way to the plainest one
        made = exported(chosen, name, to, version, 4 * chosen.micro_batch_size * chosen.dp_degree)
        refused = {fault.field for fault in made.blockers} & set(Layout.model_fields)
        if not refused:
            break
        refused |= {"ep", "etp"} if refused & {"ep", "etp"} else set()  # faults name one of them
        axes = {name: 1 if name in refused else getattr(chosen, name) for name in AXES}
        plainest = layout(math.prod(axes.values()), to, **axes)
        chosen = chosen.model_copy(update={field: getattr(plainest, field) for field in refused})
    assume(not made.blockers)
    return chosen


def exported(
    chosen: Layout, name: str, to: str, version: str | None = None, batch: int = 512, **more: object
) -> Export:
    given = {"global_batch_size": batch, **({"trainer": to} if to != "torchtitan" else {}), **more}
    machines = read_cluster(machine(chosen.num_gpus))
    return export(chosen, model(name), machines, training(**given), to=to, version=version)


def unsaid(made: Export) -> dict[str, object]:
    """Fields of a layout that the trainer's words cannot say."""
    faults = (gap.fault for gap in made.gaps)
    return {one.field: one.value for one in faults if one.field in Layout.model_fields}


def same_run(first: Layout, second: Layout, num_layers: int, trainer: str) -> bool:
    return canonical(first, num_layers, trainer) == canonical(second, num_layers, trainer)
