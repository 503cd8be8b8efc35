"""Error on runs that the calibration has not seen: leave one group (or model, GPU, trainer) out, fit the rest, predict what was left out.

    python benchmarks/leave_one_out.py [--by group|model|gpu|trainer] [--json OUT]

Starts from priors that do not know the runs (`planner.calibration.fit.KNOBS`), not from the shipped profiles.
"""

import argparse
import json
import pathlib

import numpy as np

from planner.calibration.fit import Data, fit, predict, predictive_sd
from planner.specs.job import Job

ROWS = pathlib.Path(__file__).parent / "measured" / "public.jsonl"
KEYS = {
    "group": lambda job: str(job.labels["group"]),
    "model": lambda job: job.model.name,
    "gpu": lambda job: job.cluster.gpu.name,
    "trainer": lambda job: job.training.trainer,
}


def line(name: str, error: np.ndarray, inside: np.ndarray) -> str:
    size = np.abs(error)
    return (
        f"{name:34s} {len(error):4d} rows  MAPE {size.mean():6.1%}  bias {error.mean():+6.1%}  median {np.median(size):6.1%}  "
        f"p90 {np.quantile(size, 0.9):6.1%}  in 90% {inside.mean():4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=sorted(KEYS), default="group")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = [row for text in ROWS.read_text().splitlines() if "step_seconds" in (row := json.loads(text))["measured"]]
    jobs = [Job.from_user(row) for row in rows]
    data = Data.of(jobs, [row["measured"]["step_seconds"] for row in rows])
    labels = np.array([KEYS[options.by](job) for job in jobs])
    complete = np.array([bool(row["complete"]) for row in rows])
    error, sd = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
    for label in sorted(set(labels)):
        out = labels == label
        calibration = fit(data.take(~out))
        held = data.take(out)
        error[out] = np.expm1(predict(held, calibration) - held.log_seconds)
        sd[out] = predictive_sd(held, calibration)
    inside = np.abs(np.log1p(error)) <= 1.645 * sd
    for label in sorted(set(labels), key=lambda label: -int((labels == label).sum())):
        print(line(f"{options.by} {label}", error[labels == label], inside[labels == label]))
    print(line("complete rows", error[complete], inside[complete]))
    print(line("all rows, left out", error, inside))
    everything = fit(data)
    seen = np.expm1(predict(data, everything) - data.log_seconds)
    print(line("all rows, in sample", seen, np.abs(np.log1p(seen)) <= 1.645 * predictive_sd(data, everything)))
    if options.json:
        figures = {"by": options.by, "mape": float(np.abs(error).mean()), "mape_complete": float(np.abs(error[complete]).mean())}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
