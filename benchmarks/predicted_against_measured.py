"""Predicted against measured on one's own GPU: the rows that `gpu_survey.py` wrote.

    python benchmarks/predicted_against_measured.py [ROWS.jsonl ...] [--json OUT] [--markdown]

Step time of real runs is predicted twice: as shipped, and after calibration on the other half of
the grid. The grid is halved by every second run in the order of its names; the calibration fitted
to one half predicts the other half. Emulated ranks have no communication: they are compared with
the predicted compute, recomputation and optimizer step, and their memory with that of their
pipeline rank. Goals: 8% of step time after calibration, 3% of allocated memory.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from map_fit import fit, take

from planner.calibration.fit import Data
from planner.cost.machine.shipped import shipped_calibration
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.specs.estimate import Estimate
from planner.units import GIB

MEASURED = Path(__file__).parent / "measured"
TIME_GOAL, MEMORY_GOAL = 0.08, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table. Seconds and bytes; None if not measured or not predicted.

    calibrated_seconds: by the calibration on the other half of the grid; None for emulated ranks
        and for what did not run.
    """

    id: str
    emulated: bool
    status: str
    measured_seconds: float | None
    predicted_seconds: float | None
    calibrated_seconds: float | None
    measured_allocated: float | None
    predicted_allocated: float | None
    measured_reserved: float | None
    predicted_reserved: float | None
    predicted_fits: bool | None


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows of these files; of rows with one name, the last."""
    rows = {
        row["id"]: row
        for path in paths
        for text in path.read_text().splitlines()
        if text.strip()
        for row in [json.loads(text)]
    }
    return [rows[name] for name in sorted(rows)]


def line_of(row: dict[str, Any]) -> Line:
    """A row and its estimate as shipped."""
    estimate, measured = estimate_job(read_job(row)), row["measured"]
    emulated = measured.get("rung") == "emulated"
    stage = measured.get("pipeline_rank", 0) if emulated else None
    allocated, reserved = memory_of(estimate, stage)
    return Line(
        id=row["id"],
        emulated=emulated,
        status=measured["status"],
        measured_seconds=measured.get("step_seconds"),
        predicted_seconds=busy_seconds(estimate) if emulated else estimate.step_seconds,
        calibrated_seconds=None,
        measured_allocated=measured.get("peak_allocated_bytes"),
        predicted_allocated=allocated,
        measured_reserved=measured.get("peak_reserved_bytes"),
        predicted_reserved=reserved,
        predicted_fits=estimate.fits,
    )


def busy_seconds(estimate: Estimate) -> float | None:
    """The time that a rank works by itself in a step: no communication, no bubble."""
    parts = estimate.time
    return (
        None
        if parts is None
        else parts.compute_seconds
        + parts.host_seconds
        + parts.recompute_seconds
        + parts.optimizer_seconds
        + parts.other_seconds
    )


def memory_of(estimate: Estimate, stage: int | None) -> tuple[float | None, float | None]:
    """Predicted (allocated, reserved) bytes of one pipeline rank, or of the worst one."""
    if stage is None or estimate.memory is None:
        return estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    held = estimate.memory.stages[stage]
    return held.peak_allocated_bytes, held.peak_reserved_bytes


def calibrated(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Step seconds of the real runs, predicted by a calibration on their other half.

    It starts from the shipped calibration; what the other half shows of this machine's stack stays
    in it.
    """
    real = [
        row
        for row in rows
        if row["measured"].get("rung") != "emulated" and row["measured"].get("step_seconds")
    ]
    if len(real) < 4:
        return {}
    jobs = [read_job(row) for row in real]
    data = Data.of(jobs, [row["measured"]["step_seconds"] for row in real], own=True)
    half = np.arange(len(real)) % 2 == 0
    seconds = np.zeros(len(real))
    for taught in (half, ~half):
        calibration, _ = fit(take(data, taught), shipped_calibration(), own=True)
        for row in np.flatnonzero(~taught):
            seconds[row] = estimate_job(jobs[row], calibration).step_seconds or np.nan
    return {row["id"]: float(value) for row, value in zip(real, seconds, strict=True)}


