"""`planner-cli doctor`: what is installed, the state of the database, what a probe would find."""

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

NAME = "doctor"
PACKAGES = (
    "planner",
    "numpy",
    "pydantic",
    "optuna",
    "sqlalchemy",
    "alembic",
    "fastapi",
    "uvicorn",
    "typer",
    "rich",
    "psycopg",
)
PROBE_PACKAGES = ("torch", "torchtitan")


def command(
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Check this installation."""
    import json as encoder
    import platform

    from api.cli.output import say
    from planner.errors import PlannerError

    try:
        database = _database()
    except PlannerError as error:
        database = {"state": "unreachable", "detail": " ".join(str(error).split())}
    report = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "probe_packages": {name: _version(name) for name in PROBE_PACKAGES},
        "database": database,
    }
    if json:
        say(encoder.dumps(report, indent=2))
    else:
        _say_report(report)
    if database["state"] == "unreachable":
        raise typer.Exit(4)


def _version(name: str) -> str | None:
    """Installed version, without importing the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _database() -> dict[str, str | None]:
    from pathlib import Path

    from api.storage.engine import is_memory, normalise_url, shown
    from api.storage.migrate import HEAD, current_revision
    from api.wiring import wire

    wiring = wire()
    url = normalise_url(wiring.settings.database_url)
    if (
        url.get_backend_name() == "sqlite"
        and not is_memory(url)
        and not Path(str(url.database)).exists()
    ):
        return {
            "url": url.render_as_string(),
            "state": "not created yet; the first plan creates it",
            "revision": None,
        }
    revision = current_revision(wiring.engine)
    state = "ready" if revision == HEAD else f"needs revision {HEAD}: run `planner-cli db upgrade`"
    return {"url": shown(wiring.engine), "state": state, "revision": revision}


def _say_report(report: Mapping[str, object]) -> None:
    from api.cli.output import say

    for heading, value in report.items():
        if isinstance(value, dict):
            say(f"{heading.replace('_', ' ')}")
            absent = "not installed" if "packages" in heading else "-"
            for name, item in value.items():
                say(f"  {name:<12} {item if item is not None else absent}")
        else:
            say(f"{heading:<14} {value}")
