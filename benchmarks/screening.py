"""How fast and how accurate the screen is.

    python benchmarks/screening.py [--runs N] [--sample N]

Speed: layouts per second on one core, along a search's whole path from a cell (expansion, slicing,
pricing of time and memory, probability of running out of memory).
Accuracy: Spearman correlation of screened with simulated step times over random legal layouts, and
the place among the screened of the layout that is best once the first FIRST are simulated.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":  # before NumPy starts its threads
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    )

import numpy as np

from planner.calibration.intervals import oom_probability
from planner.columns import LayoutBatch
from planner.cost.chunks import CHUNK
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.schedules import SCHEDULES
from planner.search.screen import Goal
from planner.search.space.enumerate import Space, build_space
from planner.search.space_search import screen

JOBS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "8B on 8": ("llama3.1-8b", 8, {"seq_len": 8192, "global_batch_size": 128}),
    "70B on 256": ("llama3.1-70b", 256, {"seq_len": 8192, "global_batch_size": 512}),
    "405B on 512": ("llama3.1-405b", 512, {"seq_len": 8192, "global_batch_size": 512}),
}
FIRST, MOST_PRICED, TOP_K = 1000, 400_000, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Faithfulness:
    """How well the screen agrees with the simulation.

    spearman: over the sample.
    by_schedule: over the pipelined layouts of each schedule.
    winner_place: 0 is the first screened.
    winner_gain: simulated step of the first screened over that of the simulated winner, minus one.
    top_spearman: over the `first` screened.
    """

    spearman: float
    top_spearman: float
    by_schedule: dict[str, tuple[int, float, float]]
    sample: int
    winner_place: int
    winner_gain: float


def prepared(name: str) -> tuple[Pricer, Space]:
    """Pricer and space of one of JOBS, on H100s."""
    model, num_gpus, training = JOBS[name]
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus})
    pricer = Pricer.build(read_model(model), cluster, read_training(training))
    return pricer, build_space(pricer.rules_context)


def priced_a_second(pricer: Pricer, space: Space) -> tuple[int, float, float]:
    """(layouts, layouts per second of processor time, of wall time).

    Goes cell after cell in the space's order, in rounds as a search does. Processor time is what a
    core does without interruption; wall time is what happened here.
    """
    sizes = np.cumsum(space.cell_sizes)
    num_cells = int(np.searchsorted(sizes, MOST_PRICED)) + 1
    started, started_wall, count = time.process_time(), time.perf_counter(), 0
    ends = np.searchsorted(
        sizes[:num_cells],
        np.arange(CHUNK, sizes[min(num_cells, len(sizes)) - 1] + CHUNK, CHUNK),
        side="right",
    )
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        if last <= first:
            continue
        batch = space.expand(slice(int(first), int(last)))
        for start in range(0, len(batch), CHUNK):
            part = batch.take(slice(start, start + CHUNK))
            oom_probability(pricer.profile, pricer.cluster, pricer.price(part).device_bytes)
        count += len(batch)
    return (
        count,
        count / (time.process_time() - started),
        count / (time.perf_counter() - started_wall),
    )


def random_layouts(space: Space, count: int, seed: int) -> LayoutBatch:
    """Distinct layouts of the space, each as likely as any other."""
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(space.num_layouts, min(count, space.num_layouts), replace=False))
    ends = np.cumsum(space.cell_sizes)
    cells = np.searchsorted(ends, chosen, side="right")
    distinct, place = np.unique(cells, return_inverse=True)
    sizes = space.cell_sizes[distinct]
    starts = np.cumsum(sizes) - sizes
    inside = chosen - (ends[cells] - space.cell_sizes[cells])
    return space.expand(distinct).take(starts[place] + inside)


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order; ties share their mean place."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2.0)[inverse]


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation; 1 if nothing varies."""
    a, b = ranks(first), ranks(second)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 1.0


def faithfulness(
    pricer: Pricer, space: Space, sample: int, first: int = FIRST, seed: int = 0
) -> Faithfulness:
    """Compares screened with simulated times of random layouts, and at the top of the screen."""
    batch = random_layouts(space, sample, seed)
    prices = pricer.price(batch)
    simulated = refine(pricer, batch, prices).step_seconds
    piped = batch.pp > 1
    by_schedule = {}
    for code, schedule in enumerate(SCHEDULES):
        rows = piped & (batch.pp_schedule == code)
        if rows.sum() > 2:
            error = np.abs(prices.step_seconds[rows] / simulated[rows] - 1.0)
            by_schedule[schedule] = (
                int(rows.sum()),
                spearman(prices.step_seconds[rows], simulated[rows]),
                float(error.mean()),
            )
    found = screen(pricer, space, Goal(count=TOP_K, keep=first))
    best = found.batch.take(slice(0, min(first, int((found.oom <= 0.05).sum()))))
    best_prices = pricer.price(best)
    best_simulated = refine(pricer, best, best_prices).step_seconds
    place = int(np.argmin(best_simulated))
    return Faithfulness(
        spearman=spearman(prices.step_seconds, simulated),
        top_spearman=spearman(best_prices.step_seconds, best_simulated),
        by_schedule=by_schedule,
        sample=len(batch),
        winner_place=place,
        winner_gain=float(best_simulated[0] / best_simulated[place] - 1.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="the median of this many timed runs is printed"
    )
    parser.add_argument("--sample", type=int, default=500, help="random layouts simulated a job")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name in JOBS:
        pricer, space = prepared(name)
        runs = [priced_a_second(pricer, space) for _ in range(options.runs)]
        rates = sorted(rate for _, rate, _ in runs)
        wall = statistics.median(rate for *_, rate in runs)
        print(f"{name}: {space.num_layouts:,} layouts in {len(space.cells):,} cells")
        print(
            f"  {statistics.median(rates):,.0f} layouts/s of one core ({rates[0]:,.0f} to "
            f"{rates[-1]:,.0f}; {runs[0][0]:,} priced)"
        )
        print(f"  {wall:,.0f} layouts/s by the wall clock")
        f = faithfulness(pricer, space, options.sample)
        print(
            f"  Spearman {f.spearman:.4f} of screened against simulated on {f.sample} random "
            "layouts"
        )
        for schedule, (count, correlation, error) in f.by_schedule.items():
            print(
                f"    {schedule:22s} {count:4d} layouts  Spearman {correlation:.4f}  mean error "
                f"{error:.2%}"
            )
        print(
            f"  simulated winner of the first {FIRST}: number {f.winner_place + 1} screened, "
            f"{f.winner_gain:.2%} faster than number 1"
        )
        print(f"  Spearman {f.top_spearman:.4f} over those {FIRST}")


if __name__ == "__main__":
    main()
