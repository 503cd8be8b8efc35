"""`planner-cli explain`: why this layout, why not that one."""

from typing import Annotated

import typer

from planner.api.cli.flags import PlanId
from planner.api.cli.output import make_console, show, tell
from planner.api.cli.typed import Json
from planner.api.input.names import plan_id_of
from planner.api.render.simulations import communication_section
from planner.api.wiring import wire
from planner.plan.explain import explain, ranked_as


def command(
    plan_id: PlanId,
    rank: Annotated[int, typer.Option(help="Which of its layouts.")] = 1,
    versus: Annotated[
        int | None, typer.Option(help="Compare with the layout of this rank.")
    ] = None,
    json: Json = False,
) -> None:
    wiring = wire()
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    lines = explain(plan, rank, versus)
    rows = ranked_as(plan, rank).estimate.communication
    answer = {"id": plan.id, "rank": rank, "versus": versus, "lines": lines}
    answer |= {"communication": [one.model_dump() for one in rows]}
    tell(answer, lines, json=json, indent=None)
    console = make_console()
    for part in communication_section(rows, console.width) if not json else ():
        show(part, console)
