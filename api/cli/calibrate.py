"""`planner-cli calibrate`: what the stored measurements teach, and how far the knobs moved."""

from typing import Annotated

import typer

NAME = "calibrate"


def command(
    gpu: Annotated[str | None, typer.Option(help="Only from measurements on this GPU.")] = None,
    pool: Annotated[str | None, typer.Option(help="First measure a small grid on this pool: local, slurm, slurm:PARTITION.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine output on stdout alone.")] = False,
) -> None:
    """Make the calibrations of all measured trainers and GPUs anew and store them; plans use the newest."""
    import json as encoder

    from api.calibrating import grid_of, knobs_moved
    from api.cli.output import note, say
    from api.closed_loop import Onlooker
    from api.errors import fault
    from api.importing import all_of
    from api.learning import teach
    from api.sweeping import add_sweep, run_now, run_sweep
    from api.wiring import wire
    from planner.ports import MeasurementFilter

    wiring = wire()
    if pool is not None:
        if gpu is None:
            raise fault("--gpu", None, "is required with --pool", "name the pool's GPU, for example --gpu h100-sxm-80gb or --gpu cpu")
        sweep = add_sweep(wiring, grid_of(wiring, gpu, pool), allow_files=False)
        ended = run_sweep(wiring, run_now(wiring, sweep, ours=True), Onlooker(say=note))
        note(ended.message or "")
    made = teach(wiring, all_of(wiring, MeasurementFilter(gpu=gpu)))
    if json:
        rows = [{"id": one.id, "trainer": one.trainer, "gpu": one.gpu, "runs": one.num_runs, **knobs_moved(one)} for one in made]
        say(encoder.dumps(rows, indent=2))
        return
    if not made:
        say("no stored measurement tells a step time; `planner-cli probe` and `measurements import` supply them")
    for one in made:
        say(f"{one.id}: {one.trainer} on {one.gpu}, {one.num_runs} runs")
        for knob, (before, after) in knobs_moved(one)["knobs"].items():
            say(f"  {knob:22s} {before:.3g} -> {after:.3g}")
