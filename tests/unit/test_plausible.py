"""What a run cannot have measured, and that every published run can be."""

import json
from typing import Any

import pytest

from planner.calibration.plausible import implausible, least_step_seconds
from planner.intake.jobs import read_job
from planner.intake.measurements import read_measurement
from planner.specs.measurement import Measured, Measurement
from tests.conftest import ROOT, job_values

ROWS = ROOT / "benchmarks" / "measured" / "public.jsonl"
JOB = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 16, layout={"ac": "full"})
DAY = "2026-01-01T00:00:00+00:00"
TOKENS_PER_GPU = 8192 * 16 / 8


def reasons(cluster: dict[str, Any] | None = None, **numbers: Any) -> str:
    job = read_job({**JOB, "cluster": cluster or JOB["cluster"]})
    measured = Measured.model_validate({"rung": "probed", **numbers})
    return "; ".join(implausible(Measurement(id="m", created_at=DAY, job=job, measured=measured)))


def test_every_published_run_can_be() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    runs = [read_measurement(row, measurement_id=row["id"], created_at=DAY) for row in rows]
    assert len(runs) > 600
    assert [(run.id, why) for run in runs if (why := implausible(run))] == []


def test_the_least_step_is_the_matrices_at_the_peak() -> None:
    """6 x 7.5 billion x 131,072 tokens over 8 x 989.4 TFLOP/s, with clocks a tenth above."""
    job = read_job({**JOB, "layout": {}})
    parameters = 8_030_261_248 - 128_256 * 4096
    seconds = 6 * parameters * 131_072 / (8 * 989.4e12 * 1.1)
    assert least_step_seconds(job) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(("numbers", "word"), [
    ({"step_seconds": 1e-6}, "faster than"),
    ({"tokens_per_second_per_gpu": 1e9}, "faster than"),
    ({"step_seconds": 0.0}, "no time"),
    ({"step_seconds": 2.0, "tokens_per_second_per_gpu": 5000}, "a step has 131072"),
    ({"step_seconds": 2.0, "steps": 0}, "steps=0"),
    ({"status": "oom", "peak_reserved_bytes": 120e9}, "more than the 79.2 GiB"),
    ({"step_seconds": 2.0, "device_bytes": 120e9}, "more than the 79.2 GiB"),
    ({"step_seconds": 2.0, "peak_allocated_bytes": 60e9, "peak_reserved_bytes": 40e9}, "more than"),
])  # fmt: skip
def test_what_cannot_be_is_named(numbers: dict[str, Any], word: str) -> None:
    assert word in reasons(**numbers)


@pytest.mark.parametrize("numbers", [
    {"step_seconds": 2.0},
    {"step_seconds": 2.0, "tokens_per_second_per_gpu": TOKENS_PER_GPU / 2.1},
    {"status": "oom"},
    {"status": "failed", "failure": "hang"},
    {"rung": "emulated", "step_seconds": 0.4, "tokens_per_second_per_gpu": 1.0},
    # the CPU pool has no stated limits
    {"cluster": {"gpu": "cpu", "num_gpus": 8}, "step_seconds": 1e-3, "device_bytes": 64e9},
])  # fmt: skip
def test_what_can_be_is_believed(numbers: dict[str, Any]) -> None:
    assert reasons(**numbers) == ""
