"""`planner-cli explain`: why this layout, why not that one."""

from typing import Annotated

import typer

from api.cli.given import PlanId


def command(
    plan_id: PlanId,
    rank: Annotated[int, typer.Option(help="Which of its layouts.")] = 1,
    versus: Annotated[
        int | None, typer.Option(help="Compare with the layout of this rank.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Why this layout of a stored plan, and why not another."""
    import json as encoder

    from api.cli.output import say
    from api.input.names import plan_id_of
    from api.wiring import wire
    from planner.plan.explain import explain

    wiring = wire()
    plan = wiring.store.get_plan(plan_id_of(wiring, plan_id))
    lines = explain(plan, rank, versus)
    if json:
        typer.echo(encoder.dumps({"id": plan.id, "rank": rank, "versus": versus, "lines": lines}))
        return
    for line in lines:
        say(line)
