"""Seconds and bytes of one microbatch on each stage. Letters: C candidates, S stages, P pairs."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline.order_parts import Rows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSeconds:
    """Communication of each other that an overlapped forward and backward hide. Arrays (C, S).

    forward_wire_CS, backward_wire_CS: seconds of communication of one microbatch that may hide
        under the partner's compute.
    forward_cover_CS, backward_cover_CS: seconds of compute under which the partner's communication
        may hide.
    slowdown: compute seconds lost per second of hidden communication.
    """

    forward_wire_CS: Floats
    backward_wire_CS: Floats
    forward_cover_CS: Floats
    backward_cover_CS: Floats
    slowdown: float

    def saved_CP(self, forward: Rows, backward: Rows) -> Floats:
        """Seconds that each pair takes less than its two parts one after the other.

        forward, backward (P,): stages of each pair's forward and backward.
        saved = (1 - slowdown) (min(wire of the forward, compute of the backward)
                                + min(wire of the backward, compute of the forward))
        """
        under_backward = np.minimum(
            self.forward_wire_CS[:, forward], self.backward_cover_CS[:, backward]
        )
        under_forward = np.minimum(
            self.backward_wire_CS[:, backward], self.forward_cover_CS[:, forward]
        )
        return np.asarray((1.0 - self.slowdown) * (under_backward + under_forward))


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
    pair: PairSeconds | None = None

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


def _columns_at(record: StageCosts | PairSeconds, rows: Rows) -> dict[str, Any]:
    return {
        f.name: column[rows]
        for f in fields(record)
        if isinstance(column := getattr(record, f.name), np.ndarray)
    }
