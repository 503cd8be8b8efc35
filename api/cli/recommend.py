"""`planner-cli recommend`: a model and a cluster in, a ranked plan out."""

from pathlib import Path
from typing import Annotated

import typer

from planner.api.cli.files import PlotOrText, check_plot, check_target, plot_plan, save_plan
from planner.api.cli.flags import check_complete, job_of_flags
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
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(autocompletion=complete_model)] = None,
    gpu: Annotated[str | None, typer.Option(autocompletion=complete_gpu)] = None,
    cluster: Annotated[str | None, typer.Option(autocompletion=complete_cluster)] = None,
    num_gpus: str | None = None,
    seq_len: Annotated[int | None, typer.Option(parser=tokens_typed, metavar="TOKENS")] = None,
    global_batch_size: int | None = None,
    trainer: Annotated[str | None, typer.Option(autocompletion=complete_trainer)] = None,
    trainer_version: str | None = None,
    job: str | None = None,
    total_tokens: str | None = None,
    checkpoint: str | None = None,
    price_per_gpu_hour: float | None = None,
    top_k: int | None = None,
    fix: list[str] | None = None,
    allow: list[str] | None = None,
    objective: str | None = None,
    prefer: str | None = None,
    probe: int | None = None,
    current: str | None = None,
    sampler: Annotated[str | None, typer.Option(autocompletion=complete_sampler)] = None,
    seed: int | None = None,
    save_dir: Path | None = None,
    plot: PlotOrText = None,
    json: Json = False,
) -> None:
    """Rank the layouts that train MODEL fastest on this cluster.

    model: Catalogue name, Hugging Face id, or path to a config.json.
    gpu: Name of the GPU, as in `catalog gpus`.
    cluster: Name of a cluster, or a YAML file; instead of --gpu.
    num_gpus: A number, a range "64..1024", or a list "64,96".
    seq_len: Of a sequence: 8192, or 8k for the same.
    global_batch_size: Sequences of a step.
    trainer: Software whose rules apply: torchtitan (default), megatron, ...
    trainer_version: Release, date or commit of it; the default's unless given.
    job: Job in YAML or JSON, - for stdin, or what --current takes; flags override it.
    total_tokens: Tokens of the whole run, for its time and price: "15T".
    checkpoint: Steps between saves, and how: "500", "500:async-pinned".
    price_per_gpu_hour: USD; else the GPU's usual price.
    top_k: How many layouts to rank.
    fix: Fix a layout field: tp=8. May be repeated.
    allow: Allow only these values: precision=bf16,float8-rowwise.
    objective: throughput (default), memory, time, cost or energy.
    prefer: simplest of what cannot be told apart (default), or fastest on paper.
    probe: Measure up to this many layouts on real GPUs.
    current: What you run today: a TorchTitan TOML, command or log, a Megatron script, a layout in
        JSON.
    sampler: How layouts beyond enumeration are sampled, and probes are chosen.
    seed: Seed of the sampler.
    save_dir: Write the plan and runnable files of every rank here.
    """
    values = job_of_flags(ctx.params)  # by name: most flags are the job's
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
