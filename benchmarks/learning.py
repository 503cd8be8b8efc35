"""What one more measured run costs, when so many are stored already.

    python benchmarks/learning.py [--runs 25 100 ...] [--again]

Each row fills an empty database with runs of different jobs and layouts on one GPU, then stores one
more, and prints the CPU seconds of both: the first once, the second after every probe and import.
--again: also what a fit takes that prices all runs at each of its steps, in the same process.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from map_fit import fit

from planner.api.calibration.update import update_from_measurements
from planner.api.input.measurements import store_new
from planner.api.settings import Settings
from planner.api.wiring import Wiring, wire
from planner.calibration.fit import Data
from planner.columns import LayoutBatch
from planner.cost.machine.shipped import shipped_calibration
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.specs.measurement import Measured, Measurement

GPU = "h100-sxm-80gb"
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3.1-8b", "qwen3-8b", "llama3-70b")
LENGTHS, SIZES = (2048, 4096, 8192, 16384), (8, 16, 32, 64)
LAYOUTS: tuple[dict[str, Any], ...] = tuple(
    {"ac": ac, "micro_batch_size": size}
    for ac in ("none", "full", "selective-op")
    for size in (1, 2)
)
SLOWER, NOISE = 1.2, 0.03  # of the runs that are made up, against their prediction


def runs(count: int) -> list[Measurement]:
    """Runs of different jobs and layouts, in a mixed order that is the same each time."""
    chance = random.Random(1)
    places = list(itertools.product(MODELS, LENGTHS, SIZES, LAYOUTS))
    chance.shuffle(places)
    found = []
    for number, (model, seq_len, gpus, layout) in enumerate(places[:count]):
        training = {"seq_len": seq_len, "global_batch_size": 4 * gpus}
        cluster = {"gpu": GPU, "num_gpus": gpus}
        job = read_job({"model": model, "cluster": cluster, "training": training, "layout": layout})
        assert job.layout is not None, "a layout was given"
        pricer = Pricer.build(job.model, job.cluster, job.training)
        seconds = float(pricer.price(LayoutBatch.from_layouts([job.layout])).step_seconds[0])
        measured = SLOWER * seconds * float(np.exp(NOISE * chance.gauss(0.0, 1.0)))
        found.append(
            Measurement(
                id=f"run-{number:05d}",
                created_at=f"2026-01-01T{number // 3600:02d}:{number // 60 % 60:02d}:"
                f"{number % 60:02d}+00:00",
                job=job,
                measured=Measured(rung="probed", step_seconds=measured),
                software={"torch": "2.11.0"},
            )
        )
    return found


def learn(wiring: Wiring, measurements: list[Measurement]) -> float:
    """CPU seconds of storing these and learning from them."""
    before = time.process_time()
    kept = store_new(wiring, measurements, asked_by="benchmark", shared=True)
    update_from_measurements(wiring, kept.new)
    return time.process_time() - before


def fit_again(measurements: list[Measurement]) -> float:
    """CPU seconds of a fit that prices all of them at each of its steps."""
    jobs = [one.job for one in measurements]
    seconds = [one.measured.step_seconds or 0.0 for one in measurements]
    before = time.process_time()
    fit(Data.of(jobs, seconds, own=True), shipped_calibration(), own=True)
    return time.process_time() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[25, 100, 400])
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    shipped_calibration()
    print("| stored runs | learnt from all at once | one more run | priced anew each time |")
    print("| ---: | ---: | ---: | ---: |")
    for count in asked.runs:
        made = runs(count + 1)
        with tempfile.TemporaryDirectory() as folder:
            wiring = wire(Settings(database_url=f"sqlite:///{Path(folder) / 'planner.db'}"))
            at_once, more = learn(wiring, made[:-1]), learn(wiring, made[-1:])
            wiring.engine.dispose()
        again = f"{fit_again(made):.1f} s" if asked.again else "-"
        print(f"| {count:,} | {at_once:.1f} s | {more:.2f} s | {again} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
