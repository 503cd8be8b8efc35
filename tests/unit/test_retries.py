"""Which probes run again after a failure, and where."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from planner.api.jobs.retries import AGAIN, MOST_UNCOUNTED, next_try
from planner.api.storage.job_records import ProbeRecord
from planner.probes.launch import Watch
from planner.probes.protocol import FailureKind

FAILED = ProbeRecord(
    id="probe-1", created_at=datetime(2026, 1, 1, tzinfo=UTC), request={}, job_hash="", model="m",
    gpu="cpu", num_gpus=2, layout="l", pool="local", state="failed",
    results=({"hosts": ["n1"]}, {"hosts": ["n1", "n2"]}),
)  # fmt: skip
NEVER = ("oom", "backend", None, "cancelled", *(kind for kind in FailureKind if kind not in AGAIN))


def attempts(*kinds: str | None) -> list[ProbeRecord]:
    return [replace(FAILED, failure=kind) for kind in kinds]


@pytest.mark.parametrize("kind", NEVER)
def test_what_would_happen_again_is_not_tried_again(kind: str | None) -> None:
    assert next_try(attempts(kind), 5) is None


def test_a_hang_runs_again_elsewhere_as_often_as_the_sweep_says() -> None:
    hang = FailureKind.HANG
    assert next_try(attempts(hang), 1) == {"n1", "n2"}
    assert next_try(attempts(hang, hang), 1) is None
    assert next_try(attempts(hang), 0) is None


def test_a_port_that_was_taken_is_no_reason_to_move() -> None:
    assert next_try(attempts(FailureKind.PORT), 1) == frozenset()


@pytest.mark.parametrize(
    ("kind", "kept_off"),
    [
        (FailureKind.PREEMPTED, frozenset()),
        (FailureKind.LOST_NODE, frozenset({"n1", "n2"})),
        (FailureKind.FOREIGN, frozenset({"n1", "n2"})),
    ],
)
def test_what_the_pool_took_away_is_no_retry_and_has_an_end(
    kind: FailureKind, kept_off: frozenset[str]
) -> None:
    assert next_try(attempts(kind), 0) == kept_off
    assert next_try(attempts(kind, kind, FailureKind.HANG), 1) is not None
    assert next_try(attempts(*[kind] * (MOST_UNCOUNTED + 1)), 5) is None


def test_hosts_of_a_failure_are_taken_again_where_no_others_are_left() -> None:
    watch = Watch(avoid=frozenset({"n1"}), rather_not=frozenset({"n2", "n3"}))
    assert watch.kept_off(["n1", "n2", "n3", "n4"], 1) == {"n1", "n2", "n3"}
    assert watch.kept_off(["n1", "n2", "n3", "n4"], 2) == {"n1"}
    assert watch.kept_off(["n1"], 1) == {"n1"}, "what is kept out stays out"
