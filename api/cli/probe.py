"""`planner-cli probe`: layouts run for a few steps, measured beside predicted."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.api.calibration.update import line_about, update_from_probes
from planner.api.cli.flags import check_one
from planner.api.cli.output import error_line, make_console, note, progress, show, show_json
from planner.api.cli.typed import Json, complete_plan, complete_pool
from planner.api.errors import codes_of, lines_of
from planner.api.input.text import read_mapping_file
from planner.api.jobs.probe_recovery import recover
from planner.api.jobs.probes import (
    OOM,
    RequestedProbe,
    check_ready,
    enqueue,
    options_of,
    probe_of_job,
    probes_of_plan,
    run_all,
)
from planner.api.own_entries import with_own
from planner.api.render.probe import Probed, probes_view
from planner.api.storage.job_records import ProbeRecord
from planner.api.wiring import Wiring, wire
from planner.errors import InfeasibleError, PlannerError, ProbeError
from planner.estimates import estimate_job
from planner.probes.launch import Watch
from planner.probes.pools import listed, pool_forms
from planner.units import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
PoolName = Annotated[
    str | None,
    typer.Option(autocompletion=complete_pool, help=f"{listed(pool_forms())}; local unless given."),
]


def command(
    job: str | None = None,
    plan: Annotated[str | None, typer.Option(autocompletion=complete_plan)] = None,
    top_k: int = 1,
    pool: PoolName = None,
    trainer: str | None = None,
    emulate: bool = False,
    steps: int | None = None,
    warmup: int = 3,
    time_limit: float = 600.0,
    breakdown: bool = False,
    json: Json = False,
) -> None:
    """Run layouts for a few steps and record time, memory and what went wrong.

    job: YAML or JSON file of a job with a layout, - for stdin.
    plan: Stored plan, whose best layouts are measured, by its id or its beginning.
    top_k: How many of the plan's layouts.
    trainer: reference (default: ours, torch alone) or torchtitan.
    emulate: One process stands for a rank; communication comes from the model.
    steps: Timed steps; 10 unless given.
    warmup: Steps before them.
    time_limit: Seconds that one run may take, start included.
    breakdown: Seconds by kernel, from torch's profiler.
    """
    given = {"pool": pool, "trainer": trainer, "steps": steps}  # else the job's own `probe` says it
    options = {
        "emulate": emulate,
        "warmup_steps": warmup,
        "time_limit_seconds": time_limit,
        "breakdown": breakdown,
        **{name: value for name, value in given.items() if value is not None},
    }
    wiring = wire()
    asked = _asked(wiring, job, plan, top_k, options)
    check_ready(wiring, asked)
    recover(wiring)
    records = enqueue(wiring, asked, max_attempts=1, ours=True)
    with _watched(records) as watches:
        ended = run_all(wiring, records, watches)
    for learnt in update_from_probes(wiring, ended):
        note(line_about(learnt))
    _tell(wiring, asked, ended, as_json=json)


def _asked(
    wiring: Wiring, job: str | None, plan: str | None, top_k: int, options: Mapping[str, Any]
) -> list[RequestedProbe]:
    check_one(job, plan, "--top-k N")
    if plan is not None:
        return probes_of_plan(wiring, plan, top_k, options)
    values = with_own(wiring, read_mapping_file(str(job), "--job"))
    return probe_of_job({**options_of(values), **options, "job": values}, allow_files=True)


@contextmanager
def _watched(records: Sequence[ProbeRecord]) -> Iterator[dict[str, Watch]]:
    """A line of progress a probe on stderr, where a person watches."""
    with progress(hidden=not sys.stderr.isatty()) as shown:
        watches = {}
        for record in records:
            line = shown.add_task(record.layout, total=None, words="starting")
            watches[record.id] = Watch(progress=partial(_show_words, shown, line))
        yield watches


def _show_words(shown: "Progress", line: "TaskID", words: str | None) -> None:
    shown.update(line, words=words or "starting")


def _tell(
    wiring: Wiring, asked: Sequence[RequestedProbe], ended: Sequence[ProbeRecord], *, as_json: bool
) -> None:
    """Prints the table or JSON, and exits: 4 where nothing was measured, 3 where nothing fitted."""
    probed = []
    for one, record in zip(asked, ended, strict=True):
        name = record.measurement_id
        found = None if name is None else wiring.measurements.get(name)
        probed.append(Probed(record=record, estimate=estimate_job(one.job), measurement=found))
    error = _error(probed)
    if as_json:
        body = {"probes": [one.as_dict() for one in probed]}
        show_json(body if error is None else {**body, "error": error.as_dict()})
    else:
        show(probes_view(probed, full=len(probed) == 1), make_console())
    measured = [one for one in ended if one.state == "done" and one.failure is None]
    for message in dict.fromkeys(one.message for one in measured if one.message):
        note(f"note: {message}")
    if error is not None:
        for line in lines_of(error):
            error_line(line)
        raise typer.Exit(codes_of(error).exit_code)


def _error(probed: Sequence[Probed]) -> PlannerError | None:
    """The error where no probe gave numbers: that none fits, or the first failure's own words."""
    records = [one.record for one in probed]
    if any(record.state == "done" and record.failure is None for record in records):
        return None
    if all(record.state == "done" and record.failure == OOM for record in records):
        why = f"{records[0].layout}: {records[0].message}"
        remedy = "shard more (dp_shard, tp), checkpoint more (ac: full), or make micro_batch_size "
        return InfeasibleError(why, field="layout", remedy=f"{remedy}smaller")
    failed = next(record for record in records if record.state != "done")
    message = f"{failed.failure or failed.state}: {failed.message or 'it never started'}"
    if len(records) > 1:
        none = f"none of {counted(len(records), 'probe')} measured anything"
        message = f"{none}; {failed.layout}: {message}"
    return ProbeError(message)
