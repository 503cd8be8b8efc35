"""PyTorch's schedule CSV: one line per pipeline rank, actions in order ("0F0,0F1,0B0,...").

A pair is "(4F2;3B1)OVERLAP_F_B". `_PipelineScheduleRuntime._load_csv(file, format="compute_only")`
reads the file; torch adds sends, receives and unshards itself.
"""

import csv
import io

from planner.schedules.actions import Order, parse_item


def to_csv(actions: Order) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) for action in rank] for rank in actions
    )
    return out.getvalue()


def from_csv(text: str) -> Order:
    """Inverse of `to_csv`; empty cells, which torch writes for idle slots, are skipped.

    Raises ValueError for anything but compute.
    """
    return tuple(
        tuple(parse_item(cell) for cell in row if cell.strip())
        for row in csv.reader(io.StringIO(text))
    )
