"""`planner-cli queue`: jobs that wait, run or have failed; another try, an end."""

from dataclasses import asdict
from typing import Annotated

import typer

from planner.api.cli.output import tell
from planner.api.cli.typed import Json, Limit
from planner.api.jobs import queues
from planner.api.render.lists import job_line
from planner.api.storage.job_records import QueuedJob
from planner.api.wiring import wire

app = typer.Typer(rich_markup_mode=None)
JobId = Annotated[str, typer.Argument(metavar="ID", help="As `queue list` shows it.")]


@app.command("list")
def list_jobs(failed: bool = False, limit: Limit = 50, json: Json = False) -> None:
    """List what waits or runs, newest first.

    failed: What has failed, not what is open.
    """
    jobs = queues.jobs_in(wire(), failed=failed)[:limit]
    nothing = "nothing has failed" if failed else "nothing waits or runs"
    tell([asdict(job) for job in jobs], [*map(job_line, jobs)] or [nothing], json=json)


@app.command("retry")
def retry(job_id: JobId, json: Json = False) -> None:
    """Queue a failed job again, with new attempts."""
    _say(queues.retry(wire(), job_id), json=json)


@app.command("cancel")
def cancel(job_id: JobId, json: Json = False) -> None:
    """Cancel a job that waits; one that runs is asked to end."""
    _say(queues.cancel(wire(), job_id), json=json)


def _say(job: QueuedJob, *, json: bool) -> None:
    tell(asdict(job), [job_line(job)], json=json, indent=None)
