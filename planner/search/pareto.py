"""Choosing what to show: layouts that differ in something that matters, and the front of throughput against memory headroom."""

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch

# Fields in which two shown layouts must differ. The rest (schedule, microbatch, ZeRO stage, switches) is tuned for each.
STRUCTURE = ("dp_replicate", "cp", "tp", "pp", "ep", "etp", "ac_kind", "precision")
ROUNDING = 1e-9


def different(batch: LayoutBatch, order: IntColumn, count: int) -> IntColumn:
    """The first `count` rows in this order of which no two share the whole structure, filled up with near copies if short."""
    columns: list[Column] = [getattr(batch, name) for name in STRUCTURE]
    seen: set[tuple[int, ...]] = set()
    chosen: list[int] = []
    for row in order:
        key = tuple(int(column[row]) for column in columns)
        if key not in seen:
            seen.add(key)
            chosen.append(int(row))
            if len(chosen) == count:
                break
    if len(chosen) < count:
        taken = set(chosen)
        chosen += [int(row) for row in order if int(row) not in taken][: count - len(chosen)]
    return np.array(chosen, dtype=np.int64)


def front(step_seconds: FloatColumn, device_bytes: FloatColumn, most: int = 20) -> IntColumn:
    """Rows that no other beats in both step time and memory, fastest first; thinned evenly to `most`."""
    order = np.lexsort((device_bytes, step_seconds))
    lowest = np.minimum.accumulate(device_bytes[order])
    on_front = np.concatenate([[True], device_bytes[order][1:] < lowest[:-1] * (1.0 - ROUNDING)])
    rows = order[on_front]
    if len(rows) > most:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]
    return rows
