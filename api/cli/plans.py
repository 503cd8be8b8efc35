"""`planner-cli plans` and `planner-cli show`: earlier answers."""

import typer

from planner.api.cli.files import PlotOrText, check_plot, plot_plan
from planner.api.cli.flags import PlanId
from planner.api.cli.output import make_console, note_more, say, show, show_json, tell
from planner.api.cli.recommend import print_plan
from planner.api.cli.typed import Cursor, Json, Limit
from planner.api.input.names import plan_id_of
from planner.api.jobs.plans import page_of_plans, state_of, study_of
from planner.api.render.lists import plans_table
from planner.api.wiring import Wiring, wire
from planner.errors import NotFoundError


def list_plans(limit: Limit = 20, cursor: Cursor = None, json: Json = False) -> None:
    page = page_of_plans(wire(), cursor, limit)
    if json:
        show_json(page.model_dump())
        return
    if not page.items:
        say("no plan is stored yet; `planner-cli recommend` makes one")
        return
    console = make_console()
    show(plans_table(page.items, console.width), console)
    note_more(page)


def show_plan(plan_id: PlanId, plot: PlotOrText = None, json: Json = False) -> None:
    check_plot(plot, text=not json)
    wiring = wire()
    name = plan_id_of(wiring, plan_id)
    try:
        plan = wiring.store.get_plan(name)
    except NotFoundError:
        if _show_study(wiring, name, as_json=json):
            return
        raise
    if json:
        typer.echo(plan.model_dump_json(indent=2))
    else:
        print_plan(plan)
    plot_plan(plot, plan)


def _show_study(wiring: Wiring, name: str, *, as_json: bool) -> bool:
    """Says how a plan stands that is not made yet; False where no study makes it."""
    study = study_of(wiring, name)
    if study is None:
        return False
    words = ", ".join(str(part) for part in (study.state, study.progress, study.message) if part)
    tell(state_of(study), [f"{study.id} is {words}"], json=as_json, indent=None)
    return True
