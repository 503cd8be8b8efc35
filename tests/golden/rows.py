"""Published rows of `benchmarks/measured/public.jsonl`, each with our estimate."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from planner.calibration.accuracy import Row
from planner.estimates import estimate_job
from planner.intake.jobs import read_job

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "measured" / "public.jsonl"


@cache
def published() -> dict[str, dict[str, Any]]:
    """Every row as written, by id."""
    return {row["id"]: row for row in map(json.loads, PUBLIC.read_text().splitlines())}


@cache
def row(row_id: str) -> Row:
    job = read_job(published()[row_id])
    return Row.build(job, estimate_job(job))


def ids(*groups: str) -> list[str]:
    return [row_id for row_id in published() if row_id.split("-")[0] in groups]


def step_error(row_id: str) -> float:
    """Predicted over measured step seconds, minus one."""
    found = row(row_id)
    assert found.estimate.valid, (row_id, found.estimate.violations)

    return found.estimate.step_seconds / found.measured_seconds - 1.0
