"""`planner-cli calibrations`: lists, shows and reverts the calibrations learned here."""

from typing import Annotated, Any

import typer

from planner.api.calibration.update import line_about, revert
from planner.api.cli.output import note, show_page, tell, working
from planner.api.cli.typed import Cursor, Json, Limit
from planner.api.identity import local_user
from planner.api.storage.tables import CalibrationRecord
from planner.api.wiring import wire
from planner.units import counted

app = typer.Typer(rich_markup_mode=None)
CalibrationId = Annotated[str, typer.Argument(metavar="ID", help="As `calibrations list` shows.")]


@app.command("list")
def list_(limit: Limit = 50, cursor: Cursor = None, json: Json = False) -> None:
    """List calibrations, newest first; a plan names the one that it rests on."""
    page = wire().calibrations.list(cursor, limit)
    nothing = "nothing was learned here: plans rest on the calibration that ships"
    show_page(page, _line, _sentence, nothing, json=json)


@app.command("show")
def show_(calibration_id: CalibrationId, json: Json = False) -> None:
    """Show the runs that a calibration rests on, and the stored plans that rest on it."""
    store = wire().calibrations
    record = store.get(calibration_id)
    runs, plans = record.document.get("runs"), store.plans_on(calibration_id)
    origin = ", ".join(runs) if runs else "timed kernels" if runs == [] else "unknown"
    lines = (_sentence(record), f"made from: {origin}", f"plans: {', '.join(plans) or 'none'}")
    tell({**_line(record), "rests_on": runs, "plans": plans}, lines, json=json)


@app.command("revert")
def revert_(calibration_id: CalibrationId, json: Json = False) -> None:
    """Undo a calibration and those after it: the runs that they added are left out."""
    wiring = wire()
    with working("learning again", quiet=json):
        left, made = revert(wiring, calibration_id, local_user())
    for one in made if not json else ():
        note(line_about(one))
    line = f"{counted(len(left), 'run')} left out; `planner-cli measurements list` says which"
    tell({"left_out": left, "calibrations": [one.id for one in made]}, [line], json=json)


def _line(record: CalibrationRecord) -> dict[str, Any]:
    made = record.created_at.isoformat(timespec="seconds")
    used = {"runs": record.num_runs, "in_use": record.superseded_at is None}
    subject = {"trainer": record.trainer, "gpu": record.gpu, "owner": record.owner or None}
    return {"id": record.id, "created_at": made, **subject, **used}


def _sentence(record: CalibrationRecord) -> str:
    whose = f", for {record.owner}" if record.owner else ""
    used = "in use" if record.superseded_at is None else "not in use"
    return (
        f"{record.id}  {record.trainer} on {record.gpu} from {counted(record.num_runs, 'run')}"
        f"{whose}, {used}, {record.created_at:%Y-%m-%d %H:%M} UTC"
    )
