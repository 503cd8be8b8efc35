"""`planner-cli explain`: why this layout, why not that one."""

from planner.api.cli.flags import PlanId
from planner.api.cli.output import make_console, show, tell
from planner.api.cli.typed import Json
from planner.api.input.names import plan_id_of
from planner.api.render.simulations import communication_section
from planner.api.wiring import wire
from planner.plan.explain import explain, ranked_as


def command(plan_id: PlanId, rank: int = 1, versus: int | None = None, json: Json = False) -> None:
    """Why this layout of a stored plan, and why not another.

    rank: Which of its layouts.
    versus: Compare with the layout of this rank.
    """
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
