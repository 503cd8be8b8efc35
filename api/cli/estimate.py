"""`planner-cli estimate`: layouts priced, one in words or many as JSON lines."""

import gc
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import typer

from planner.api.calibration.read import Learned, among, learned, learned_by_gpu
from planner.api.cli.flags import PlanOption, completed_by, layout_given
from planner.api.cli.output import letters_only, make_console, note, show, working
from planner.api.cli.typed import Json
from planner.api.identity import local_user
from planner.api.input.jobs import parse_job
from planner.api.input.text import opened
from planner.api.own_entries import with_own
from planner.api.render.estimate import estimate_view
from planner.api.service import (
    MAX_LINE_BYTES,
    Estimates,
    Refusal,
    growing,
    job_lines,
    keep_estimates,
    line_of,
    meant,
)
from planner.api.wiring import Wiring, wire
from planner.errors import StoreError, fault
from planner.units import counted

MOST_CHUNK = 4096  # jobs answered at once
COLLECT_AFTER = 200_000  # objects more than before


def command(
    job: str | None = None,
    jobs: str | None = None,
    plan: PlanOption = None,
    rank: int | None = None,
    model: str | None = None,
    gpu: str | None = None,
    num_gpus: str | None = None,
    json: Json = False,
) -> None:
    """Price layouts: time, memory, and how sure.

    job: Job with a layout in YAML or JSON, - for stdin; or a trainer's config, script or log.
    jobs: File with one JSON job a line, - for stdin; answers one JSON line each.
    rank: Which layout of the plan; 1 unless given.
    model: Completes or overrides the file's model.
    gpu: Completes or overrides the file's GPU.
    num_gpus: Completes or overrides the file's number of GPUs.
    """
    if sum(given is not None for given in (job, jobs, plan)) != 1:
        remedy = "give --job FILE, --jobs FILE.jsonl, or --plan PLAN_ID --rank N"
        raise fault("--job", job, "exactly one of --job, --jobs and --plan is needed", remedy)
    if jobs is not None:
        _many(jobs)
    else:
        wiring = wire()
        values = layout_given(wiring, job, plan, rank)
        values = completed_by(values, model=model, gpu=gpu, num_gpus=num_gpus)
        _one(wiring, values, as_json=json)


def _one(wiring: Wiring, values: dict[str, Any], *, as_json: bool) -> None:
    with working("pricing", quiet=as_json):
        asked = with_own(wiring, values)
        own = partial(learned, wiring, owner=local_user())
        prices = Estimates(allow_files=True, calibration_of=own)
        (kept,) = keep_estimates(wiring, [asked], prices.of([asked]))
    if isinstance(kept, Refusal):
        raise kept.error
    if as_json:
        typer.echo(kept.estimate.model_dump_json(indent=2))
        return
    console = make_console()
    parsed, letters = parse_job(asked, allow_files=True), letters_only(console)
    view = estimate_view(kept.estimate, parsed, console.width, letters=letters, kept_id=kept.id)
    show(view, console)


def _many(path: str) -> None:
    """Prints answers chunk by chunk: a long file needs little memory and answers come soon."""
    # answers hold no circles, so that looking for some among thousands of them is mostly in vain
    gc.set_threshold(COLLECT_AFTER)
    wiring = wire()
    learnt: Learned = {}
    try:
        learnt = learned_by_gpu(wiring, local_user())
    except StoreError as error:
        note(f"priced with the shipped calibration alone: {error}")
    estimates = Estimates(allow_files=True, calibration_of=among(learnt))
    num_readable = num_lines = 0
    # answers on the same terminal are progress enough
    with working("pricing", quiet=sys.stdout.isatty()) as shown:
        for chunk in growing(job_lines(_raw_lines(path)), MOST_CHUNK):
            num_lines += len(chunk)
            num_readable += sum(not isinstance(value, Refusal) for value in chunk)
            shown.say(counted(num_lines, "line"))
            for entry in estimates.of([meant(wiring, value) for value in chunk]):
                sys.stdout.write(line_of(entry) + "\n")
            sys.stdout.flush()
    if not num_readable:
        rule = "holds no line that could be read"
        raise fault("--jobs", path, rule, "write one JSON object a line")


def _raw_lines(path: str) -> Iterator[bytes]:
    """Lines without their end; an overlong line is cut where its length is known to be too much."""
    remedy = "give the path of a .jsonl file, or - for standard input"
    with opened(path, "--jobs", remedy) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 2):
            rest = line
            while not rest.endswith(b"\n") and len(rest) > MAX_LINE_BYTES:
                rest = stream.readline(MAX_LINE_BYTES + 2)
            yield line.rstrip(b"\r\n")
