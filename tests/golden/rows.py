"""Published rows of `benchmarks/measured`: runs, each with our estimate, and timings of kernels."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

from planner.calibration.accuracy import Row
from planner.estimates import estimate_job
from planner.intake.jobs import read_job

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"
PUBLIC = MEASURED / "public.jsonl"


@cache
def published() -> dict[str, dict[str, Any]]:
    """Every row as written, by id."""
    return {row["id"]: row for row in map(json.loads, PUBLIC.read_text().splitlines())}


@cache
def row(row_id: str) -> Row:
    job = read_job(published()[row_id])
    return Row(job=job, estimate=estimate_job(job))


def ids(*groups: str) -> list[str]:
    return [row_id for row_id in published() if row_id.split("-")[0] in groups]


def step_error(row_id: str) -> float:
    """Predicted over measured step seconds, minus one."""
    found = row(row_id)
    assert found.estimate.valid, (row_id, found.estimate.violations)

    return found.estimate.step_seconds / found.measured_seconds - 1.0


def timings(what: str, gpu: str | None = None) -> list[dict[str, str]]:
    """Rows of micro.csv that measured this, on this GPU or on any."""
    rows = csv.DictReader((MEASURED / "micro.csv").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["what"].startswith(what) and gpu in (None, row["gpu"])]
