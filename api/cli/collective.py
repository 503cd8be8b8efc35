"""`planner-cli collective`: the time of one operation on a cluster, its algorithm, and why."""

from typing import Annotated

import typer

from planner.api.cli.output import make_console, show
from planner.api.cli.typed import Json, complete_cluster
from planner.api.collectives import ask_collective
from planner.api.own_entries import with_own
from planner.api.render.simulations import collective_view
from planner.api.wiring import wire


def command(
    op: Annotated[str, typer.Option()],
    size: Annotated[str, typer.Option()],
    cluster: Annotated[str, typer.Option(autocompletion=complete_cluster)],
    algorithm: str | None = None,
    num_ranks: int | None = None,
    stride: int = 1,
    json: Json = False,
) -> None:
    """Price one collective: seconds, steps, bytes on the wire, the algorithm and why.

    op: all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all or p2p.
    size: The whole buffer, for example "1 GiB"; all-to-all: what one rank sends.
    cluster: Name of a cluster, as in `catalog clusters`, or a YAML file.
    algorithm: ring, tree, hierarchical, switch, ...: its closed form.
    num_ranks: Ranks of the group; all GPUs unless given.
    stride: Distance of neighbours in the group, in ranks.
    """
    how = {"algorithm": algorithm, "num_ranks": num_ranks, "stride": stride}
    asked = {"op": op, "size": size, "cluster": cluster, **how}
    answer = ask_collective(with_own(wire(), asked), allow_files=True)
    if json:
        typer.echo(answer.model_dump_json(indent=2))
        return
    console = make_console()
    show(collective_view(answer, console.width), console)
