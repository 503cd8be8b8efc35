"""How fast the planner is, and beside a peer.

    python benchmarks/speed.py [--only NAME ...] [--peer PYTHON] [--write]
    python benchmarks/speed.py [--only NAME ...] --beside REVISION [--turns N]

One table of jobs, shell to prompt: wall and CPU seconds of `planner-cli recommend` with an empty
database, its peak memory, legal layouts that it decided a CPU second; then the layouts a CPU second
that the cost model prices on one core, of a sample of the whole space and in its order; then other
questions (several sizes, many estimates, the accuracy report, a plan asked twice of one process).

A yardstick, a fixed loop of NumPy, runs before and after each row. Seconds are divided by it and
compared with the last committed table (`docs/speed.json`), so that a slow machine cancels; --write
replaces that table and docs/speed.md. --peer names a Python with llm-analysis from PyPI: it prices
the same layouts of the same job one by one, as its API does (`LLMAnalysis.training`), and the row
says how many a CPU second. It counts fewer effects; what is compared is only the time.

--beside asks the same plans of this checkout and of an older revision in turns, so that whatever
slows the machine slows both: seconds of two machines, or of two days, say little of the code.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "docs" / "speed.json", ROOT / "docs" / "speed.md"
SAMPLE, PEER_SAMPLE = 100_000, 200
THROUGH = 2**20  # layouts that are priced in the order of the space
REPEATS = 3  # of each plan and each pricing; the fastest counts
TURNS = 3  # of both revisions with --beside
JOBS: dict[str, tuple[str, str, str, int, int]] = {
    "Llama 3 8B, 8 H100": ("llama3-8b", "h100-sxm-80gb", "8", 8192, 64),
    "Llama 3 70B, 256 H100": ("llama3-70b", "h100-sxm-80gb", "256", 8192, 512),
    "Llama 3 405B, 512 H100": ("llama3-405b", "h100-sxm-80gb", "512", 8192, 512),
    "Llama 3 405B, 16,384 H100": ("llama3-405b", "h100-sxm-80gb", "16384", 8192, 2048),
    "Qwen3 235B, 256 H100": ("qwen3-235b-a22b", "h100-sxm-80gb", "256", 4096, 2048),
    "Kimi K2, 1,024 H100": ("kimi-k2", "h100-sxm-80gb", "1024", 4096, 8192),
    "DeepSeek V3, 2,048 H800": ("deepseek-v3", "h800-sxm-80gb", "2048", 4096, 15360),
    "DeepSeek V3, 2,048 H100": ("deepseek-v3", "h100-sxm-80gb", "2048", 4096, 15360),
}
SIZES = "Llama 3 70B, 64..16384 H100"
ESTIMATES = "10,000 estimates"
ALONE = "one estimate, the process warm"
ACCURACY = "accuracy"
TWICE = "the same plan again"
OTHER_BATCH = "another batch size, the process warm"
MADE = tempfile.TemporaryDirectory()  # what `installed` and `exported` write
PEER = r"""
import json, sys, time
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name
asked = json.load(sys.stdin)
model = ModelConfig(**asked["model"])
gpu = get_gpu_config_by_name("a100-sxm-80gb")
began = time.process_time()
for one in asked["layouts"]:
    ranks = ParallelismConfig(tp_size=one["tp"], pp_size=one["pp"], dp_size=one["dp"], sp_size=1)
    try:
        LLMAnalysis(model, gpu, parallelism_config=ranks, flops_efficiency=0.5,
                    hbm_memory_efficiency=0.9).training(
            batch_size_per_gpu=one["microbatch"], global_batch_size=asked["batch"],
            seq_len=asked["seq_len"], ds_zero=DSZeRO(one["zero"]),
            activation_recomputation=ActivationRecomputation[one["ac"]])
    except AssertionError:
        pass  # it refuses what does not fit, after pricing it
