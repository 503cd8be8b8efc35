"""Chooses what to show: layouts that really differ, and a Pareto front.

The front is that of throughput against memory headroom.
"""

import numpy as np

from planner.columns import Column, FloatColumn, IntColumn, LayoutBatch

# Fields in which two shown layouts must differ. The rest (schedule, microbatch, ZeRO stage,
# switches) is tuned for each.
STRUCTURE = ("cp", "tp", "pp", "ep", "etp", "ac_kind", "precision")
# Judgement: below these differences a reader sees two layouts that differ only in
# checkpointing as one.
SAME_TIME, SAME_MEMORY = 0.02, 0.10
AS_FIRST = 0.01  # of what the objective minimises
ROUNDING = 1e-9


def different(
    batch: LayoutBatch,
    step_seconds: FloatColumn,
    device_bytes: FloatColumn,
    order: IntColumn,
    count: int,
    scores: FloatColumn | None = None,
) -> IntColumn:
    """The first `count` rows in this order without near copies.

    Near copies fill up the rest if there are too few. Near copies share the whole structure, or
    share it except for activation checkpointing, with about the same time and memory, or with about
    the same score as the first row where scores are given.
    """
    columns: list[Column] = [getattr(batch, name) for name in STRUCTURE]
    degrees: list[Column] = [getattr(batch, name) for name in STRUCTURE if name != "ac_kind"]
    seen: set[tuple[int, ...]] = set()
    chosen: list[int] = []
    for row in order:
        key = tuple(int(column[row]) for column in columns)
        alike = [
            other for other in chosen if all(column[other] == column[row] for column in degrees)
        ]
        copy = any(
            (
                _close(step_seconds, row, other, SAME_TIME)
                and _close(device_bytes, row, other, SAME_MEMORY)
            )
            or (scores is not None and other == chosen[0] and _close(scores, row, other, AS_FIRST))
            for other in alike
        )
        if key not in seen and not copy:
            seen.add(key)
            chosen.append(int(row))
            if len(chosen) == count:
                break
    if len(chosen) < count:
        taken = set(chosen)
        chosen += [int(row) for row in order if int(row) not in taken][: count - len(chosen)]
    return np.array(chosen, dtype=np.int64)


def _close(column: FloatColumn, row: int, other: int, share: float) -> bool:
    return abs(float(column[row]) / float(column[other]) - 1.0) < share


def front(step_seconds: FloatColumn, device_bytes: FloatColumn, most: int = 20) -> IntColumn:
    """Rows that no other beats in both step time and memory, fastest first.

    They are thinned evenly to `most`. Of rows that are equal but for rounding the first counts.
    """
    steps, sizes = (
        np.round(column / column.max(initial=1e-9), 9) for column in (step_seconds, device_bytes)
    )
    order = np.lexsort((sizes, steps))
    lowest = np.minimum.accumulate(device_bytes[order])
    on_front = np.concatenate([[True], device_bytes[order][1:] < lowest[:-1] * (1.0 - ROUNDING)])
    rows = order[on_front]
    if len(rows) > most:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]
    return np.asarray(rows)
