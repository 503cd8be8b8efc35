"""Which probes run again after a failure, and where."""

from dataclasses import replace

import pytest

from planner.api.jobs.failures import AGAIN, MOST_UNCOUNTED, next_try
from planner.api.storage.job_records import ProbeRecord
from planner.probes.launch import Watch
from planner.probes.protocol import FailureKind
from tests.stand_ins.records import probe_record

FAILED = probe_record(state="failed", results=({"hosts": ["n1"]}, {"hosts": ["n1", "n2"]}))
HANG, PORT, ELSEWHERE = FailureKind.HANG, FailureKind.PORT, frozenset({"n1", "n2"})
NEVER = ("oom", "backend", None, "cancelled", *(kind for kind in FailureKind if kind not in AGAIN))


def attempts(*kinds: str | None) -> list[ProbeRecord]:
    return [replace(FAILED, failure=kind) for kind in kinds]


@pytest.mark.parametrize("kind", NEVER)
def test_what_would_happen_again_is_not_tried_again(kind: str | None) -> None:
    assert next_try(attempts(kind), 5) is None


@pytest.mark.parametrize(
    ("kinds", "retries", "kept_off"),
    [([HANG], 1, ELSEWHERE), ([HANG, HANG], 1, None), ([HANG], 0, None), ([PORT], 1, frozenset())],
    ids=["a hang elsewhere", "as often as the sweep says", "or never", "a port that was taken"],
)
def test_what_may_pass_is_tried_again(
    kinds: list[str], retries: int, kept_off: frozenset[str] | None
) -> None:
    assert next_try(attempts(*kinds), retries) == kept_off


@pytest.mark.parametrize(
    "kind", [FailureKind.PREEMPTED, FailureKind.LOST_NODE, FailureKind.FOREIGN]
)
def test_what_the_pool_took_away_is_no_retry_and_has_an_end(kind: FailureKind) -> None:
    left = frozenset() if kind == FailureKind.PREEMPTED else ELSEWHERE
    assert next_try(attempts(kind), 0) == left
    assert next_try(attempts(kind, kind, HANG), 1) is not None
    assert next_try(attempts(*[kind] * (MOST_UNCOUNTED + 1)), 5) is None


def test_hosts_of_a_failure_are_taken_again_where_no_others_are_left() -> None:
    watch = Watch(avoid=frozenset({"n1"}), rather_not=frozenset({"n2", "n3"}))
    assert watch.kept_off(["n1", "n2", "n3", "n4"], 1) == {"n1", "n2", "n3"}
    assert watch.kept_off(["n1", "n2", "n3", "n4"], 2) == {"n1"}
    assert watch.kept_off(["n1"], 1) == {"n1"}, "what is kept out stays out"
