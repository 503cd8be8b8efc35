"""`planner-cli doctor`: the packages here, the database, and the means of a probe."""

import platform
import sys
from dataclasses import asdict

import typer

from planner.api.checkup import NEEDED, SERVICE, TRAINERS, all_checks, database_report, version_of
from planner.api.cli.output import say, show_json
from planner.api.cli.typed import Json
from planner.api.wiring import wire


def command(torch: bool = False, json: Json = False) -> None:
    """Check this installation part by part: ok, warn or fail, and what to do. Ends with 4 where a
    part fails.

    torch: Also import torch, as a probe would; takes longer.
    """
    wiring = wire()
    checks = all_checks(wiring, torch=torch)
    failed = any(check.state == "fail" for check in checks)
    if json:
        report = {
            "python": f"{platform.python_version()} at {sys.executable}",
            "platform": platform.platform(),
            "packages": {name: version_of(name) for name in (*NEEDED, *SERVICE, "psycopg")},
            "probe_packages": {name: version_of(name) for name in ("torch", *TRAINERS)},
            "database": database_report(wiring),
            "ok": not failed,
            "checks": [asdict(check) for check in checks],
        }
        show_json(report)
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            say(f"{check.state:<4}  {check.name:<{width}}  {check.detail}")
            if check.remedy is not None:
                say(f"{'':<4}  {'':<{width}}  -> {check.remedy}")
    if failed:
        raise typer.Exit(4)
