"""`planner-cli serve`: the REST service."""

from typing import Annotated

import typer

NAME = "serve"


def command(
    host: Annotated[str | None, typer.Option(help="Address to bind; default PLANNER_HOST or 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; default PLANNER_PORT or 8000.")] = None,
) -> None:
    """Serve POST /plan and the rest; OpenAPI at /docs."""
    import uvicorn

    from api.app import create_app
    from api.security import refuse_open_door
    from api.settings import load_settings

    settings = load_settings()
    chosen = settings.model_copy(update={"host": host or settings.host, "port": settings.port if port is None else port})
    refuse_open_door(chosen)
    uvicorn.run(create_app(chosen), host=chosen.host, port=chosen.port, server_header=False)
