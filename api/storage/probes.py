"""The queue of probes in SQL; see `planner.api.storage.queue` for leases and fencing."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from planner.api.storage.common import flush_new, plain_text, values_of
from planner.api.storage.fence import Fence
from planner.api.storage.job_records import ProbeEnd, ProbeFilter, ProbeRecord
from planner.api.storage.measurements import measurement_row
from planner.api.storage.queue import SqlQueue
from planner.api.storage.tables import ProbeRow

MOST_RANKS = 3  # that an emulation runs, one after the other


def most_gpu_seconds(request: Mapping[str, Any], num_gpus: int) -> float:
    """GPU-seconds that a probe uses at most: its time limit, on its GPUs, for all its runs."""
    times = MOST_RANKS if request.get("emulate") else num_gpus
    return float(request["time_limit_seconds"]) * times


def gpu_seconds_of(record: ProbeRecord) -> float:
    """GPU-seconds that a probe used, by its runs' own account.

    Without results: from its start to its end, at most its time limit, because the end of a
    crashed owner is noticed late.
    """
    if record.results or record.started_at is None or record.finished_at is None:
        return sum(float(result["gpu_seconds"]) for result in record.results)
    most = most_gpu_seconds(record.request, record.num_gpus)
    gpus = 1 if record.request.get("emulate") else record.num_gpus
    return min((record.finished_at - record.started_at).total_seconds() * gpus, most)


class SqlProbeStore(SqlQueue[ProbeRecord, ProbeFilter, ProbeEnd]):
    """Probes; their measurements are stored with their end."""

    record_class, filter_class = ProbeRecord, ProbeFilter
    fence = Fence(ProbeRow, "probe", "GET /probes")

    def _values(self, record: ProbeRecord) -> dict[str, Any]:
        values = values_of(record)
        texts = {key: plain_text(values[key]) for key in ("model", "gpu", "layout", "pool")}
        return {**values, **texts}

    def _end_values(self, session: Session, claimed: ProbeRecord, end: ProbeEnd) -> dict[str, Any]:
        session.add_all(measurement_row(measurement) for measurement in end.measurements)
        flush_new(session, ", ".join(measurement.id for measurement in end.measurements[:3]))
        return {
            "results": [dict(result) for result in end.results],
            "measurement_id": end.measurements[0].id if end.measurements else None,
        }

    def _used_gpu_seconds(self, record: ProbeRecord, end: ProbeEnd) -> float | None:
        return gpu_seconds_of(record) if "time_limit_seconds" in record.request else None

    def _record(self, row: ProbeRow) -> ProbeRecord:
        record = super()._record(row)
        return ProbeRecord(**{**vars(record), "results": tuple(record.results)})
