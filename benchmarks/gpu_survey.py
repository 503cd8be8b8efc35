"""Measures the GPU of this machine for the planner.

    python benchmarks/gpu_survey.py --seconds 560

It needs no decisions: call it again until it reports that nothing is left. It skips what is in the
files already, and starts with the most informative cases. Its rows are like those of
`measured/public.jsonl`. Needs torch with CUDA, numpy, pydantic and pyyaml. `--tiny` tries every
path on a CPU in a few minutes.

`--fake GPU` counts the memory of the same ranks with fake tensors, on any machine with torch, into
measured/fake-GPU.runs.jsonl.

  measured/own-GPU.micro.jsonl  kernels of the runs below that no measurement covers
                                (`python -m planner.probes.micro`)
  measured/own-GPU.runs.jsonl   real training on one GPU and single ranks of large worlds
                                (`survey_grid.py`), out-of-memory runs included

An emulated rank's step_seconds have no communication (rung: emulated).
`predicted_against_measured.py` makes the table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from benchmarks.first_day import SMALL, first_day, kernels
    from benchmarks.first_day import environment as environment_lines
    from benchmarks.survey_grid import Case, cases, fake_cases
    from planner.calibration.coverage import Use, choose, uses
    from planner.calibration.kernels import KernelShape
    from planner.catalog.clusters import gpu_names
    from planner.columns import LayoutBatch
    from planner.cost.price import Pricer
    from planner.errors import PlannerError
    from planner.estimates import estimate_job
    from planner.intake.jobs import read_job
    from planner.intake.machines import load_gpu
    from planner.probes.folder import END, LOG, RESULT
    from planner.probes.launch import Launcher, LaunchSettings, Watch, free_port, prepare, torchrun
    from planner.probes.outcome import Begin, End, conclude, write_result
    from planner.probes.pools import nvidia
    from planner.probes.pools.local import LocalPool, LocalSettings
    from planner.probes.protocol import Failed, FailureKind, ProbeResult, ProbeTask
    from planner.probes.trainers import Program
    from planner.probes.variables import DeviceLease, environment
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: pip install torch numpy 'pydantic>=2.11,<3' pyyaml")

MEASURED = Path(__file__).resolve().parent / "measured"
MICRO_SHARE, MICRO_SECONDS = 0.15, 60.0
CASE_SECONDS, FAKE_LIMIT_SECONDS = 240.0, 1200.0
LEAST_SECONDS = 30.0  # nothing is started with less time left
LONG_STEP_SECONDS = 4.0  # a step predicted to be longer is repeated less often
COLD_START_SECONDS = 120.0  # first import of torch from a cold disk; judgement
START_SECONDS, COMPILE_SECONDS = 10.0, 25.0  # of a process until its first step; judgement
# of a case with fake tensors: 20 to 140, whatever the model would take on a GPU
FAKE_SECONDS = 60.0
NOT_YET = {FailureKind.INTERRUPTED, FailureKind.TIMEOUT, FailureKind.FOREIGN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the survey runs.

    gpu: the GPU's catalogue name.
    devices: for CUDA_VISIBLE_DEVICES, the one that is surveyed first; None on a CPU.
    fake: fake tensors instead of a GPU.
    """

    gpu: str
    name: str
    devices: tuple[str, ...] | None
    fake: bool = False

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return "cpu" if self.devices is None else "cuda"

    @property
    def source(self) -> str:
        """The name of its rows and files."""
        return f"{'fake' if self.fake else 'own'}-{self.gpu}"

    @property
    def case_seconds(self) -> float:
        """The longest that a case may take, its start and compilation included."""
        return FAKE_LIMIT_SECONDS if self.fake else CASE_SECONDS


def leases_of(machine: Machine, count: int = 1) -> LocalSettings:
    """Leases of the one GPU that is surveyed, or of so many."""
    devices = ",".join((machine.devices or ())[:count])
    return LocalSettings(environment={"CUDA_VISIBLE_DEVICES": devices})


