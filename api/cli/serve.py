"""`planner-cli serve`: the REST service."""

import socket
from typing import Annotated

import typer

from planner.api.errors import need
from planner.api.logs import set_up
from planner.api.settings import load_settings
from planner.errors import fault


def command(
    host: str | None = None, port: Annotated[int | None, typer.Option(min=0, max=65535)] = None
) -> None:
    """Serve POST /plan and the rest; OpenAPI at /docs.

    host: Address to bind; default PLANNER_HOST or 127.0.0.1.
    port: Port; default PLANNER_PORT or 8000.
    """
    need("fastapi", "uvicorn", "prometheus_client", "limits", extra="server")
    from planner.api.http.app import create_app
    from planner.api.http.security import refuse_open_door
    from planner.api.http.server import serve

    settings = load_settings()
    chosen = settings.model_copy(
        update={"host": host or settings.host, "port": settings.port if port is None else port}
    )
    refuse_open_door(chosen)
    check_address(chosen.host, chosen.port)
    set_up(chosen.log_format, chosen.log_level)
    code = serve(create_app(chosen), chosen)
    if code:
        raise typer.Exit(code)


def check_address(host: str, port: int) -> None:
    """Raises SpecError when nothing can listen there, with the system's own words."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except OSError as error:
        remedy = "choose another with --port and --host, or stop what listens there"
        raise fault(
            "port", port, f"cannot be bound on {host} ({error.strerror or error})", remedy
        ) from None
