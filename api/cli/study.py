"""`planner-cli study`: the Optuna study of a stored plan, for Optuna's own tools."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.flags import PlanId
from planner.api.cli.output import note, tell
from planner.api.cli.typed import Json
from planner.api.input.names import plan_id_of
from planner.api.optuna_storage import counts_of, open_storage, without_password, write_study
from planner.api.wiring import wire
from planner.errors import SpecError
from planner.library import study_of
from planner.units import counted


def command(
    plan_id: PlanId,
    storage: Annotated[str | None, typer.Option(metavar="URL")] = None,
    journal: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    values: str | None = None,
    overwrite: bool = False,
    json: Json = False,
) -> None:
    """Write the study of a plan for optuna-dashboard and Optuna's plots.

    storage: Database to write it to: sqlite:///study.db, ...
    journal: Journal file of Optuna to write it to, instead.
    values: What its trials minimise: measured, predicted, time-memory or time-cost; unless given,
        measured where the plan spent probes, else predicted.
    overwrite: Replace a study of that name.
    """
    wiring = wire()
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    try:
        study = study_of(plan, values)
    except SpecError as error:
        raise error.renamed(lambda name: f"--{name}") from None
    write_study(study, open_storage(storage, journal), overwrite=overwrite)
    counts, place = counts_of(study), str(journal) if storage is None else without_password(storage)
    if not plan.considered:
        note(
            f"{plan.id} was stored before plans kept what their search considered: the study has "
            "its ranked layouts, its front and the counts of the others"
        )
    body = {"study": study.study_name, "storage": place, "trials": counts}
    ended = (f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    trials = f"{counted(sum(counts.values()), 'trial')} ({', '.join(ended)})"
    lines = (f"{study.study_name}: {trials}", f"optuna-dashboard {shlex.quote(place)}")
    tell(body, lines, json=json, indent=None)
