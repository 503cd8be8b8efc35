"""`planner-cli plans` and `planner-cli show`: what was answered before."""

from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.given import PlanId
from api.cli.plotting import PlotOrText

if TYPE_CHECKING:
    from api.wiring import Wiring


def list_plans(
    limit: Annotated[int, typer.Option(help="At most so many, newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """List stored plans, and those that probes are still spent on, newest first."""
    import json as encoder

    from api.cli.output import make_console, note, say, show
    from api.jobs.plans import page_of_plans
    from api.wiring import wire

    page = page_of_plans(wire(), cursor, limit)
    if json:
        say(encoder.dumps(page.model_dump(), indent=2, default=str))
        return
    if not page.items:
        say("no plan is stored yet; `planner-cli recommend` makes one")
        return
    from api.render.plans import plans_table

    console = make_console()
    show(plans_table(page.items, console.width), console)
    if page.next_cursor is not None:
        note(f"more: --cursor {page.next_cursor}")


def show_plan(
    plan_id: PlanId,
    plot: PlotOrText = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Print a stored plan again, as `recommend` printed it."""
    from api.cli.plotting import check_plot, plot_plan
    from api.cli.recommend import print_plan
    from api.input.names import plan_id_of
    from api.wiring import wire
    from planner.errors import NotFoundError

    check_plot(plot, text=not json)
    wiring = wire()
    name = plan_id_of(wiring, plan_id)
    try:
        plan = wiring.store.get_plan(name)
    except NotFoundError:
        if _say_study(wiring, name, as_json=json):
            return
        raise
    if json:
        typer.echo(plan.model_dump_json(indent=2))
    else:
        print_plan(plan)
    plot_plan(plot, plan)


def _say_study(wiring: "Wiring", name: str, *, as_json: bool) -> bool:
    """Says how a plan stands that is not made yet; False where no study makes it."""
    import json as encoder

    from api.cli.output import say
    from api.jobs.plans import state_of, study_of

    study = study_of(wiring, name)
    if study is None:
        return False
    state = state_of(study)
    words = ", ".join(str(part) for part in (study.state, study.progress, study.message) if part)
    say(encoder.dumps(state) if as_json else f"{study.id} is {words}")
    return True
