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
    op: Annotated[
        str,
        typer.Option(
            help="all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all or p2p."
        ),
    ],
    size: Annotated[
        str,
        typer.Option(
            help='The whole buffer, for example "1 GiB"; all-to-all: what one rank sends.'
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            autocompletion=complete_cluster,
            help="Name of a cluster, as in `catalog clusters`, or a YAML file.",
        ),
    ],
    algorithm: Annotated[
        str | None, typer.Option(help="ring, tree, hierarchical, switch, ...: its closed form.")
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option(help="Ranks of the group; all GPUs unless given.")
    ] = None,
    stride: Annotated[int, typer.Option(help="Distance of neighbours in the group, in ranks.")] = 1,
    json: Json = False,
) -> None:
    how = {"algorithm": algorithm, "num_ranks": num_ranks, "stride": stride}
    asked = {"op": op, "size": size, "cluster": cluster, **how}
    answer = ask_collective(with_own(wire(), asked), allow_files=True)
    if json:
        typer.echo(answer.model_dump_json(indent=2))
        return
    console = make_console()
    show(collective_view(answer, console.width), console)
