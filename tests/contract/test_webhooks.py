"""Reports posted to a webhook: signed, tried again until taken, and never to a host that the
operator did not list. On SQLite and PostgreSQL.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import update

from planner.api.jobs import webhooks
from planner.api.jobs.leases import new_lease
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.jobs.webhooks import MOST_TRIES, check_webhook, deliver_due
from planner.api.jobs.workers import ProbeWorkers, TaskWorkers, is_idle
from planner.api.settings import Settings
from planner.api.storage.clock import database_time
from planner.api.storage.job_records import JobEnd, Lease, TaskRecord
from planner.api.storage.tables import SweepRecord
from planner.api.storage.transactions import writing
from planner.api.wiring import Wiring, wire
from planner.errors import SpecError
from tests.conftest import EACH_DATABASE, job_values, side_by_side
from tests.stand_ins.records import probe_record

SECRET = "a secret of the operator"
SWEEP: dict[str, Any] = {"name": "nightly", "jobs": [job_values("debug-tiny", "cpu", 2, 64, 8)]}


@dataclass
class Receiver:
    """A web service. answers: statuses that it gives, the last one from then on."""

    url: str = ""
    answers: list[int] = field(default_factory=lambda: [200])
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.received.append((dict(self.headers.items()), body))
            self.send_response(kept.answers.pop(0) if kept.answers[1:] else kept.answers[0])
            self.send_header("location", "http://127.0.0.1:1/elsewhere")  # of a redirect
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        kept.url = f"http://127.0.0.1:{server.server_port}/sweeps"
        yield kept
        server.shutdown()
        thread.join()


def told(receiver: Receiver) -> list[dict[str, Any]]:
    """The bodies that it received."""
    return [json.loads(body) for _, body in receiver.received]


@pytest.fixture
def wiring(migrated_url: str, receiver: Receiver) -> Wiring:
    hosts = f"hooks.example.com, {receiver.url.split('/')[2]}"
    return wired(migrated_url, webhook_hosts=hosts, webhook_secret=SecretStr(SECRET))


def wired(database_url: str, **settings: Any) -> Wiring:
    return wire(Settings(database_url=database_url, **settings))


def run_of(wiring: Wiring, *, ours: bool, **sweep: Any) -> TaskRecord:
    return run_now(wiring, add_sweep(wiring, {**SWEEP, **sweep}, allow_files=False), ours=ours)


def ended_run(wiring: Wiring, url: str) -> TaskRecord:
    report: dict[str, Any] = {"headline": "1 of 1 layout measured", "jobs": []}
    end = JobEnd(state="done", result=report, message=report["headline"])
    return wiring.tasks.finish(run_of(wiring, ours=True, webhook=url), end)


def come_due(wiring: Wiring) -> None:
    """Makes what waits to be told wait no longer."""
    waiting = update(TaskRecord).where(TaskRecord.notify_at.is_not(None))
    with writing(wiring.engine) as session:
        session.execute(waiting.values(notify_at=database_time(-1.0)))


def test_a_report_is_posted_once_and_signed(wiring: Wiring, receiver: Receiver) -> None:
    run = ended_run(wiring, receiver.url)
    assert not is_idle(wiring), "a webhook is still to be called"
    assert [deliver_due(wiring) for _ in range(2)] == [1, 0]
    assert is_idle(wiring)
    (report,) = told(receiver)
    assert (report["id"], report["sweep"], report["state"]) == (run.id, run.parent_id, "done")
    assert report["report"]["headline"] == "1 of 1 layout measured"
    ((headers, body),) = receiver.received
    assert headers["webhook-id"] == run.id
    signed = f"{run.id}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(SECRET.encode(), signed, hashlib.sha256).digest())
    assert headers["webhook-signature"] == f"v1,{expected.decode()}"


@EACH_DATABASE
def test_a_receiver_that_fails_is_asked_again_later_and_given_up_at_last(
    wiring: Wiring, receiver: Receiver
) -> None:
    receiver.answers = [503, 200]
    ended_run(wiring, receiver.url)
    assert [deliver_due(wiring) for _ in range(2)] == [0, 0]
    assert len(receiver.received) == 1, "not at once"
    come_due(wiring)
    assert deliver_due(wiring) == 1
    receiver.answers, receiver.received = [500], []
    ended_run(wiring, receiver.url)
    for _ in range(MOST_TRIES + 2):
        deliver_due(wiring)
        come_due(wiring)
    assert (len(receiver.received), wiring.tasks.untold()) == (MOST_TRIES, 0)


def lose_the_worker(wiring: Wiring, run: TaskRecord) -> None:
    """Its only attempt, by a worker that is never heard of again."""
    with writing(wiring.engine) as session:
        session.execute(update(TaskRecord).where(TaskRecord.id == run.id).values(max_attempts=1))
    assert wiring.tasks.claim(Lease(owner="another host", seconds=-1.0), job_id=run.id) is not None


@EACH_DATABASE
def test_a_run_without_workers_is_told_by_its_finder(wiring: Wiring, receiver: Receiver) -> None:
    run = run_of(wiring, ours=False, webhook=receiver.url)
    lose_the_worker(wiring, run)
    assert TaskWorkers(wiring, 0)._claim_next() is None
    deliver_due(wiring)
    (report,) = told(receiver)
    assert (report["id"], report["state"], report["report"]) == (run.id, "failed", None)
    assert "its worker was lost in 1 attempt" in report["message"]
    assert is_idle(wiring)


def test_a_run_queued_again_is_told_when_it_ends(wiring: Wiring, receiver: Receiver) -> None:
    receiver.answers = [503, 200]
    run = run_of(wiring, ours=False, webhook=receiver.url)
    lose_the_worker(wiring, run)
    assert TaskWorkers(wiring, 0)._claim_next() is None
    deliver_due(wiring)
    wiring.tasks.requeue(run.id, None)
    come_due(wiring)
    assert deliver_due(wiring) == 0
    assert len(receiver.received) == 1, "it has not ended yet"
    held = wiring.tasks.claim(new_lease(), job_id=run.id)
    wiring.tasks.finish(held, JobEnd(state="done", message="1 of 1 layout measured"))
    assert deliver_due(wiring) == 1
    assert [report["state"] for report in told(receiver)] == ["failed", "done"]
    assert wiring.tasks.get(run.id).notified == 1, "the calls of its first end do not count"


@EACH_DATABASE
def test_two_workers_tell_it_once(wiring: Wiring, receiver: Receiver) -> None:
    ended_run(wiring, receiver.url)
    side_by_side(deliver_due, (wiring,), (wire(wiring.settings),))
    assert len(receiver.received) == 1


@pytest.fixture
def dripping() -> Iterator[str]:
    """URL of a receiver that takes a report and sends a byte of its answer now and then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer(taken: socket.socket) -> None:
            with contextlib.suppress(OSError), taken:
                while True:
                    taken.sendall(b"H")
                    time.sleep(0.05)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken, _ = listening.accept()
                    threading.Thread(target=answer, args=(taken,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/sweeps"


def test_a_receiver_that_drips_is_left_in_time_and_holds_no_study(
    migrated_url: str, dripping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drips = wired(migrated_url, webhook_hosts=dripping.split("/")[2])
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 0.3)
    ended_run(drips, dripping)
    assert deliver_due(drips) == 0, "and it returns"
    come_due(drips)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 600.0)
    workers, claimed = TaskWorkers(drips, 1), threading.Event()
    monkeypatch.setattr(workers, "_work", lambda record, stop: claimed.set())
    workers.start()
    run_of(drips, ours=False)
    assert claimed.wait(60.0), "while the receiver drips"
    workers.halt()


def test_no_claim_talks_to_the_outside(
    wiring: Wiring, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook, a scheduled run and a probe whose worker was lost in its pool are due."""
    ended_run(wiring, receiver.url)
    add_sweep(wiring, {**SWEEP, "schedule": "* * * * *"}, allow_files=False)
    with writing(wiring.engine) as session:
        scheduled = update(SweepRecord).where(SweepRecord.next_due_at.is_not(None))
        session.execute(scheduled.values(next_due_at=database_time(-1.0)))
    probes = [probe_record(id=name, pool="slurm", max_attempts=2) for name in ("lost", "next")]
    wiring.probes.add(probes)
    wiring.probes.claim(Lease(owner="another host:1", seconds=-1.0), job_id="lost")
    asked: list[tuple[int, str]] = []
    for place, name in ((socket, "getaddrinfo"), (socket.socket, "connect"), (Wiring, "pool")):
        monkeypatch.setattr(
            place, name, lambda *_, n=name: asked.append((threading.get_ident(), n))
        )
    for workers in (TaskWorkers(wiring, 1), ProbeWorkers(wiring, 1)):
        assert workers._claim_next() is not None
    # a thread of an earlier test may still deliver
    assert [name for thread, name in asked if thread == threading.get_ident()] == []


def test_a_redirect_is_not_followed(wiring: Wiring, receiver: Receiver) -> None:
    receiver.answers = [302]
    ended_run(wiring, receiver.url)
    assert (deliver_due(wiring), len(receiver.received)) == (0, 1)


def test_a_host_that_is_no_longer_listed_is_not_called(
    wiring: Wiring, migrated_url: str, receiver: Receiver
) -> None:
    ended_run(wiring, receiver.url)
    assert deliver_due(wired(migrated_url, webhook_hosts="hooks.example.com")) == 0
    assert receiver.received == []


@pytest.mark.parametrize("url", [
    "http://169.254.169.254/latest/meta-data", "http://localhost:8000/", "file:///etc/passwd",
    "https://hooks.example.com.evil.test/", "https://hooks.example.com@evil.test/",
    "https://evil.test/?https://hooks.example.com", "https://hooks.example.com:8443/",
    "https://user:password@hooks.example.com/", "hooks.example.com", "http://[::1",
])  # fmt: skip
def test_only_hosts_that_the_operator_lists(url: str) -> None:
    settings = Settings(webhook_hosts="hooks.example.com")
    assert check_webhook(settings, "https://HOOKS.example.com/x") is not None
    with pytest.raises(SpecError, match=r"sweep\.webhook"):
        check_webhook(settings, url)


def test_without_a_list_no_sweep_has_a_webhook(migrated_url: str) -> None:
    bare = wired(migrated_url)
    with pytest.raises(SpecError, match="PLANNER_WEBHOOK_HOSTS"):
        add_sweep(bare, {**SWEEP, "webhook": "https://hooks.example.com"}, allow_files=False)
    assert bare.tasks.claim(new_lease()) is None
