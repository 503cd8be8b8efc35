"""Fits the shipped calibration to the measured runs.

    python benchmarks/calibrate.py [--write]      writes planner/catalog/calibrations/shipped.json

Prints how the calibration moved, and its errors on runs that it has not seen. The time intervals
are stretched by what covers 90% of the runs left out by source (`planner.calibration.conformal`).
Takes two minutes.
"""

import argparse
import json
import pathlib

import numpy as np

from planner.calibration.accuracy import Row
from planner.calibration.basis import seen
from planner.calibration.conformal import memory_coverage, memory_deviation, stretches
from planner.calibration.fit import Data, fingerprint, fit
from planner.cost.machine.knobs import KNOBS
from planner.cost.machine.shipped import to_document
from planner.estimates import estimate_job
from planner.intake.jobs import read_job

FOLDER = pathlib.Path(__file__).parent
SHIPPED = FOLDER.parent / "planner" / "catalog" / "calibrations" / "shipped.json"


def measured_rows() -> list[dict]:
    """Every measured row of training runs in `benchmarks/measured/`."""
    return [
        json.loads(line)
        for path in sorted((FOLDER / "measured").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--id", default="public-2026-11-21", help="name of the calibration")
    options = parser.parse_args()
    rows = measured_rows()
    jobs = [read_job(row) for row in rows]
    timed = [
        (job, row["measured"]["step_seconds"])
        for job, row in zip(jobs, rows, strict=True)
        if "step_seconds" in row["measured"]
    ]
    data = Data.of([job for job, _ in timed], [seconds for _, seconds in timed])
    calibration, linear = fit(data)
    log_seconds, deviation = linear.left_out(data.sources)
    trainers = [job.training.trainer for job, _ in timed]
    factors = stretches(np.abs(log_seconds - data.log_seconds) / deviation, trainers, data.sources)
    peaks = [Row.build(job, estimate_job(job)) for job in jobs]
    relative, fixed = memory_deviation(peaks)
    shipped = {
        **to_document(calibration),
        "id": options.id,
        "time_factor": factors,
        "memory_sd": relative,
        "memory_sd_bytes": fixed,
        "seen": sorted(list(triple) for triple in seen(jobs)),
        "fitted": sorted(fingerprint(job, seconds) for job, seconds in timed),
    }
    for knob in KNOBS:
        found = zip(calibration.keys, calibration.shifts, strict=True)
        moved = {
            scope or "all": f"{shift:+.2f}" for (name, scope), shift in found if name == knob.name
        }
        print(f"{knob.name:22s} prior {knob.prior:.3g} sd {knob.sd}  shifts {moved}")
    error = np.expm1(linear.predicted - data.log_seconds)
    out = np.expm1(log_seconds - data.log_seconds)
    print(
        f"step time, {len(error)} runs: MAPE {np.abs(out).mean():.1%} left out by source, "
        f"{np.abs(error).mean():.1%} in sample"
    )
    print(
        f"stretch of intervals {factors}; memory deviation {relative:.3f} and {fixed / 2**30:.2f} "
        f"GiB, where those of other sources hold {memory_coverage(peaks) or 0.0:.0%} of a unit's peaks"
    )
    if options.write:
        SHIPPED.write_text(json.dumps(shipped, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
