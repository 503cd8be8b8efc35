"""Error on runs that the calibration has not seen, by repeated fits.

    python benchmarks/leave_one_out.py [--by group|model|gpu|trainer]

Each fit leaves out one source (or model, GPU, trainer). `planner-cli accuracy` gets the same
figures from one linearisation; this checks that shortcut. Takes an hour by group.
"""

import argparse

import numpy as np
from calibrate import measured_rows
from map_fit import fit, take

from planner.calibration.fit import Data, predict
from planner.calibration.linear_model import Scales
from planner.intake.jobs import read_job

KEYS = {
    "group": lambda job: str(job.labels["group"]),
    "model": lambda job: job.model.name,
    "gpu": lambda job: job.cluster.gpu.name,
    "trainer": lambda job: job.training.trainer,
}


def line(name: str, error: np.ndarray, shortcut: np.ndarray) -> str:
    size = np.abs(error)
    return (
        f"{name:34s} {len(error):4d} rows  MAPE {size.mean():6.1%} (linearised "
        f"{np.abs(shortcut).mean():6.1%})  bias {error.mean():+6.1%}  "
        f"median {np.median(size):6.1%}  p90 {np.quantile(size, 0.9):6.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--by", choices=sorted(KEYS), default="group")
    options = parser.parse_args()
    rows = [row for row in measured_rows() if "step_seconds" in row["measured"]]
    jobs = [read_job(row) for row in rows]
    data = Data.of(jobs, [row["measured"]["step_seconds"] for row in rows])
    names = [KEYS[options.by](job) for job in jobs]
    labels, complete = np.array(names), np.array([bool(row.get("complete")) for row in rows])
    calibration, linear = fit(data)
    scales = Scales(run=calibration.run_sd, stack=calibration.stack_sd, unit=calibration.unit_sd)
    folds = [labels == label for label in sorted(set(names))]
    shortcut = np.expm1(linear.left_out(folds, scales)[0] - data.log_seconds)
    error = np.full(len(jobs), np.nan)
    for label in sorted(set(names)):
        out = labels == label
        held = take(data, out)
        error[out] = np.expm1(predict(held, fit(take(data, ~out))[0]) - held.log_seconds)
        print(line(f"{options.by} {label}", error[out], shortcut[out]), flush=True)
    print(line("complete rows", error[complete], shortcut[complete]))
    print(line("all rows, left out", error, shortcut))


if __name__ == "__main__":
    main()
