"""`planner-cli recommend`: a model and a cluster in, a ranked plan out."""

from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.files import PlotOrText, check_plot, check_target, plot_plan, save_plan
from planner.api.cli.flags import check_complete, job_of_flags, parse_checkpoint
from planner.api.cli.output import error_line, letters_only, make_console, note, show, working
from planner.api.cli.typed import (
    Json,
    complete_cluster,
    complete_gpu,
    complete_model,
    complete_sampler,
    complete_trainer,
    tokens_typed,
)
from planner.api.identity import local_user
from planner.api.render.current import difference_lines
from planner.api.render.plan import plan_view
from planner.api.service import answer_on_paper, ask_on_paper, keep_plan
from planner.api.wiring import wire
from planner.errors import StoreError
from planner.specs.plan import Plan


def command(
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_model,
            help="Catalogue name, Hugging Face id, or path to a config.json.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(autocompletion=complete_gpu, help="Name of the GPU, as in `catalog gpus`."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_cluster,
            help="Name of a cluster, or a YAML file; instead of --gpu.",
        ),
    ] = None,
    num_gpus: Annotated[
        str | None, typer.Option(help='A number, a range "64..1024", or a list "64,96".')
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=tokens_typed, metavar="TOKENS", help="Of a sequence: 8192, or 8k for the same."
        ),
    ] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_trainer,
            help="Software whose rules apply: torchtitan (default), megatron, ...",
        ),
    ] = None,
    trainer_version: Annotated[
        str | None, typer.Option(help="Release, date or commit of it; the default's unless given.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="Job in YAML or JSON, - for stdin, or what --current takes; flags override it."
        ),
    ] = None,
    total_tokens: Annotated[
        str | None, typer.Option(help='Tokens of the whole run, for its time and price: "15T".')
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help='Steps between saves, and how: "500", "500:async-pinned".')
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="USD; else the GPU's usual price.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="How many layouts to rank.")] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Fix a layout field: tp=8. May be repeated.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Allow only these values: precision=bf16,float8-rowwise."),
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="throughput (default), memory, time, cost or energy.")
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option(help="simplest of what cannot be told apart (default), or fastest on paper."),
    ] = None,
    probe: Annotated[
        int | None, typer.Option(help="Measure up to this many layouts on real GPUs.")
    ] = None,
    current: Annotated[
        str | None,
        typer.Option(
            help="What you run today: a TorchTitan TOML, command or log, a Megatron script, a "
            "layout in JSON."
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_sampler,
            help="How layouts beyond enumeration are sampled, and probes are chosen.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.")] = None,
    save_dir: Annotated[
        Path | None, typer.Option(help="Write the plan and runnable files of every rank here.")
    ] = None,
    plot: PlotOrText = None,
    json: Json = False,
) -> None:
    values = job_of_flags(
        job=job,
        model=model,
        gpu=gpu,
        cluster=cluster,
        num_gpus=num_gpus,
        fix=fix or (),
        allow=allow or (),
        current=current,
        probe=probe,
        training={
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "trainer": trainer,
            "trainer_version": trainer_version,
            "total_tokens": total_tokens,
            "checkpoint": None if checkpoint is None else parse_checkpoint(checkpoint),
        },
        price_per_gpu_hour=price_per_gpu_hour,
        search={
            "top_k": top_k,
            "objective": objective,
            "sampler": sampler,
            "seed": seed,
            "prefer": prefer,
        },
    )
    if job is None and values.get("current") is None:
        check_complete(values)
    if save_dir is not None:
        save_dir = save_dir.expanduser()
        check_target(save_dir)
    check_plot(plot, text=not json)
    interrupted, unstored = False, None
    if values.get("probe") is None:
        plan, unstored = _on_paper(values, quiet=json)
    else:
        from planner.api.cli.studying import make_plan_with_probes  # imports Optuna

        plan, interrupted = make_plan_with_probes(wire(), values)
    if save_dir is not None:
        save_plan(plan, save_dir)
        note(f"saved to {save_dir}")
    if json:
        typer.echo(plan.model_dump_json(indent=2))
    else:
        print_plan(plan, str(save_dir) if save_dir is not None else None)
    plot_plan(plot, plan)
    if unstored is not None:
        error_line(f"the plan above was not stored: {unstored}")
        raise typer.Exit(4)
    _exit(plan, interrupted)


def _on_paper(values: object, *, quiet: bool) -> tuple[Plan, StoreError | None]:
    """(the plan without probes, why it could not be stored)."""
    wiring = wire()
    with working("looking at all layouts", quiet=quiet) as shown:
        question = ask_on_paper(wiring, values, allow_files=True, owner=local_user())
        plan = answer_on_paper(wiring, question, shown.say)
    try:
        keep_plan(wiring, question, plan)
    except StoreError as error:
        return plan, error
    return plan, None


def print_plan(plan: Plan, saved: str | None = None) -> None:
    """Renders a plan for the terminal. saved: folder that has the files of every rank."""
    console = make_console()
    show(plan_view(plan, console.width, letters=letters_only(console), saved=saved), console)
    difference = difference_lines(plan)
    if difference and saved is None:
        typer.echo(f"\n{difference}", nl=False)


def _exit(plan: Plan, interrupted: bool) -> None:
    """Exits after the plan was printed: 130 after Ctrl-C, 4 where no probe gave a number."""
    if interrupted:
        raise typer.Exit(130)
    if plan.probing is not None:
        from planner.api.cli.studying import failure_of

        message = failure_of(plan)
        if message is not None:
            error_line(message)
            raise typer.Exit(4)
