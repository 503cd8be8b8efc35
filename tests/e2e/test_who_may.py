"""Whose things are whose, what a key may use, and the trail of who did what; on the real app."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from planner.api.jobs.leases import LEASE_SECONDS, new_lease
from planner.api.jobs.probe_recovery import recover
from planner.api.jobs.probes import enqueue, probe_of_job
from planner.api.jobs.sweeps import schedule_due
from planner.api.settings import Settings, parse_quotas
from planner.api.storage.backup import faults_in
from planner.api.storage.job_records import JobEnd, ProbeRecord
from planner.api.storage.tasks import SqlProbeStore
from planner.api.wiring import Wiring
from planner.errors import SpecError
from planner.units import DAY
from tests.conftest import EACH_DATABASE, Cli, api_keys, job_values, side_by_side
from tests.served import in_process, wiring_of
from tests.stand_ins.ageing import age

SCOPES = {"ann": "read+plan+probe", "bob": "read+plan+probe", "boss": "admin"}
KEYS = api_keys(SCOPES)
QUOTAS = "ann:plans_per_day=2+queued_probes=3+gpu_seconds_per_day=4000"
TINY = job_values("debug-tiny", "cpu", 1, 64, 4)
PROBE = {**TINY, "layout": {"dp_shard": 1}}
SWEEP = {
    "name": "nightly",
    "jobs": [PROBE],
    "measure": {"anchors": [{"dp_shard": 1}], "top_k": 0},
    "budget": {"max_probes": 1, "max_gpu_seconds": 100.0},
}


@pytest.fixture
def client(migrated_url: str) -> Iterator[TestClient]:
    own = {"api_keys": KEYS, "quotas": QUOTAS, "probe_workers": 0, "task_workers": 0}
    with in_process(migrated_url, **own) as made:
        yield made


@pytest.fixture
def probes(client: TestClient) -> SqlProbeStore:
    return wiring_of(client).probes


def ask(client: TestClient, who: str, method: str, path: str, body: Any = None) -> httpx.Response:
    return client.request(method, path, json=body, headers={"authorization": f"Bearer {who}"})


def probe(seconds: float = 600.0) -> dict[str, Any]:
    return {"job": PROBE, "time_limit_seconds": seconds}


def refused(answer: httpx.Response, quota: str) -> None:
    body = answer.json()
    assert (answer.status_code, body["type"], body["field"]) == (429, "quota_exceeded", quota), body
    assert int(answer.headers["retry-after"]) >= 1
    assert f"quota {quota} of this key" in body["message"]


def asked(client: TestClient, who: str, path: str, body: Any) -> str:
    """The id of what was asked for."""
    return str(ask(client, who, "POST", path, body).json()["id"])


def ended_after(probes: SqlProbeStore, seconds: float) -> ProbeRecord:
    """The oldest probe, run."""
    held = probes.claim(new_lease())
    return probes.finish(held, JobEnd(state="done", results=({"gpu_seconds": seconds},)))


def lose_worker(wiring: Wiring) -> None:
    """Of the oldest probe."""
    assert wiring.probes.claim(new_lease()) is not None
    age(wiring.engine, LEASE_SECONDS + 1)


@pytest.fixture
def queued(wiring: Wiring) -> ProbeRecord:
    return enqueue(wiring, probe_of_job(probe(), allow_files=False), max_attempts=1)[0]


# ---- whose it is ---------------------------------------------------------------------------------


def test_a_key_ends_only_what_is_its_own(client: TestClient, probes: SqlProbeStore) -> None:
    study = asked(client, "ann", "/plan", {**TINY, "probe": {"max_probes": 1}})
    own = asked(client, "ann", "/probes", probe())
    sweep = asked(client, "ann", "/sweeps", SWEEP)
    deleted = [("DELETE", path) for path in (f"/plans/{study}", f"/probes/{own}")]
    commands = [("POST", f"/sweeps/{sweep}/{command}") for command in ("pause", "resume", "run")]
    for method, path in (*deleted, ("DELETE", f"/sweeps/{sweep}"), *commands):
        answer = ask(client, "bob", method, path)
        assert (answer.status_code, answer.json()["type"]) == (403, "forbidden"), path
        assert "was asked for by ann, not by bob" in answer.json()["message"], path
    assert wiring_of(client).tasks.get(study).state == probes.get(own).state == "queued"
    assert ask(client, "ann", "DELETE", f"/probes/{own}").json()["state"] == "cancelled"
    assert ask(client, "boss", "POST", f"/sweeps/{sweep}/pause").json()["state"] == "paused"
    ended = ask(client, "boss", "DELETE", f"/plans/{study}").json()
    assert (ended["status"], ended["message"]) == ("cancelled", "cancelled: its study")
    again = ask(client, "boss", "DELETE", f"/plans/{study}").json()
    assert again["message"].startswith("nothing was running for it: nothing was cancelled")


def test_reading_writes_nothing(client: TestClient, probes: SqlProbeStore) -> None:
    own = asked(client, "bob", "/probes", probe())
    lose_worker(wiring_of(client))
    before = probes.get(own)
    for path in ("/probes", f"/probes/{own}", "/queue", "/plans", "/sweeps", "/metrics"):
        assert ask(client, "bob", "GET", path).status_code == 200
    assert probes.get(own) == before
    recover(wiring_of(client))
    assert probes.get(own).state == "queued"


# ---- quotas --------------------------------------------------------------------------------------


@EACH_DATABASE
def test_plans_a_day(client: TestClient) -> None:
    paper = {**TINY, "search": {"top_k": 1}}
    assert ask(client, "ann", "POST", "/plan", paper).status_code == 200
    small = {"max_probes": 1, "max_gpu_seconds": 10.0}
    assert ask(client, "ann", "POST", "/plan", {**TINY, "probe": small}).status_code == 202
    refused(ask(client, "ann", "POST", "/plan", paper), "plans_per_day")
    refused(ask(client, "ann", "POST", "/plan", {**TINY, "probe": small}), "plans_per_day")
    assert ask(client, "bob", "POST", "/plan", paper).status_code == 200


def test_queued_probes_at_once(client: TestClient, probes: SqlProbeStore) -> None:
    ids = [ask(client, "ann", "POST", "/probes", probe(1.0)).json()["id"] for _ in range(3)]
    assert ask(client, "bob", "POST", "/probes", probe(1.0)).status_code == 202
    cancel, run = partial(ask, client, "ann", "DELETE", f"/probes/{ids[0]}"), probes.claim
    for leave_the_queue in (cancel, partial(run, new_lease(), job_id=ids[1])):
        refused(ask(client, "ann", "POST", "/probes", probe(1.0)), "queued_probes")
        leave_the_queue()
        assert ask(client, "ann", "POST", "/probes", probe(1.0)).status_code == 202


@EACH_DATABASE
def test_gpu_seconds_a_day_count_what_is_promised_and_then_what_was_used(
    client: TestClient, probes: SqlProbeStore
) -> None:
    refused(ask(client, "ann", "POST", "/probes", probe(86_400.0)), "gpu_seconds_per_day")
    own = asked(client, "ann", "/probes", probe(3000.0))
    refused(ask(client, "ann", "POST", "/probes", probe(3000.0)), "gpu_seconds_per_day")
    study = {**TINY, "probe": {"max_probes": 1, "max_gpu_seconds": 1500.0}}
    refused(ask(client, "ann", "POST", "/plan", study), "gpu_seconds_per_day")
    ended = ended_after(probes, 40.0)
    assert (ended.id, ended.gpu_seconds) == (own, 40.0)
    small = {**TINY, "probe": {"max_gpu_seconds": 900.0}}
    for path, body in (("/probes", probe(3000.0)), ("/plan", small)):
        assert ask(client, "ann", "POST", path, body).status_code == 202


def test_thousands_of_day_long_probes_of_one_key_are_refused(client: TestClient) -> None:
    answers = [ask(client, "bob", "POST", "/probes", probe(86_400.0)) for _ in range(12)]
    assert [answer.status_code for answer in answers] == [202] * 8 + [429] * 4
    refused(answers[-1], "gpu_seconds_per_day")


@EACH_DATABASE
def test_two_at_once_do_not_pass_the_quota_together(client: TestClient) -> None:
    answers: list[int] = []

    def post() -> None:
        answers.append(ask(client, "ann", "POST", "/probes", probe(1500.0)).status_code)

    side_by_side(post, *[()] * 6)
    assert sorted(answers) == [202] * 2 + [429] * 4


@pytest.mark.parametrize("seconds", [1e300, 1e10])
def test_a_budget_that_nobody_has_is_refused(client: TestClient, seconds: float) -> None:
    job = {**TINY, "probe": {"max_probes": 1, "max_gpu_seconds": seconds}}
    answer = ask(client, "boss", "POST", "/plan", job)
    assert (answer.status_code, answer.json()["field"]) == (422, "probe.max_gpu_seconds")
    budget = {"max_probes": 1, "max_gpu_seconds": seconds}
    assert ask(client, "boss", "POST", "/sweeps", {**SWEEP, "budget": budget}).status_code == 422


def test_a_scheduled_run_over_the_quota_is_skipped(client: TestClient) -> None:
    budget = {"max_probes": 1, "max_gpu_seconds": 3000.0}
    body = {**SWEEP, "budget": budget, "schedule": "* * * * *", "missed": "catch-up"}
    sweep = asked(client, "ann", "/sweeps", body)
    assert ask(client, "ann", "POST", "/probes", probe(2000.0)).status_code == 202
    wiring = wiring_of(client)
    due = wiring.sweeps.get(sweep).next_due_at
    wiring.sweeps.change(sweep, "active", due.replace(year=2025))
    assert schedule_due(wiring) == []
    trail = ask(client, "boss", "GET", "/audit?action=refused.quota_exceeded").json()["items"]
    assert (trail[0]["asked_by"], trail[0]["subject"]) == ("ann", sweep)
    big = {**body, "budget": {**budget, "max_gpu_seconds": 5000.0}}
    refused(ask(client, "ann", "POST", "/sweeps", big), "gpu_seconds_per_day")


def test_quotas_are_read_by_key() -> None:
    default = Settings().default_quota
    found = parse_quotas("a:queued_probes=1, b:gpu_seconds_per_day=2+plans_per_day=3", default)
    assert (found["a"].queued_probes, found["a"].plans_per_day) == (1, default.plans_per_day)
    assert (found["b"].gpu_seconds_per_day, found["b"].plans_per_day) == (2.0, 3)
    assert default.gpu_seconds_per_day == 8 * DAY
    for wrong in ("a", "a:", "a:plans=1", "a:queued_probes=-1", "a:queued_probes=x", ":x=1"):
        with pytest.raises(SpecError, match="PLANNER_QUOTAS"):
            parse_quotas(wrong, default)


# ---- the trail and the queue ---------------------------------------------------------------------


@EACH_DATABASE
def test_the_trail_names_who_asked_ran_cancelled_and_was_refused(
    client: TestClient, probes: SqlProbeStore
) -> None:
    own = asked(client, "ann", "/probes", probe(500.0))
    ended_after(probes, 7.5)
    other = asked(client, "ann", "/probes", probe(500.0))
    for who in ("bob", "bob", "bob", "boss"):
        ask(client, who, "DELETE", f"/probes/{other}")
    assert ask(client, "ann", "GET", "/audit").status_code == 403
    first = ask(client, "boss", "GET", "/audit?limit=2").json()
    rest = ask(client, "boss", "GET", f"/audit?cursor={first['next_cursor']}").json()
    parts = ("action", "asked_by", "subject", "gpu_seconds")
    lines = [tuple(one[part] for part in parts) for one in first["items"] + rest["items"]]
    assert lines[::-1] == [
        ("probe.asked", "ann", own, 500.0),
        ("probe.ended", "ann", own, 7.5),
        ("probe.asked", "ann", other, 500.0),
        ("refused.forbidden", "bob", f"DELETE /probes/{other}", None),
        ("probe.cancelled", "boss", other, None),
        ("refused.forbidden", "ann", "GET /audit", None),
    ]
    ended = ask(client, "boss", "GET", "/audit?action=probe.ended").json()["items"][0]
    assert ended["detail"].startswith("done; run by ")
    assert ask(client, "boss", "GET", f"/audit?subject={own}&asked_by=bob").json()["items"] == []


@EACH_DATABASE
def test_what_was_given_up_is_listed_and_queued_again_by_a_person(client: TestClient) -> None:
    own = asked(client, "ann", "/probes", probe(500.0))
    assert [one["id"] for one in ask(client, "bob", "GET", "/queue").json()] == [own]
    for _ in range(2):
        lose_worker(wiring_of(client))
        recover(wiring_of(client))
        age(wiring_of(client).engine, 60.0)  # its delay
    (failed,) = ask(client, "bob", "GET", "/queue?failed=true").json()
    assert (failed["id"], failed["failure"], failed["attempts"]) == (own, "lost_workers", 2)
    assert "planner-cli queue retry" in failed["message"]
    assert ask(client, "bob", "POST", f"/queue/{own}/retry").status_code == 403
    again = ask(client, "ann", "POST", f"/queue/{own}/retry").json()
    assert (again["state"], again["attempts"], again["gpu_seconds"]) == ("queued", 0, 500.0)
    assert ask(client, "ann", "POST", f"/queue/{own}/retry").status_code == 409
    assert ask(client, "ann", "POST", "/queue/probe-nope/retry").status_code == 404


def test_the_command_line_does_the_same(cli: Cli, wiring: Wiring, queued: ProbeRecord) -> None:
    assert queued.id in cli("queue", "list").stdout
    lose_worker(wiring)
    recover(wiring)
    (failed,) = json.loads(cli("queue", "list", "--failed", "--json").stdout)
    assert (failed["id"], failed["failure"]) == (queued.id, "interrupted")
    assert "probe queued" in cli("queue", "retry", queued.id).stdout
    assert "probe cancelled" in cli("queue", "cancel", queued.id).stdout
    assert cli("queue", "retry", queued.id).returncode == 2
    trail = cli("audit", "--subject", queued.id).stdout.splitlines()
    actions = ["probe.cancelled", "probe.requeued", "probe.ended", "probe.asked"]
    assert [line.split("  ")[2] for line in trail] == actions
    assert all("  cli:" in line for line in trail)


# ---- backup and check ----------------------------------------------------------------------------


def test_a_backup_of_a_database_in_use_is_whole(
    cli: Cli, queued: ProbeRecord, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    done = cli("db", "backup", copy)  # what was written stands in the -wal file alone
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT id FROM probes").fetchall() == [(queued.id,)]
    for target, code, words in (
        (copy, 2, "is there already"),
        (tmp_path / "no" / "copy.db", 4, "was not written"),
    ):
        refused = cli("db", "backup", target)
        assert (refused.returncode, words in refused.stderr) == (code, True)
    assert not (tmp_path / "no").exists()
    checked = cli("db", "check", env={"PLANNER_DATABASE_URL": f"sqlite:///{copy}"})
    assert (checked.returncode, "consistent" in checked.stdout) == (0, True), checked.stderr


def test_postgres_is_told_its_own_command(cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    url = postgres_url.replace("planner@", "planner:secret@")
    said = cli("db", "backup", tmp_path / "x", env={"PLANNER_DATABASE_URL": url})
    assert (said.returncode, "pg_dump --format=custom" in said.stderr) == (2, True), said.stderr
    assert "secret" not in said.stderr


def test_what_does_not_fit_together_is_said(
    cli: Cli, wiring: Wiring, queued: ProbeRecord, tmp_path: Path
) -> None:
    assert faults_in(wiring.engine) == []
    with closing(sqlite3.connect(tmp_path / "planner.db")) as connection, connection:
        connection.execute("UPDATE probes SET state = 'done', measurement_id = 'gone'")
    said = cli("db", "check")
    assert said.returncode == 4
    assert f"ended probes and tasks have an end: {queued.id}" in said.stderr
    assert "refer to what is not there, in probes" in said.stderr
