"""`planner-cli calibrate`: new calibrations from the stored measurements."""

from typing import Annotated

import typer

from planner.api.calibration.grid import gpu_of, grid_of, knobs_moved
from planner.api.calibration.update import all_measured, update_calibrations
from planner.api.cli.output import note, say, show_json, working
from planner.api.cli.studying import bar, sweep_stand
from planner.api.cli.typed import Json, complete_gpu, complete_pool
from planner.api.jobs.leases import Observer
from planner.api.jobs.sweep_report import failure_in
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.storage.common import told
from planner.api.wiring import wire
from planner.intake.machines import load_gpu
from planner.probes.pools import listed, pool_forms
from planner.units import counted


def command(
    gpu: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_gpu,
            help="Only from measurements on this GPU; with --pool the GPU to measure.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_pool,
            help=f"First measure a small grid on this pool: {listed(pool_forms())}.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    wiring = wire()
    if gpu is not None:
        gpu = load_gpu(gpu, field="--gpu").name
    if pool is not None:
        gpu = gpu or gpu_of(wiring, pool)
        sweep = add_sweep(wiring, grid_of(wiring, gpu, pool), allow_files=True, ours=True)
        observer = Observer()
        with bar(observer, "layouts", sweep_stand):
            ended = run_sweep(wiring, run_now(wiring, sweep, ours=True), observer)
        note(ended.message or "")
        assert ended.result is not None, "a run that nothing kept from measuring has a report"
        failure = failure_in(ended.result)
        if failure is not None:
            raise failure
    with working("learning from all measurements", quiet=json):
        made = update_calibrations(wiring, all_measured(wiring, gpu), anew=True)
    if json:
        rows = []
        for one in made:
            about = {"runs": one.num_runs, "stale": one.document.get("stale")}
            rows.append({**told(one, "id", "trainer", "gpu"), **about, "knobs": knobs_moved(one)})
        show_json(rows)
        return
    if not made:
        say(
            "no stored measurement tells a step time; `planner-cli probe` and `measurements "
            "import` supply them"
        )
    for one in made:
        say(f"{one.id}: {one.trainer} on {one.gpu}, {counted(one.num_runs, 'run')}")
        stale = one.document.get("stale")
        if stale:
            say(f"  {counted(stale['runs'], 'older run')} left out as stale: {stale['statement']}")
        for knob, (before, after) in knobs_moved(one).items():
            say(f"  {knob:22s} {before:.3g} -> {after:.3g}")
