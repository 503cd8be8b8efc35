"""The queue of probes in SQL; see `api.storage.queue` for leases and fencing."""

from dataclasses import asdict
from typing import Any

from sqlalchemy.orm import Session

from api.storage.common import flush_new, plain_text
from api.storage.measurements import measurement_row
from api.storage.queue import SqlQueue
from api.storage.records import ProbeEnd, ProbeFilter, ProbeRecord
from api.storage.tables import ProbeRow


class SqlProbeStore(SqlQueue[ProbeRecord, ProbeFilter, ProbeEnd]):
    """Probes; their measurements are stored with their end."""

    row_class, record_class, filter_class = ProbeRow, ProbeRecord, ProbeFilter
    what, where = "probe", "GET /probes"

    def _values(self, record: ProbeRecord) -> dict[str, Any]:
        values = asdict(record)
        texts = {key: plain_text(values[key]) for key in ("model", "gpu", "layout", "pool")}
        return {**values, **texts, "request": dict(record.request), "results": list(record.results)}

    def _end_values(self, session: Session, end: ProbeEnd) -> dict[str, Any]:
        session.add_all(measurement_row(measurement) for measurement in end.measurements)
        flush_new(session, ", ".join(measurement.id for measurement in end.measurements[:3]))
        return {
            "results": [dict(result) for result in end.results],
            "measurement_id": end.measurements[0].id if end.measurements else None,
        }

    def _record(self, row: ProbeRow) -> ProbeRecord:
        record = super()._record(row)
        return ProbeRecord(**{**vars(record), "results": tuple(record.results)})