print(json.dumps(time.process_time() - began))
"""


def arguments(job: tuple[str, str, str, int, int]) -> list[str]:
    """The job as flags of `planner-cli recommend`."""
    model, gpu, size, length, batch = job
    flags = ("--model", "--gpu", "--num-gpus", "--seq-len", "--global-batch-size")
    return [text for pair in zip(flags, (model, gpu, size, str(length), str(batch)), strict=True)
            for text in pair]  # fmt: skip


def yardstick() -> float:
    """CPU seconds of a fixed loop of the kind of work that pricing is."""
    values, began = np.linspace(0.1, 1.0, 4096), time.process_time()
    for _ in range(6000):
        values = np.maximum(values * 1.0001, 0.1) + np.sqrt(values) * 1e-9
    return time.process_time() - began


def megabytes(process: int) -> float:
    """What this process and its copies hold of memory, pages that they share counted once."""
    total = 0.0
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for one in (str(process), *children):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(float(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except OSError:  # one of them has ended
        return 0.0
    return total / 1024.0


@cache
def installed(checkout: Path) -> tuple[Path, Path]:
    """(a Python with a checkout and the packages of this one, where it keeps compiled modules).

    As an installation has them: without the import hook of one that is editable.
    """
    plain = Path(tempfile.mkdtemp(dir=MADE.name))
    venv.create(plain, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [str(checkout), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    packages = plain / "lib" / version / "site-packages"
    (packages / "planner.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    return plain / "bin" / "python", plain / "compiled"


def exported(revision: str) -> Path:
    """The files of a revision of this repository, in a folder of their own."""
    command = ["git", "-C", str(ROOT), "archive", revision]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    folder = tempfile.mkdtemp(dir=MADE.name)
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return Path(folder)


def run(
    command: list[str], stdin: str | None = None, *, watched: bool = False, checkout: Path = ROOT
) -> tuple[dict[str, float], str]:
    """(wall seconds, CPU seconds, peak megabytes; standard output) of one command of the CLI.

    watched: the peak is that of all its processes together; looking takes time of theirs.
    """
    python, compiled = installed(checkout)
    module = "planner.api.cli" if (checkout / "planner" / "api").exists() else "api.cli"  # once
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PLANNER_DATABASE_URL": f"sqlite:///{folder}/plans.db",
            "PYTHONPYCACHEPREFIX": str(compiled),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop("PYTHONPATH", None)
        began = time.perf_counter()
        output = Path(folder) / "output"
        with output.open("w") as out:
            process = subprocess.Popen(
                [python, "-P", "-m", module, *command],  # -P: not what stands where we are called
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            if process.stdin is not None:
                process.stdin.write(stdin or "")
                process.stdin.close()
            together = 0.0
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while watched and os.waitid(os.P_PID, process.pid, ended) is None:
                together = max(together, megabytes(process.pid))
                time.sleep(0.01)
            _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        if status:
            raise SystemExit(f"planner-cli {' '.join(command)} failed")
        cpu = usage.ru_utime + usage.ru_stime
        peak = max(together, usage.ru_maxrss / 1024.0)
        return {"wall": wall, "cpu": cpu, "peak": peak}, output.read_text()


def recommended(job: tuple[str, str, str, int, int]) -> dict[str, Any]:
    """A plan of the job: seconds, memory, layouts decided, number one."""
    runs = [run(["recommend", *arguments(job), "--json"]) for _ in range(REPEATS)]
    used, output = min(runs, key=lambda one: one[0]["wall"])
    used["peak"] = run(["recommend", *arguments(job), "--json"], watched=True)[0]["peak"]
    plan = json.loads(output)
    legal = plan["searched"]["valid"]
    return used | {"legal": legal, "decided": legal / used["cpu"], "first": plan["headline"][0]}


def estimates() -> dict[str, Any]:
    """10,000 jobs of one model through `planner-cli estimate --jobs -`."""
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 64}
    training = {"seq_len": 8192, "global_batch_size": 1024}
    base = {"model": "llama3-8b", "cluster": cluster, "training": training}
    lines = []
    for number in range(10_000):
        tp, ac = 2 ** (number % 4), ("none", "full", "selective-op")[number // 4 % 3]
        shard = 64 // tp // 2 ** (number // 12 % 3)
        layout = {
            "tp": tp,
            "dp_shard": shard,
            "dp_replicate": 64 // tp // shard,
            "ac": ac,
            "micro_batch_size": 2 ** (number // 36 % 3),
        }
        lines.append(json.dumps({**base, "id": number, "layout": layout}))
    used, output = run(["estimate", "--jobs", "-"], "\n".join(lines) + "\n")
    valid = sum(json.loads(line)["valid"] for line in output.splitlines())
    return used | {"first": f"{len(output.splitlines()):,} answers, {valid:,} legal"}


def alone() -> dict[str, Any]:
    """Estimates of the README's job asked one by one, as POST /estimate is: the median."""
    from planner.estimates import estimate_job
    from planner.intake.jobs import read_job

    model, gpu, size, length, _ = JOBS["Llama 3 70B, 256 H100"]
    walls, cpus = [], []
    for number in range(30):
        pp = 2 ** (number % 3)
        job = {
            "model": model,
            "cluster": {"gpu": gpu, "num_gpus": int(size)},
            "training": {"seq_len": length, "global_batch_size": 256 * (number + 1)},
            "layout": {"tp": 8, "pp": pp, "dp_shard": 32 // pp, "ac": "full"},
        }
        wall, cpu = time.perf_counter(), time.process_time()
        estimate_job(read_job(job))
        cpus.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    return {"wall": float(np.median(walls)), "cpu": float(np.median(cpus)), "peak": peak}


def asked_again(batches: Sequence[int]) -> dict[str, Any]:
    """The main job of the README asked of one process, as POST /plan does, then with these batches.

    The fastest of the later answers.
    """
    from planner.api.identity import TimeOrderedIds
    from planner.api.service import answer_on_paper, ask_on_paper, keep_plan
    from planner.api.settings import Settings
    from planner.api.wiring import SystemClock, Wiring

    main = JOBS["Llama 3 70B, 256 H100"]
    asked = [main, *((*main[:4], one) for one in batches)]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        wiring = Wiring(
            settings=Settings(database_url=f"sqlite:///{folder}/plans.db"),
            clock=SystemClock(),
            ids=TimeOrderedIds(),
        )
        for model, gpu, size, length, batch in asked:
            job = {
                "model": model,
                "cluster": {"gpu": gpu, "num_gpus": int(size)},
                "training": {"seq_len": length, "global_batch_size": batch},
            }
            wall, cpu = time.perf_counter(), time.process_time()
            question = ask_on_paper(wiring, job, allow_files=False)
            plan = answer_on_paper(wiring, question)
            keep_plan(wiring, question, plan)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            found.append({"wall": wall, "cpu": cpu, "first": plan.headline[0]})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    return min(found[1:], key=lambda one: one["wall"]) | {"peak": peak}


def priced(job: tuple[str, str, str, int, int], peer: str | None) -> dict[str, Any]:
    """Layouts a CPU second, priced by the cost model on one core, and by the peer."""
    from planner.columns import LayoutBatch
    from planner.cost.chunks import CHUNK
    from planner.cost.price import Pricer
    from planner.intake.jobs import read_job
    from planner.rules import Context
    from planner.search.space.enumerate import build_space

    name, gpu, size, length, global_batch = job
    read = read_job(
        {
            "model": name,
            "cluster": {"gpu": gpu, "num_gpus": int(size)},
            "training": {"seq_len": length, "global_batch_size": global_batch},
        }
    )
    context = Context(model=read.model, cluster=read.cluster, training=read.training)
    space = build_space(context, read.search)
    order = np.random.default_rng(0).permutation(len(space.cells))
    enough = int(np.searchsorted(np.cumsum(space.cell_sizes[order]), SAMPLE)) + 1
    batch = space.expand(np.sort(order[:enough])).take(slice(0, SAMPLE))

    def rate(batches: Callable[[], Iterable[LayoutBatch]]) -> float:
        found = []
        for _ in range(REPEATS):
            pricer = Pricer.build(read.model, read.cluster, read.training)  # has priced nothing
            seconds, count = 0.0, 0
            for part in batches():
                began = time.process_time()
                for start in range(0, len(part), CHUNK):
                    pricer.price(part.take(slice(start, start + CHUNK)))
                seconds, count = seconds + time.process_time() - began, count + len(part)
            found.append(count / seconds)
        return max(found)

    def through() -> Iterator[LayoutBatch]:
        ends, first = np.cumsum(space.cell_sizes), 0
        most = int(np.searchsorted(ends, THROUGH, side="right"))
        while first < most:
            reached = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends[:most], reached + SAMPLE, side="right"))
            yield space.expand(np.arange(first, max(last, first + 1)))
            first = max(last, first + 1)

    return {
        "priced": rate(lambda: [batch]),
        "through": rate(through),
        "peer": None if peer is None else _peer(peer, read, batch),
    }


