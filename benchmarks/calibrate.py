"""Fits the shipped calibration to the measured runs.

    python benchmarks/calibrate.py [--write]      writes planner/catalog/calibrations/shipped.json
    python benchmarks/calibrate.py --keep-knobs [--write]    with the knobs that ship

Prints how the calibration moved, the scales of misses that it found, and its errors on runs that it
has not seen. Takes some ten minutes.
"""

import argparse
import json
import pathlib

import numpy as np
from conformal import memory_coverage, memory_deviation, memory_factors
from map_fit import fit

from planner.calibration.accuracy import Row
from planner.calibration.basis import seen
from planner.calibration.fit import Data, fingerprint
from planner.calibration.held_out import Fitted
from planner.cost.machine.knobs import KNOBS
from planner.cost.machine.shipped import from_document, shipped_calibration, to_document
from planner.estimates import estimate_job
from planner.intake.jobs import read_job

FOLDER = pathlib.Path(__file__).parent
SHIPPED = FOLDER.parent / "planner" / "catalog" / "calibrations" / "shipped.json"


def measured_rows() -> list[dict]:
    """Every published row of training runs in `benchmarks/measured/`."""
    lines = (FOLDER / "measured" / "public.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--afresh", action="store_true", help="begin at the priors, not at what ships"
    )
    parser.add_argument(
        "--keep-knobs", action="store_true", help="fit no knob, only the factors on intervals"
    )
    parser.add_argument("--id", default="public-2026-11-28", help="name of the calibration")
    options = parser.parse_args()
    rows = measured_rows()
    jobs = [read_job(row) for row in rows]
    peaks = [Row(job=job, estimate=estimate_job(job)) for job in jobs]
    legal = [row for row in peaks if row.estimate.valid]
    timed = [(row.job, row.measured_seconds) for row in legal if row.measured_seconds]
    known = {
        "id": options.id,
        "seen": sorted(list(triple) for triple in seen(jobs)),
        "fitted": sorted(fingerprint(job, seconds) for job, seconds in timed),
    }
    if options.keep_knobs:
        document = json.loads(SHIPPED.read_text(encoding="utf-8"))
        _write({**document, **known}, peaks, options.write)
        return
    data = Data.of([job for job, _ in timed], [seconds for _, seconds in timed])
    calibration, linear = fit(data, begin=None if options.afresh else shipped_calibration())
    relative, fixed = memory_deviation(peaks)
    shipped = {**to_document(calibration), **known, "memory_sd": relative, "memory_sd_bytes": fixed}
    for knob in KNOBS:
        found = zip(calibration.keys, calibration.shifts, strict=True)
        moved = {
            scope or "all": f"{shift:+.2f}" for (name, scope), shift in found if name == knob.name
        }
        print(f"{knob.name:22s} prior {knob.prior:.3g} sd {knob.sd}  shifts {moved}")
    error = np.abs(np.expm1(linear.predicted - data.log_seconds))
    print(
        f"step time, {len(error)} runs: {error.mean():.1%} in sample; scales: run "
        f"{calibration.run_sd:.3f}, stack {calibration.stack_sd:.3f}, unit "
        f"{calibration.unit_sd:.3f}"
    )
    print(
        f"memory deviation {relative:.3f} and {fixed / 2**30:.2f} GiB, where those of other "
        f"sources hold {memory_coverage(peaks) or 0.0:.0%} of a unit's peaks"
    )
    _write(shipped, peaks, options.write)


def _write(shipped: dict, peaks: list[Row], write: bool) -> None:
    """Adds the factors on intervals, and writes what ships if asked."""
    again = Fitted.find(peaks, from_document(shipped))
    seconds = {} if again is None else dict(again.interval_factors())
    shipped["interval_factors"] = seconds | memory_factors(peaks)
    print(f"factors on intervals {shipped['interval_factors']}")
    if write:
        SHIPPED.write_text(json.dumps(shipped, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
