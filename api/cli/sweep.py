"""`planner-cli sweep`: known jobs measured again and again, now or every night."""

from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.files import Plot, check_plot, write_plot
from planner.api.cli.output import error_line, note, say, show_json, tell
from planner.api.cli.studying import bar, gentle_interrupt, sweep_stand
from planner.api.cli.typed import Json, complete_sweep
from planner.api.errors import codes_of
from planner.api.identity import asker
from planner.api.input.names import sweep_id_of
from planner.api.input.text import read_mapping_file
from planner.api.jobs.leases import Observer
from planner.api.jobs.schedule import in_zone
from planner.api.jobs.sweep_report import failure_in
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import PREFIX, add_sweep, change_sweep, run_now, sweep_detail
from planner.api.jobs.webhooks import deliver_due
from planner.api.render.charts import sweep_chart
from planner.api.render.sweep import report_lines
from planner.api.storage.common import told
from planner.api.storage.records import SweepState
from planner.api.storage.tables import SweepRecord
from planner.api.wiring import wire
from planner.errors import fault
from planner.units import counted

app = typer.Typer(rich_markup_mode=None)
Id = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP_ID", autocompletion=complete_sweep, help="Its id, or the beginning of it."
    ),
]


@app.command()
def run(
    file: Annotated[str, typer.Argument(metavar="FILE|SWEEP_ID", autocompletion=complete_sweep)],
    json: Json = False,
) -> None:
    """Measure now and print the report; an interrupted run goes on where it stopped.

    file: A sweep's file, or the id of a stored one.
    """
    wiring = wire()
    stored = file.startswith(f"{PREFIX}-") and not Path(file).exists()
    if stored:
        sweep = wiring.sweeps.get(sweep_id_of(wiring, file))
    else:
        values = {**read_mapping_file(file, "FILE", "sweep."), "schedule": None}
        sweep = add_sweep(wiring, values, allow_files=True, ours=True)
        again = f"`planner-cli sweep run {sweep.id}` runs it again"
        note(f"stored as {sweep.id}; {again}, or goes on after an interruption")
    observer = Observer()
    with gentle_interrupt(observer) as interrupted, bar(observer, "layouts", sweep_stand):
        ended = run_sweep(wiring, run_now(wiring, sweep, ours=True), observer)
    assert ended.result is not None, "a run that nothing kept from measuring has a report"
    deliver_due(wiring)
    body = {"id": ended.id, "sweep": sweep.id, "state": ended.state, **ended.result}
    tell(body, report_lines(ended.result), json=json)
    if interrupted:
        raise typer.Exit(130)
    failure = failure_in(ended.result)
    if failure is not None:
        error_line(str(failure))
        raise typer.Exit(codes_of(failure).exit_code)


@app.command()
def schedule(file: Annotated[str, typer.Argument(metavar="FILE")], json: Json = False) -> None:
    """Store a sweep with a `schedule`; `planner-cli worker` and the service run it from then on.

    file: YAML or JSON of the sweep, - for stdin.
    """
    values = read_mapping_file(file, "FILE", "sweep.")
    if values.get("schedule") is None:
        remedy = 'add schedule: "0 2 * * *", or use `sweep run`'
        raise fault("sweep.schedule", None, "is required to schedule a sweep", remedy)
    wiring = wire()
    sweep = add_sweep(wiring, values, allow_files=True)
    tell(sweep_detail(wiring, sweep), [f"{sweep.id}: {sweep.name}{_next(sweep)}"], json=json)


@app.command("list")
def list_(json: Json = False) -> None:
    """All sweeps, newest first."""
    sweeps = list(wire().sweeps.all())
    rows = [told(one, "id", "name", "state", "next_due_at") for one in sweeps]
    lines = (f"{one.id}  {one.state:9}  {one.name}{_next(one)}" for one in sweeps)
    tell(rows, lines, json=json)


@app.command()
def show(sweep_id: Id, plot: Plot = None, json: Json = False) -> None:
    """A sweep with its newest runs and their reports."""
    check_plot(plot)
    wiring = wire()
    sweep = wiring.sweeps.get(sweep_id_of(wiring, sweep_id))
    detail = sweep_detail(wiring, sweep)
    if plot is not None:
        write_plot(plot, sweep_chart(detail))
    if json:
        show_json(detail)
        return
    say(f"{sweep.id}: {sweep.name}, {sweep.state}{_next(sweep)}")
    for run_ in detail["runs"]:
        progress = f", {run_['progress']}" if run_["progress"] else ""
        say(f"{run_['id']} for {run_['due_at']}: {run_['state']}{progress}")
        if run_["report"]:
            for line in report_lines(run_["report"]):
                say(f"  {line}")
        elif run_["message"]:
            say(f"  {run_['message']}")


@app.command()
def pause(sweep_id: Id, json: Json = False) -> None:
    """No more runs until it is resumed: queued ones are cancelled, a running one goes on."""
    _change(sweep_id, "paused", as_json=json)


@app.command()
def resume(sweep_id: Id, json: Json = False) -> None:
    """Runs again from the next moment of its schedule on."""
    _change(sweep_id, "active", as_json=json)


@app.command()
def cancel(sweep_id: Id, json: Json = False) -> None:
    """Never again: queued runs are cancelled, a running one is asked to stop."""
    _change(sweep_id, "cancelled", as_json=json)


@app.command()
def hosts(
    release: Annotated[str | None, typer.Option(metavar="HOST")] = None, json: Json = False
) -> None:
    """Quarantined hosts: found bad by a run, unused for a day, with the evidence.

    release: Let this host in again first.
    """
    wiring = wire()
    if release is not None:
        pools = wiring.quarantine.release(release, asker().name)
        note(f"{release} is let in again in {counted(pools, 'pool')}")
    out = wiring.quarantine.active()
    lines = []
    for one in out:
        until = f"{one.until:%Y-%m-%d %H:%M} UTC by {one.found_by}"
        lines.append(f"{one.host} of {one.pool}, until {until}")
        lines += [f"  {sentence}" for sentence in one.evidence]
    tell([told(one) for one in out], lines, json=json)


def _change(sweep_id: str, state: SweepState, *, as_json: bool) -> None:
    wiring = wire()
    sweep = change_sweep(wiring, sweep_id_of(wiring, sweep_id), state)
    line = f"{sweep.id} is {sweep.state}{_next(sweep)}"
    tell(sweep_detail(wiring, sweep), [line], json=as_json)


def _next(sweep: SweepRecord) -> str:
    """When it runs next, in its own time zone."""
    if sweep.next_due_at is None:
        return ""
    return f", next at {in_zone(sweep.next_due_at, sweep.spec.get('time_zone', 'UTC'))}"