def find_machine() -> Machine:
    """The first GPU here that CUDA_VISIBLE_DEVICES leaves us, by its catalogue name, and those like
    it. Exits with a message if there is none.
    """
    seen = nvidia.survey()
    gpus = nvidia.visible(seen, os.environ)
    if not gpus:
        hidden = "CUDA_VISIBLE_DEVICES hides all" if seen.gpus else "nvidia-smi lists none"
        sys.exit(f"no GPU: {seen.problem or hidden}; on a CPU try --tiny")
    gpu = gpus[0]
    for name in gpu_names():
        if nvidia.is_same_gpu(load_gpu(name), gpu):
            alike = tuple(one.uuid for one in gpus if one.name == gpu.name)
            return Machine(gpu=name, name=gpu.name, devices=alike)
    sys.exit(
        f"{gpu.name} is not in the catalogue; add planner/catalog/gpus/NAME.yaml (CONTRIBUTING, "
        "'Where each kind of change goes')"
    )


def choose_machine(fake: str, *, tiny: bool) -> Machine:
    """The machine that the flags ask for, or this one's GPU."""
    if fake:
        return Machine(
            gpu=load_gpu(fake, field="--fake").name, name="fake tensors", devices=None, fake=True
        )
    return Machine(gpu="cpu", name="CPU", devices=None) if tiny else find_machine()


def read_rows(*paths: Path) -> list[dict[str, Any]]:
    """Rows of all these files; skips missing files and incomplete lines."""
    rows = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


# ---- kernels -------------------------------------------------------------------------------------


def wanted_shapes(
    listed: Iterable[Case], measured: list[KernelShape], seconds: float
) -> list[KernelShape]:
    """The kernels of all cases that no measurement covers, most valuable first.

    As many as the time allows.
    """
    shares: dict[KernelShape, Use] = {}
    for case in listed:
        job = read_job(case.job)
        assert job.layout is not None
        for use in uses(
            Pricer.build(job.model, job.cluster, job.training),
            LayoutBatch.from_layouts([job.layout]),
        ):
            known = shares.get(use.shape)
            total = use.share + (known.share if known else 0.0)
            shares[use.shape] = Use(
                shape=use.shape,
                seconds=max(use.seconds, known.seconds if known else 0.0),
                share=total,
            )
    return [gap.use.shape for gap in choose(shares.values(), measured, budget_seconds=seconds)]


def measured_shapes(rows: Iterable[dict[str, Any]]) -> list[KernelShape]:
    """Shapes that a survey has tried, whatever the result."""
    return [KernelShape.from_dict(row) for row in rows if "sizes" in row]