def table(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """All rows, real runs first, as shipped and calibrated."""
    taught = calibrated(rows)
    lines = [replace(line_of(row), calibrated_seconds=taught.get(row["id"])) for row in rows]
    return sorted(lines, key=lambda line: (line.emulated, line.id))


# ---- on the screen -------------------------------------------------------------------------------


def error(predicted: float | None, measured: float | None) -> float | None:
    """Relative error, with its sign; None if one of the two is missing."""
    return predicted / measured - 1.0 if predicted and measured else None


def shown(lines: Sequence[Line], *, markdown: bool) -> list[str]:
    """The table as text."""
    head = [
        "run",
        "measured s",
        "shipped",
        "calibrated",
        "allocated GiB",
        "predicted",
        "reserved GiB",
        "predicted",
    ]
    body = [head, *(cells(line) for line in lines)]
    if markdown:
        return [
            "| " + " | ".join(row) + " |"
            for row in [body[0], ["---", *["---:"] * (len(head) - 1)], *body[1:]]
        ]
    widths = [max(len(row[place]) for row in body) for place in range(len(head))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in body]
    return [
        "  ".join([row[0].ljust(widths[0]), *right[1:]])
        for row, right in zip(body, aligned, strict=True)
    ]


def cells(line: Line) -> list[str]:
    """One row: measured numbers, and the errors of the predictions."""
    if line.status != "ok":
        said = {True: "predicted to fit", False: "predicted not to fit", None: "not predicted"}[
            line.predicted_fits
        ]
        return [
            line.id,
            line.status,
            said,
            "-",
            "-",
            gib(line.predicted_allocated),
            "-",
            gib(line.predicted_reserved),
        ]
    return [
        line.id,
        "-" if line.measured_seconds is None else f"{line.measured_seconds:.4f}",
        percent(error(line.predicted_seconds, line.measured_seconds)),
        percent(error(line.calibrated_seconds, line.measured_seconds)),
        gib(line.measured_allocated),
        percent(error(line.predicted_allocated, line.measured_allocated)),
        gib(line.measured_reserved),
        percent(error(line.predicted_reserved, line.measured_reserved)),
    ]


def gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def summary(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Errors by quantity: rows, mean and worst size, bias."""
    real, ranks = (
        [line for line in lines if not line.emulated],
        [line for line in lines if line.emulated],
    )
    pairs = {
        "step time of real runs, as shipped": [
            (line.predicted_seconds, line.measured_seconds) for line in real
        ],
        "step time of real runs, calibrated on the other half": [
            (line.calibrated_seconds, line.measured_seconds) for line in real
        ],
        "busy time of emulated ranks, as shipped": [
            (line.predicted_seconds, line.measured_seconds) for line in ranks
        ],
        "allocated memory of real runs": [
            (line.predicted_allocated, line.measured_allocated) for line in real
        ],
        "allocated memory of emulated ranks": [
            (line.predicted_allocated, line.measured_allocated) for line in ranks
        ],
        "reserved memory of all": [
            (line.predicted_reserved, line.measured_reserved) for line in lines
        ],
    }
    found = {}
    for name, members in pairs.items():
        errors = np.array(
            [
                value
                for predicted, measured in members
                if (value := error(predicted, measured)) is not None
            ]
        )
        if len(errors):
            size = np.abs(errors)
            found[name] = {
                "rows": len(errors),
                "mean": float(size.mean()),
                "worst": float(size.max()),
                "bias": float(errors.mean()),
            }
    return found


def verdicts(lines: Sequence[Line], figures: dict[str, dict[str, float]]) -> list[str]:
    """The goals, and how well out-of-memory was predicted."""
    goals = (
        ("step time of real runs, calibrated on the other half", TIME_GOAL),
        ("allocated memory of emulated ranks", MEMORY_GOAL),
    )
    said = [
        f"goal {goal:.0%}: {name}: {'met' if figures[name]['mean'] <= goal else 'missed'}"
        for name, goal in goals
        if name in figures
    ]
    ended = [
        line for line in lines if line.status in ("ok", "oom") and line.predicted_fits is not None
    ]
    right = sum(line.predicted_fits == (line.status == "ok") for line in ended)
    return [*said, f"out of memory or not: {right} of {len(ended)} foreseen"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows",
        nargs="*",
        type=Path,
        help="files of rows; benchmarks/measured/*.runs.jsonl unless given",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows = read(options.rows or sorted(MEASURED.glob("*.runs.jsonl")))
    if not rows:
        raise SystemExit("no rows: run benchmarks/gpu_survey.py on a machine with a GPU first")
    lines = table(rows)
    figures = summary(lines)
    print("\n".join(shown(lines, markdown=options.markdown)), end="\n\n")
    for name, values in figures.items():
        print(
            f"{name}: {values['rows']} rows, mean {values['mean']:.1%}, worst "
            f"{values['worst']:.1%}, bias {values['bias']:+.1%}"
        )
    print("\n".join(verdicts(lines, figures)))
    if options.json:
        options.json.write_text(
            json.dumps({"summary": figures, "rows": [asdict(line) for line in lines]}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
