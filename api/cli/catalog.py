"""`planner-cli catalog`: the models, GPUs, clusters, schedules and defaults known by name."""

from typing import Annotated

import typer

NAME = "catalog"


def command(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="models|gpus|clusters|schedules|defaults", help="Part of the catalogue."
        ),
    ],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One entry in full.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """List what is known by name, or show one entry with its sources."""
    import json as encoder

    from api.catalog import catalog_entry, catalog_list
    from api.cli.output import make_console, say, show

    if name is not None:
        entry = catalog_entry(kind, name)
        if json:
            typer.echo(encoder.dumps(entry, indent=2, default=str))
            return
        import yaml

        say(
            yaml.safe_dump(
                encoder.loads(encoder.dumps(entry, default=str)),
                sort_keys=False,
                allow_unicode=True,
                width=110,
            ).rstrip()
        )
        return
    lines = catalog_list(kind)
    if json:
        typer.echo(encoder.dumps({"items": lines}, indent=2, default=str))
        return
    from api.render.catalog import catalog_table

    console = make_console()
    show(catalog_table(kind, lines, console.width), console)
