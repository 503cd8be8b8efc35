"""The answer of `collective`: one operation on one cluster. SI units, in the names."""

from typing import Literal

from planner.specs.validation import Value

Basis = Literal["datasheet", "calibrated", "extrapolated"]
CollectiveOperation = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "p2p"
]


class CollectiveCandidate(Value):
    """One algorithm for the collective.

    seconds: with the library's curves.
    closed_form_seconds: from the fabric's bandwidth and latency alone.
    protocol: the library's fastest at this size.
    automatic: whether the library would choose the algorithm by itself.
    """

    algorithm: str
    protocol: str
    automatic: bool
    seconds: float
    closed_form_seconds: float
    steps: int
    wire_bytes_per_rank: float
    summary: str


class CollectiveAnswer(Value):
    """Seconds of one collective.

    If the user names an algorithm, the answer is its closed form (protocol "closed form", basis
    "datasheet"). Otherwise it is the library's choice.
    size_bytes: the whole buffer; for all-to-all what one rank sends.
    wire_bytes_per_rank: sent by the busiest rank.
    bus_bandwidth_bytes_per_second: nccl-tests' figure, comparable with a link's bandwidth whatever
        the number of ranks.
    candidates: fastest first.
    """

    operation: CollectiveOperation
    size_bytes: float
    num_ranks: int
    stride: int
    algorithm: str
    protocol: str
    seconds: float
    steps: int
    wire_bytes_per_rank: float
    algorithm_bandwidth_bytes_per_second: float
    bus_bandwidth_bytes_per_second: float
    basis: Basis
    why: str
    candidates: tuple[CollectiveCandidate, ...]