def time_kernels(
    machine: Machine, shapes: list[KernelShape], out: Path, seconds: float, until: float
) -> None:
    """Runs the micro-probes and appends their lines to `out`.

    until: when they end at the latest, in `time.monotonic`.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "shapes.jsonl"
        listed.write_text(
            "".join(json.dumps(shape.as_dict()) + "\n" for shape in shapes), encoding="utf-8"
        )
        command = [
            sys.executable,
            "-m",
            "planner.probes.micro",
            "--shapes",
            str(listed),
            "--out",
            str(out),
            "--device",
            machine.device,
        ]
        limit = max(1.0, min(seconds + COLD_START_SECONDS, until - time.monotonic()))
        try:
            done = subprocess.run(
                [*command, "--seconds", str(seconds)],
                cwd=MEASURED.parents[1],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join((machine.devices or ())[:1])},
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            say("micro-probes: stopped at their time limit")
        else:
            say(f"micro-probes: {len(shapes)} shapes asked, exit {done.returncode}")


# ---- runs ----------------------------------------------------------------------------------------


def task_of(case: Case, machine: Machine, time_limit_seconds: float) -> ProbeTask:
    """The probe of a case; one with long steps is repeated less often."""
    long = predicted_step_seconds(case) > LONG_STEP_SECONDS
    wanted = {
        "id": case.id.replace("/", "."),
        "job": case.job,
        "device": machine.device,
        "emulate_rank": case.rank,
        "fake_tensors": machine.fake,
        "steps": min(case.steps, 2) if long else case.steps,
        "warmup_steps": 1 if long else case.warmup_steps,
        "time_limit_seconds": time_limit_seconds,
        "least_seconds": 0.0,  # many layouts; the first day's long run says what short ones miss
    }
    return ProbeTask.model_validate(wanted | case.task)


def predicted_step_seconds(case: Case) -> float:
    """Predicted seconds of a step of the case as it will run; 0 without a prediction.

    An emulated rank has no communication and no bubbles.
    """
    alone_seconds, whole_seconds = _predicted(json.dumps(case.job))
    return whole_seconds if case.rank is None else alone_seconds


@lru_cache(maxsize=256)
def _predicted(job: str) -> tuple[float, float]:
    """(seconds of a rank by itself, seconds of a whole step)."""
    estimate = estimate_job(read_job(json.loads(job)))
    if estimate.time is None or estimate.step_seconds is None:
        return 0.0, 0.0
    parts = estimate.time
    return (
        parts.compute_seconds
        + parts.host_seconds
        + parts.recompute_seconds
        + parts.optimizer_seconds
        + parts.other_seconds,
        estimate.step_seconds,
    )


def expected_seconds(case: Case, machine: Machine) -> float:
    """Approximate wall seconds of a case."""
    if machine.fake:
        return FAKE_SECONDS
    task = task_of(case, machine, machine.case_seconds)
    compiled = (
        COMPILE_SECONDS if case.job["layout"].get("compile") and machine.device == "cuda" else 0.0
    )
    return (
        START_SECONDS + compiled + predicted_step_seconds(case) * (task.steps + task.warmup_steps)
    )


def alone(python: str, task: ProbeTask, program: Program, *, port: int) -> list[str]:
    """The command of a single process, without torchrun.

    A survey starts many processes, and torchrun imports torch once more.
    """
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    words = [f"{name}={value}" for name, value in variables.items()]
    return [
        "env",
        *words,
        python,
        "-m",
        "planner.probes.inside",
        RESULT,
        program.target,
        *program.arguments,
    ]


Run = Callable[[ProbeTask, Machine, Path], ProbeResult]


def guarded(
    task: ProbeTask, machine: Machine, folder: Path, worker: str = "planner.probes.worker"
) -> ProbeResult:
    """One probe under the guardian on leased devices, as every other probe runs."""
    count = task.num_processes()
    command = alone if count == 1 else torchrun
    launcher = Launcher(LaunchSettings(folder=folder, command=command, worker=worker))
    return LocalPool(launcher, leases_of(machine, count)).run(task)


def plain(
    task: ProbeTask, machine: Machine, folder: Path, worker: str = "planner.probes.worker"
) -> ProbeResult:
    """One probe as a child process, for machines whose kernel lacks what the guardian needs."""
    count = task.num_processes()
    start = alone if count == 1 else torchrun
    devices = machine.devices and machine.devices[:count]
    held = DeviceLease(devices=devices, gpu_name=machine.name)
    settings = LaunchSettings(folder=folder, command=start, worker=worker)
    begin = Begin(num_gpus=count, token=uuid.uuid4().hex, gpu_name=machine.name)
    place, program = prepare(settings, task, begin, Watch())
    if isinstance(program, Failed):
        return write_result(place, task, begin, program)
    command, variables = (
        start(sys.executable, task, program, port=free_port()),
        environment(folder, task, held, program.env),
    )
    started, limit = time.monotonic(), task.time_limit_seconds
    with (place / LOG).open("wb") as log:
        try:
            code = subprocess.run(
                command,
                cwd=place,
                env=variables,
                stdout=log,
                stderr=log,
                timeout=limit,
                check=False,
            ).returncode
            reason = "exit"
        except subprocess.TimeoutExpired:
            code, reason = -9, "time-limit"
    (place / END).write_text(
        End(reason=reason, exit_code=code, seconds=time.monotonic() - started).model_dump_json()
    )
    return conclude(place)


def row_of(case: Case, result: ProbeResult, machine: Machine) -> dict[str, Any]:
    """A row of measurements: the job, its result, and the environment."""
    row = result.measurement().as_row()
    state = result.environment.model_dump(exclude_none=True)
    row["measured"] |= {**case.labels, "environment": state, "measured_at": result.started_at}
    if result.outcome.status == "ok":
        out = result.outcome
        row["measured"]["steps_seconds"] = [round(each, 6) for each in out.step_seconds_each]
        extra = {"expert_imbalance": out.expert_imbalance, "kernel_seconds": out.kernel_seconds}
        row["measured"] |= {name: value for name, value in extra.items() if value is not None}
        row["measured"] |= {"wall_seconds": round(result.wall_seconds, 2)} if case.task else {}
    gpus = 1 if case.rank is not None else case.job["cluster"]["num_gpus"]
    many = "one" if gpus == 1 else str(gpus)
    source = (
        f"benchmarks/gpu_survey.py on {many} {machine.name}"
        if not machine.fake
        else "benchmarks/gpu_survey.py --fake"
    )
    kind = (
        "a single rank, communication left out"
        if case.rank is not None
        else f"{many} GPU{'s' * (gpus > 1)}"
    )
    kind = "memory of one rank from fake tensors" if machine.fake else kind
    return {
        "id": case.id,
        "group": machine.source,
        "complete": True,
        **row,
        "source": source,
        "trust": "high",
        "notes": kind,
    }


def say(text: str) -> None:
    print(text, flush=True)


def describe(case: Case, result: ProbeResult, seconds: float) -> str:
    """One line for the screen."""
    out = result.outcome
    if out.status == "ok":
        peak = max((memory.peak_allocated_bytes or 0 for memory in out.memory), default=0)
        step = (
            "-"
            if out.step_seconds is None
            else f"{out.step_seconds:.4f} s (predicted {predicted_step_seconds(case):.4f})"
        )
        return f"{case.id}: {step}, peak {peak / 2**30:.2f} GiB, took {seconds:.0f} s"
    kind = f"failed ({out.kind})" if isinstance(out, Failed) else "out of memory"
    return f"{case.id}: {kind}: {' '.join(out.message.split())[:160]}, took {seconds:.0f} s"


def run_cases(machine: Machine, left: list[Case], out: Path, until: float, run: Run) -> int:
    """Runs the cases that fit in the time; returns how many rows were added."""
    added = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in left:
            remaining = until - time.monotonic()
            if remaining < LEAST_SECONDS:
                break
            if expected_seconds(case, machine) > remaining:
                continue
            started, task = (
                time.monotonic(),
                task_of(case, machine, min(remaining, machine.case_seconds)),
            )
            result = run(task, machine, Path(folder))
            took = time.monotonic() - started
            say(describe(case, result, took))
            outcome = result.outcome
            if (
                isinstance(outcome, Failed)
                and outcome.kind in NOT_YET
                and took < machine.case_seconds
            ):
                continue  # the survey's own time limit ended it, or others had the GPU: next time
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row_of(case, result, machine)) + "\n")
            added += 1
    return added


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=560.0, help="wall-clock seconds, all in all"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=MEASURED,
        help="folder for the files; those in benchmarks/measured count as done too",
    )
    parser.add_argument(
        "--only", default="", help="cases whose name starts so (train/, rank/70b), or micro"
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="try again what failed otherwise than out of memory",
    )
    parser.add_argument("--tiny", action="store_true", help="a few tiny cases on the CPU")
    parser.add_argument(
        "--fake",
        metavar="GPU",
        default="",
        help="memory of ranks with fake tensors, for a GPU of the catalogue",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="start probes without the guardian, where its kernel features are missing",
    )
    parser.add_argument(
        "--first-day",
        action="store_true",
        help="the first thirty minutes on a GPU, in order, into measured/first-day (--only 4/,10/)",
    )
    parser.add_argument("--list", action="store_true", help="say what is left and stop")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    machine = choose_machine(options.fake, tiny=options.tiny)
    if options.first_day:
        run_first_day(machine, options, until)
        return
    name = f"{machine.source}-tiny" if options.tiny else machine.source
    options.out.mkdir(parents=True, exist_ok=True)
    micro, runs = options.out / f"{name}.micro.jsonl", options.out / f"{name}.runs.jsonl"
    listed = fake_cases(machine.gpu) if machine.fake else cases(machine.gpu, tiny=options.tiny)
    rows = read_rows(runs, MEASURED / runs.name)
    done = {
        row["id"]
        for row in rows
        if not (options.retry_failed and row["measured"]["status"] == "failed")
    }
    left = [case for case in listed if case.id not in done and case.id.startswith(options.only)]
    no_kernels = machine.fake or options.only not in ("", "micro")
    kernels = (
        []
        if no_kernels
        else shapes_left(listed, read_rows(micro, MEASURED / micro.name), options.seconds)
    )
    say(
        f"{machine.name} ({machine.gpu}): {len(left)} of {len(listed)} cases and {len(kernels)} "
        "kernels to do"
    )
    if options.list:
        say("\n".join(case.id for case in left))
        return
    try:
        if kernels:
            time_kernels(
                machine, kernels, micro, min(MICRO_SECONDS, MICRO_SHARE * options.seconds), until
            )
        added = (
            run_cases(machine, left, runs, until, plain if options.plain else guarded)
            if options.only != "micro"
            else 0
        )
    except PlannerError as error:
        sys.exit(str(error))
    say(
        f"{added} rows added to {runs}; {len(left) - added} cases "
        f"left{'' if len(left) == added else ': call again'}"
    )


def run_first_day(machine: Machine, options: argparse.Namespace, until: float) -> None:
    """Runs the parts of the first day whose names start so; rows are added at every call."""
    folder = options.out / "first-day"
    folder.mkdir(parents=True, exist_ok=True)
    gpus = SMALL.node if machine.devices is None else len(machine.devices)
    only = tuple(part for part in options.only.split(",") if part)
    left = [
        case
        for case in first_day(machine.gpu, gpus=gpus, tiny=options.tiny)
        if not only or case.id.startswith(only)
    ]
    say(
        "\n".join(case.id for case in left) if options.list else f"{machine.name}: {len(left)} runs"
    )
    if options.list:
        return
    if not only or "0/" in only:
        (folder / "environment.txt").write_text("\n".join(environment_lines(machine.device)) + "\n")
    run = plain if options.plain else guarded
    added = run_cases(machine, left, folder / f"{machine.source}.runs.jsonl", until, run)
    say(f"{added} of {len(left)} runs")
    if not only or "10/" in only:
        wanted = [KernelShape.from_dict(json.loads(line)) for line in kernels().splitlines()]
        seconds = min(MICRO_SECONDS, until - time.monotonic())
        time_kernels(machine, wanted, folder / f"{machine.source}.micro.jsonl", seconds, until)
    if machine.device == "cuda" and (not only or "10/" in only):
        command = [sys.executable, "-m", "benchmarks.first_day", "--orders"]
        with (folder / "attention-orders-and-masks.jsonl").open("a") as out:
            subprocess.run(command, cwd=MEASURED.parents[1], stdout=out, check=False)


def shapes_left(
    listed: list[Case], rows: list[dict[str, Any]], seconds: float
) -> list[KernelShape]:
    return wanted_shapes(listed, measured_shapes(rows), min(MICRO_SECONDS, MICRO_SHARE * seconds))


if __name__ == "__main__":
    main()
