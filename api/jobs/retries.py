"""Which failures of a probe may pass, and where it runs again.

A layout that ran out of memory, or that the trainer refuses, does so again: it never does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.api.storage.job_records import ProbeRecord
from planner.probes.protocol import FailureKind

MOST_UNCOUNTED = 5  # a pool that takes every probe away must not keep a run for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """How a probe runs again after a failure.

    elsewhere: not on the hosts where it failed, while enough others are left.
    counts: whether it is one of the sweep's `retries`.
    """

    elsewhere: bool = False
    counts: bool = True


AGAIN: Mapping[str, Again] = {
    FailureKind.PORT: Again(),
    FailureKind.KILLED: Again(elsewhere=True),
    FailureKind.LOST_GPU: Again(elsewhere=True),
    FailureKind.HANG: Again(elsewhere=True),
    FailureKind.CRASH: Again(elsewhere=True),
    FailureKind.PREEMPTED: Again(counts=False),
    FailureKind.FOREIGN: Again(elsewhere=True, counts=False),
    FailureKind.LOST_NODE: Again(elsewhere=True, counts=False),
    FailureKind.REQUEUED: Again(counts=False),
    FailureKind.ALLOCATION_ENDED: Again(counts=False),
    FailureKind.LAUNCH: Again(counts=False),
}


def next_try(attempts: Sequence[ProbeRecord], retries: int) -> frozenset[str] | None:
    """Hosts that another attempt keeps off; None where there is none.

    attempts: those so far, oldest first; the last one failed.
    """
    last = attempts[-1]
    again = AGAIN.get(last.failure or "")
    if again is None:
        return None
    counted = sum(counts(one) for one in attempts)
    if counted > retries or len(attempts) - counted > MOST_UNCOUNTED:
        return None
    return hosts_of(last) if again.elsewhere else frozenset()


def counts(record: ProbeRecord) -> bool:
    again = AGAIN.get(record.failure or "")
    return again is None or again.counts


def step_of(record: ProbeRecord) -> float | None:
    """The step time that a probe measured of its layout itself; None where it has none."""
    if record.measurement_id is None or len(record.results) != 1:
        return None
    seconds = record.results[0].get("outcome", {}).get("step_seconds")
    return float(seconds) if isinstance(seconds, int | float) else None


def hosts_of(record: ProbeRecord) -> frozenset[str]:
    """The hosts that a probe ran on, as far as its pool told."""
    return frozenset(str(host) for result in record.results for host in result.get("hosts", ()))
