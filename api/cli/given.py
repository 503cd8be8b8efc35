"""The layout that a command is about: of a job's file, or of a stored plan by its rank."""

from typing import Annotated, Any

import typer

from planner.api.cli.flags import parse_count, read_cluster, spelled_out
from planner.api.cli.typed import complete_plan
from planner.api.input.current import read_job_file
from planner.api.input.names import plan_id_of
from planner.api.jobs.plans import entry_of, job_of
from planner.api.wiring import Wiring
from planner.errors import fault

PlanId = Annotated[
    str,
    typer.Argument(
        metavar="PLAN_ID",
        autocompletion=complete_plan,
        help="Id that `recommend` printed, or its beginning.",
    ),
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN_ID",
        autocompletion=complete_plan,
        help="A stored plan, by its id or the beginning of it.",
    ),
]
ModelOption = Annotated[str | None, typer.Option(help="Completes or overrides the file's model.")]
GpuOption = Annotated[str | None, typer.Option(help="Completes or overrides the file's GPU.")]
NumGpusOption = Annotated[
    str | None, typer.Option(help="Completes or overrides the file's number of GPUs.")
]
RankOption = Annotated[int | None, typer.Option(help="Which layout of the plan; 1 unless given.")]


def check_one(job: str | None, plan: str | None, which: str) -> None:
    """Raises SpecError unless exactly one of file and plan is given. which: of its layouts."""
    if (job is None) == (plan is None):
        rule = "exactly one of --job and --plan is needed"
        raise fault("--job", job, rule, f"give --job FILE, or --plan PLAN_ID {which}")


def layout_given(
    wiring: Wiring, job: str | None, plan: str | None, rank: int | None
) -> dict[str, Any]:
    """The job with its layout, as a mapping.

    Raises SpecError unless exactly one of file and plan is given.
    """
    check_one(job, plan, "--rank N")
    if job is not None:
        if rank is not None:
            remedy = "add --plan PLAN_ID, or leave --rank out"
            raise fault("--rank", rank, "is of a plan's layouts", remedy)
        return read_job_file(job, "--job")
    stored = wiring.store.get_plan(plan_id_of(wiring, str(plan), "--plan"))
    return job_of(stored, entry_of(stored, 1 if rank is None else rank, "--rank"))


def completed_by(
    values: dict[str, Any], *, model: str | None, gpu: str | None, num_gpus: str | None
) -> dict[str, Any]:
    """The job of a file with the flags given beside it. Raises SpecError.

    A trainer's file often names no GPU.
    """
    found = values if model is None else {**values, "model": model}
    given = {"gpu": gpu, "num_gpus": None if num_gpus is None else parse_count(num_gpus)}
    more = {key: value for key, value in given.items() if value is not None}
    if not more:
        return found
    return {**found, "cluster": {**spelled_out(read_cluster(values.get("cluster"))), **more}}
