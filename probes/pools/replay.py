"""The pool of recordings: tests and shows everything above a pool without a GPU.

A recording answers a task with the same model, cluster, training, layout, trainer, device and
rank. Several recordings of one task are returned in turn, so repeated probes are as noisy as they
really were.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from planner.errors import ProbeError, SpecError
from planner.intake.measurements import read_measurement
from planner.probes.launch import Watch
from planner.probes.pools.protocol import UNLIMITED, Capacity, Pool, PoolSettings
from planner.probes.protocol import (
    Environment,
    Failed,
    FailureKind,
    MeasuredRun,
    Outcome,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
    RankMemory,
    device_of,
)
from planner.specs.cluster import ClusterSpec
from planner.specs.measurement import Measured, Measurement


class ReplayPool(Pool):
    """Looks results up instead of measuring. Raises ProbeError for a task without a recording."""

    reads_files: ClassVar[bool] = True

    def __init__(self, recordings: Iterable[ProbeResult]) -> None:
        self._recorded: dict[str, list[ProbeResult]] = defaultdict(list)
        self._given: dict[str, int] = defaultdict(int)
        for result in recordings:
            self._recorded[_key(result.task)].append(result)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Reads lines of JSON: results of probes, or rows of measurements. Raises ProbeError."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            text = f"{path}: recordings cannot be read ({why}); give a .jsonl file"
            raise ProbeError(text) from None
        found = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    found.append(read_recording(json.loads(line), f"{path.stem}-{number}"))
                except (ValueError, ValidationError, SpecError) as error:
                    rule = "is neither a probe's result nor a measured row"
                    first = str(error).splitlines()[0]
                    raise ProbeError(f"{path}, line {number}: {rule} ({first})") from None
        return cls(found)

    @classmethod
    def open(cls, settings: PoolSettings, option: str | None) -> Self:
        """The recordings of a file, whose path is the option. Raises ProbeError."""
        assert option is not None, "the registry asks for a file"
        return cls.from_file(Path(option))

    def capacity(self, cluster: ClusterSpec) -> Capacity:
        """As many devices as any recording had, and no new measurement."""
        device = device_of(cluster)
        return Capacity(num_devices=UNLIMITED, device=device, spans_nodes=True, measures=False)

    def run(self, task: ProbeTask, watch: Watch | None = None) -> ProbeResult:
        """The next recording of this task, under its id."""
        key = _key(task)
        recorded = self._recorded.get(key)
        if not recorded:
            layout = task.parsed().layout
            raise ProbeError(
                f"no recording of {layout.short() if layout else 'this task'}; record it on a "
                "GPU, or probe another layout"
            )
        result = recorded[self._given[key] % len(recorded)]
        self._given[key] += 1
        notes = [*result.notes, f"replayed from {result.task.id}"]
        return result.model_copy(update={"task": task, "notes": notes})


def _key(task: ProbeTask) -> str:
    key = Measurement(id=task.id, created_at="", job=task.parsed(), measured=Measured()).key()
    how = (task.trainer, task.device, task.emulate_rank, task.fake_tensors)
    return repr((key.job_hash, key.layout_hash, *how))


def read_recording(values: Mapping[str, Any], name: str) -> ProbeResult:
    """Reads a result from its own JSON or a measured row. Raises ValueError, SpecError."""
    if "outcome" in values:
        return ProbeResult.model_validate(values)
    measurement = read_measurement(
        values, measurement_id=name, created_at="1970-01-01T00:00:00+00:00"
    )
    row = measurement.as_row()
    job = {key: value for key, value in row.items() if key not in ("measured", "source")}
    task = ProbeTask(id=name, job=job, device=device_of(measurement.job.cluster))
    software: dict[str, Any] = {
        name: measurement.software.get(name) for name in ("torch", "gpu_name", "cuda")
    }
    seconds = measurement.measured.gpu_seconds or 0.0
    return ProbeResult(
        task=task,
        outcome=_outcome(measurement),
        environment=Environment(python="", **software),
        started_at=measurement.created_at,
        wall_seconds=seconds / task.num_processes(),
        gpu_seconds=seconds,
        notes=[f"measured: {measurement.source}"],
    )


def _outcome(measurement: Measurement) -> Outcome:
    numbers = measurement.measured
    if numbers.status == "oom":
        text = numbers.message or "out of memory"
        return OutOfMemory(rank=0, message=text)
    if numbers.status == "failed":
        named = numbers.failure
        kind = FailureKind(named) if named in set(FailureKind) else FailureKind.CRASH
        return Failed(kind=kind, message=numbers.message or "failed")
    memory = RankMemory(
        rank=0,
        peak_allocated_bytes=_whole(numbers.peak_allocated_bytes),
        peak_reserved_bytes=_whole(numbers.peak_reserved_bytes),
        device_used_bytes=_whole(numbers.device_bytes),
    )
    return MeasuredRun(
        step_seconds=numbers.step_seconds,
        step_seconds_each=[] if numbers.step_seconds is None else [numbers.step_seconds],
        tokens_per_second_per_gpu=numbers.tokens_per_second_per_gpu,
        memory=[memory],
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