def _peer(python: str, job: Any, batch: Any) -> float | None:
    """Layouts a CPU second of the peer; None for what it does not model."""
    model = job.model
    if model.is_moe:
        return None
    rows = [batch.row(row) for row in range(0, len(batch), max(len(batch) // PEER_SAMPLE, 1))]
    layouts = [
        {
            "tp": one.tp,
            "pp": one.pp,
            "dp": one.dp_degree * one.cp,
            "zero": one.zero_stage,
            "microbatch": one.micro_batch_size,
            "ac": "FULL" if one.ac == "full" else "NONE",
        }
        for one in rows
    ]
    asked = {
        "model": {
            "name": model.name,
            "num_layers": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "hidden_dim": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_seq_len": job.training.seq_len,
            "num_key_value_heads": model.num_key_value_heads,
            # it takes whole multiples of the hidden size only
            "expansion_ratio": round(model.intermediate_size / model.hidden_size),
        },
        "layouts": layouts,
        "batch": job.training.global_batch_size,
        "seq_len": job.training.seq_len,
    }
    done = subprocess.run(
        [python, "-c", PEER], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return len(layouts) / float(done.stdout.splitlines()[-1])


def beside(revision: str, only: list[str], turns: int) -> dict[str, dict[str, Any]]:
    """Seconds of the plans of an older revision and of this checkout, by name; prints each.

    "then" and "now": the fastest and the median wall seconds, and the least CPU seconds.
    """
    checkouts = {"then": exported(revision), "now": ROOT}
    for checkout in checkouts.values():  # compiles all modules
        run(["recommend", *arguments(next(iter(JOBS.values())))], checkout=checkout)
    found = {}
    for name, job in JOBS.items():
        if only and name not in only:
            continue
        command = ["recommend", *arguments(job), "--json"]
        taken: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
        for _ in range(turns):
            for side, checkout in checkouts.items():
                taken[side].append(run(command, checkout=checkout)[0])
        found[name] = {
            side: {
                "fastest": min(one["wall"] for one in runs),
                "median": statistics.median(one["wall"] for one in runs),
                "cpu": min(one["cpu"] for one in runs),
            }
            for side, runs in taken.items()
        }
        print(beside_line(name, found[name]), flush=True)
    return found


def beside_line(name: str, row: dict[str, dict[str, float]]) -> str:
    """One line of the table of `beside`."""
    then, now = (
        " | ".join(f"{row[side][key]:.3g}" for key in ("fastest", "median", "cpu"))
        for side in ("then", "now")
    )
    return f"| {name} | {then} | {now} | {row['now']['fastest'] / row['then']['fastest']:.2f} |"


def rows(only: list[str], peer: str | None) -> dict[str, dict[str, Any]]:
    """Every row by its name."""
    sizes = ("llama3-70b", "h100-sxm-80gb", "64..16384", 8192, 2048)
    asked: dict[str, Callable[[], dict[str, Any]]] = {
        **{
            name: lambda job=job: recommended(job) | priced(job, peer)  # type: ignore[misc]
            for name, job in JOBS.items()
        },
        SIZES: lambda: recommended(sizes),
        ESTIMATES: estimates,
        ALONE: alone,
        ACCURACY: lambda: run(["accuracy"])[0],
        TWICE: lambda: asked_again([512]),
        OTHER_BATCH: lambda: asked_again([256, 1024, 2048]),
    }
    found = {}
    run(["recommend", *arguments(next(iter(JOBS.values())))])  # compiles all modules
    for name, measure in asked.items():
        if only and name not in only:
            continue
        before = yardstick()
        row = measure()
        row["yardsticks"] = row["wall"] / ((before + yardstick()) / 2.0)
        found[name] = row
        print(line(name, row, {}), flush=True)
    return found


BESIDE_HEAD = (
    "| asked | then: wall s | median | CPU s | now: wall s | median | CPU s | now / then |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)
HEAD = (
    "| asked | wall s | CPU s | peak MB | decided a CPU second | priced a CPU second, sample "
    "| in order | llm-analysis | against last |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def line(name: str, row: dict[str, Any], last: dict[str, dict[str, Any]]) -> str:
    """One line of the table."""

    def count(key: str) -> str:
        return f"{row[key]:,.0f}" if row.get(key) else ""

    ratio = row["yardsticks"] / last[name]["yardsticks"] if name in last else None
    against = "" if ratio is None else f"{ratio:.2f}"
    return (
        f"| {name} | {row['wall']:.3g} | {row['cpu']:.3g} | {row['peak']:,.0f} | "
        f"{count('decided')} | {count('priced')} | {count('through')} | {count('peer')} "
        f"| {against} |"
    )


def main() -> None:
    """Prints the table, and writes it with --write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--beside", metavar="REVISION")
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if given.beside:
        print(BESIDE_HEAD)
        taken = beside(given.beside, given.only, given.turns)
        kept["beside"] = {"revision": given.beside, "turns": given.turns, "rows": taken}
    else:
        last = kept.get("rows", {})
        found = rows(given.only, given.peer)
        print("\n" + "\n".join([HEAD, *(line(name, row, last) for name, row in found.items())]))
        for name, row in found.items():
            if row.get("peer") is None and last.get(name, {}).get("peer"):
                row["peer"] = last[name]["peer"]
        kept |= {"revision": revision_here(), "rows": last | found}
        kept["lines"] = [line(name, row, last) for name, row in kept["rows"].items()]
    if given.write:
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


def revision_here() -> str:
    """The commit of this checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def page(kept: dict[str, Any]) -> str:
    """The page of both tables."""
    parts = [INTRODUCTION.format(revision=kept["revision"]), "\n".join([HEAD, *kept["lines"]])]
    if "beside" in kept:
        than = kept["beside"]
        lines = [beside_line(name, row) for name, row in than["rows"].items()]
        parts += ["", BESIDE.format(**than), "\n".join([BESIDE_HEAD, *lines])]
    return "\n".join(parts) + "\n"


INTRODUCTION = """# Speed

`python benchmarks/speed.py --peer PYTHON --write` prints and writes this table. A plan uses
one core; CPU seconds and peak memory are those of all processes together. Wall and
CPU seconds are from shell to prompt with an empty database and compiled modules, as an installation
leaves them (one that is not editable: its import hook would take part of every command). "Decided"
counts the legal layouts of the job, nearly all by bounds; "priced" is the cost model alone on one
core: a random sample of 100,000 layouts of the whole space, which share little, and the first
million layouts of the space in its order, which is how one would price all.
llm-analysis 0.2.2 prices the sample one by one, dense models only, and counts fewer effects. The
fastest of three counts. The last column divides wall seconds by those of a fixed loop on the same
machine and compares with the table committed before: below 1 is faster. The code was
that of {revision}.
"""
BESIDE = """## Beside an older revision

`python benchmarks/speed.py --beside {revision} --turns {turns} --write` asks the same plans of both
revisions in turns, so that whatever slows the machine slows both. Seconds are those of the machine
that it ran on, which need not be that of the table above; what tells is the last column.
"""

if __name__ == "__main__":
    main()
