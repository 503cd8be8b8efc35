"""`planner-cli db`: the database."""

from typing import Annotated

import typer

app = typer.Typer(
    help="The database: bring it to the revision that this version needs.", rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """The database: bring it to the revision that this version needs."""


@app.command("upgrade")
def upgrade(
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Create the database or migrate it. Safe to run at any time, by several at once."""
    import json as encoder

    from api.cli.output import say
    from api.storage.engine import shown
    from api.storage.migrate import current_revision
    from api.storage.migrate import upgrade as migrate
    from api.wiring import wire

    engine = wire().engine
    before = current_revision(engine)
    after = migrate(engine)
    if json:
        say(encoder.dumps({"database": shown(engine), "before": before, "after": after}))
        return
    say(
        f"{shown(engine)}: revision {after}"
        + (" already" if before == after else f", was {before or 'empty'}")
    )
