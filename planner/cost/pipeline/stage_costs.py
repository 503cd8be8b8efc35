"""Seconds and bytes of one microbatch on each stage. Letters: C candidates, S stages."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer.forward_backward_overlap import PairColumns
from planner.cost.pipeline.order_parts import Rows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one microbatch on each stage. Arrays (C, S).

    send_seconds_CS: hop from stage s to s + 1 (the last column is unused), and the gradient's way
        back.
    crowded_seconds_CS: the same while its rank sends another transfer (None: no slower).
    saved_bytes_CS: saved from F until I or B.
    weight_grad_bytes_CS: bytes that stay from I until W (None: nothing).
    redone_seconds_CS: what W recomputes if it runs separately from I (None: nothing).
    pair: overlapped forwards and backwards (None: they take as long as one after the other).
    """

    forward_seconds_CS: Floats
    input_grad_seconds_CS: Floats
    weight_grad_seconds_CS: Floats
    send_seconds_CS: Floats
    saved_bytes_CS: Floats
    crowded_seconds_CS: Floats | None = None
    weight_grad_bytes_CS: Floats | None = None
    redone_seconds_CS: Floats | None = None
    pair: PairColumns | None = None

    def __post_init__(self) -> None:
        shape = self.forward_seconds_CS.shape
        for record in (self, self.pair):
            for f in fields(record) if record is not None else ():
                column = getattr(record, f.name)
                if isinstance(column, np.ndarray) and column.shape != shape:
                    raise ValueError(
                        f"{f.name} has shape {column.shape}, forward_seconds_CS {shape}"
                    )

    @property
    def num_candidates(self) -> int:
        return len(self.forward_seconds_CS)

    def take(self, rows: Rows) -> "StageCosts":
        pair = self.pair and replace(self.pair, **_columns_at(self.pair, rows))
        return replace(self, **_columns_at(self, rows), pair=pair)


def _columns_at(record: StageCosts | PairColumns, rows: Rows) -> dict[str, Any]:
    return {
        f.name: column[rows]
        for f in fields(record)
        if isinstance(column := getattr(record, f.name), np.ndarray)
    }
