"""Plans that spend probes and sweeps, through the real command line and the real app: with a
stand-in program, once with the real one.
"""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner.api.cli import root
from planner.api.errors import codes_of
from planner.api.http.app import create_app
from planner.api.jobs.leases import LEASE_SECONDS, Observer, take_over
from planner.api.jobs.studies import ask_study, run_study
from planner.api.jobs.sweep_report import failure_in
from planner.api.jobs.sweep_runs import run_sweep
from planner.api.jobs.sweeps import add_sweep, run_now
from planner.api.settings import Settings
from planner.api.storage.job_records import JobEnd
from planner.api.storage.tasks import gpu_seconds_of
from planner.api.wiring import Wiring, wire
from planner.cost.machine.shipped import shipped_calibration
from planner.errors import ConflictError, NotFoundError
from planner.intake.sweeps import read_sweep
from planner.plan.recommend import recommend
from planner.specs.plan import Plan
from tests.conftest import PLANNER, ROOT, Cli, clean_environment, job_values, needed
from tests.e2e.conftest import REAL_PROBE, write
from tests.e2e.probe_jobs import TINY, until
from tests.e2e.test_http_sweeps_and_pages import pages
from tests.stand_ins import worker
from tests.stand_ins.ageing import age

BARE = job_values(TINY, "cpu", 2, 32, 8)
JOB: dict[str, Any] = {
    **BARE, "search": {"allow": {"precision": ["bf16"], "compile": [False]}},
    "probe": {"max_probes": 3, "max_gpu_seconds": 900, "steps": 2},
}  # fmt: skip
SWEEP: dict[str, Any] = {
    "name": "nightly",
    "models": [TINY], "clusters": [BARE["cluster"]], "trainings": [BARE["training"]],
    "measure": {"top_k": 1, "anchors": [{"dp_shard": 2, "ac": "full"}], "informative": 1},
    "steps": 2,
}  # fmt: skip
Surroundings = dict[str, str]
Recommend = Callable[..., "subprocess.CompletedProcess[str]"]


def settings_of(url: str, surroundings: Surroundings, **more: Any) -> Settings:
    given = {name.removeprefix("PLANNER_").lower(): one for name, one in surroundings.items()}
    return Settings(database_url=url, **{**given, **more})


@pytest.fixture
def wiring(sqlite_url: str, surroundings: Surroundings) -> Wiring:
    return wire(settings_of(sqlite_url, surroundings))


@pytest.fixture
def environment(sqlite_url: str, surroundings: Surroundings) -> dict[str, str]:
    """Of a command line in a process of its own."""
    return {**clean_environment(), "PLANNER_DATABASE_URL": sqlite_url, **surroundings}


@pytest.fixture
def recommend_it(cli: Cli, tmp_path: Path, surroundings: Surroundings) -> Recommend:
    """Runs `recommend --json` on JOB with these changes."""

    def run(env: Surroundings | None = None, **changes: Any) -> Any:
        path = write(tmp_path, "job.json", {**JOB, **changes})
        return cli("recommend", "--job", path, "--json", env=surroundings | (env or {}))

    return run


def said(done: "subprocess.CompletedProcess[str]") -> Any:
    """The JSON of a command that went well."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def items(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = said(cli("measurements", "list", *arguments, "--json"))["items"]
    return found


def itself(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of a layout of JOB on all of its GPUs, not smaller runs nor what they stood for."""
    return [
        row
        for row in rows
        if row["measured"]["rung"] == "probed"
        and row["cluster"]["num_gpus"] == JOB["cluster"]["num_gpus"]
    ]


def measured_again(rows: list[dict[str, Any]]) -> int:
    """Runs of what had been measured in the same way before."""
    shapes = {json.dumps([row["measured"]["rung"], row["layout"]], sort_keys=True) for row in rows}
    return len(rows) - len(shapes)


@pytest.mark.slow
def test_a_plan_spends_its_probes_and_says_what_they_found(
    cli: Cli, recommend_it: Recommend, surroundings: Surroundings
) -> None:
    done = recommend_it()
    plan = said(done)
    sources = Counter(entry["source"] for entry in plan["ranked"] if entry["measurement"])
    assert plan["ranked"][0]["source"] == "probed"
    assert plan["ranked"][0]["measurement"]["step_seconds"] == pytest.approx(worker.STEP_SECONDS)
    assert 1 <= sources["probed"] <= plan["probing"]["probes"] == len(itself(items(cli))) <= 3
    assert sources["emulated"] <= plan["probing"]["looks"]
    assert sources.total() == sources["probed"] + sources["emulated"]
    assert {row["measured"]["step_seconds"] for row in itself(items(cli))} == {worker.STEP_SECONDS}
    asked = [trial["layout"] for trial in plan["probing"]["trials"] if trial.get("reason")]
    assert asked, "a trial says why it was asked"
    assert {type(layout["layers_per_stage"]) for layout in asked} <= {type(None), list}
    assert "stopped" in done.stderr
    again = said(recommend_it())
    repeats = [trial for trial in again["probing"]["trials"] if trial["runs"] > 1]
    assert all(trial["reason"].startswith("again, to tell it") for trial in repeats)
    assert measured_again(items(cli)) == sum(trial["runs"] - 1 for trial in repeats), (
        "what was measured is measured again only to tell rivals apart"
    )
    shipped = shipped_calibration().id
    assert again["calibration_id"] == plan["calibration_id"] == shipped, (
        "what the study knows is not in its calibration too"
    )
    assert again["ranked"][0]["measurement"]
    third = json.loads(recommend_it(training={**JOB["training"], "seq_len": 64}).stdout)
    assert third["calibration_id"].startswith(f"{shipped}+"), (
        "for another question it is the calibration's"
    )
    line = json.dumps({**BARE, "layout": {"dp_shard": 2}})
    priced = said(cli("estimate", "--jobs", "-", input=f"{line}\n", env=surroundings))
    assert "+" in priced["calibration_id"], "an estimate rests on what was learnt"


Moment = Callable[[Wiring], bool]
# In the order of a study's life; a probe of these tests lasts a second.
MOMENTS: dict[str, Moment] = {
    "before its first probe": lambda wiring: (
        bool(wiring.tasks.list().items) and not wiring.probes.list().items
    ),
    "during its first probe": lambda wiring: any(
        probe.folder for probe in wiring.probes.list().items
    ),
    "during a probe after the first result": lambda wiring: (
        bool(wiring.measurements.list().items)
        and any(probe.state == "running" and probe.folder for probe in wiring.probes.list().items)
    ),
    "after the last result, before the plan is stored": lambda wiring: (
        sum(
            (one.measured.rung, one.job.cluster.num_gpus) == ("probed", 2)
            for one in wiring.measurements.list().items
        )
        == 3
    ),
}


def kill_at(
    moment: Moment, arguments: list[str], wiring: Wiring, environment: dict[str, str]
) -> None:
    """Starts the command and kills it, without a chance to say good-bye, at this moment."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    runner = subprocess.Popen([*PLANNER, *arguments], cwd=ROOT, env=environment, **silent)  # type: ignore[call-overload]
    until = time.monotonic() + 300.0
    while not moment(wiring):
        assert runner.poll() is None, "it ended before the moment came"
        assert time.monotonic() < until, "the moment did not come"
        time.sleep(0.01)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_measures_nothing_twice(
    cli: Cli, recommend_it: Recommend, tmp_path: Path, wiring: Wiring, environment: dict[str, str]
) -> None:
    path = write(tmp_path, "job.json", {**JOB, "notes": "sleep 1"})
    assert cli("db", "upgrade").returncode == 0
    for moment in MOMENTS.values():
        kill_at(moment, ["recommend", "--job", str(path), "--json"], wiring, environment)
    done = recommend_it(notes="sleep 1")
    plan = said(done)
    assert "going on with" in done.stderr
    (study,) = wiring.tasks.list().items
    bodies = [event.body for event in wiring.tasks.events(study.id)]
    complete = [one for one in plan["probing"]["trials"] if one["state"] == "complete"]
    assert {trial["reason"] for trial in complete} <= {
        body["message"] for body in bodies if body["event"] == "asked"
    }, "the reasons it asked with"
    assert (plan["id"], study.state) == (study.id, "done")
    assert measured_again(items(cli)) == 0
    assert len(itself(items(cli))) == plan["probing"]["probes"] == 3
    probes = wiring.probes.list().items
    spent = sum(map(gpu_seconds_of, probes))
    assert plan["probing"]["gpu_seconds"] == pytest.approx(spent)
    interrupted = [gpu_seconds_of(probe) for probe in probes if probe.failure == "interrupted"]
    assert interrupted, "a probe was killed on its way"
    assert min(interrupted) > 0, "and is paid for too"


def test_a_pool_without_the_gpu_is_refused_with_nothing_stored(recommend_it: Recommend) -> None:
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    done = recommend_it(model="llama3-8b", cluster=cluster)
    assert done.returncode == 2
    assert "has no h100-sxm-80gb" in done.stderr
    assert "gpu: cpu" in done.stderr


@pytest.mark.parametrize(("changed", "failure", "words"), [
    ({"probe": {"max_probes": 1, "pool": "replay:/no.jsonl"}}, "probe_failed", "/no.jsonl"),
    ({"model": "gone"}, "invalid_request", "no model of this name")])  # fmt: skip
def test_a_study_that_cannot_begin_ends_with_the_reason(
    cli: Cli, wiring: Wiring, surroundings: Surroundings, changed: dict[str, Any], failure: str,
    words: str,
) -> None:  # fmt: skip
    study = ask_study(wiring, JOB, allow_files=False, ours=False)
    for one in wiring.tasks.list().items:
        wiring.tasks.cancel(one.id)
    wiring.tasks.add([replace(study, id="plan-lost", request={**JOB, **changed})])
    told = cli("worker", "--once", env=surroundings)
    ended = wiring.tasks.get("plan-lost")
    assert (told.returncode, ended.state, ended.failure) == (0, "failed", failure), told.stderr
    assert words in (ended.message or "")


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False], ids=["after its last event", "before it begins"])
def test_who_has_lost_a_study_stores_neither_plan_nor_event(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr("planner.api.jobs.leases.HEARTBEAT_SECONDS", 1e6)  # none comes in between
    held = ask_study(wiring, JOB, allow_files=False, ours=True)
    loser, heirs = Observer(), []
    loser.stop.set()

    def lose() -> None:
        age(wiring.engine, LEASE_SECONDS + 1.0)
        heirs.append(take_over(wiring.tasks, held))

    def recommend_and_lose(*arguments: Any, **named: Any) -> Plan:
        plan = recommend(*arguments, **named)
        lose()
        return plan

    if begun:
        monkeypatch.setattr("planner.api.jobs.studies.recommend", recommend_and_lose)
    else:
        lose()
    with pytest.raises(ConflictError, match="was lost"):
        run_study(wiring, held, loser)
    monkeypatch.undo()
    with pytest.raises(NotFoundError):
        wiring.store.get_plan(held.id)
    assert bool(wiring.tasks.events(held.id)) is begun
    (heir,) = heirs
    assert (wiring.tasks.get(held.id).state, heir.fencing_token) == ("running", 2)
    plan = run_study(wiring, heir, Observer())
    assert wiring.store.get_plan(held.id) == plan
    assert wiring.tasks.get(held.id).state == "done"


def test_failing_probes_end_in_exit_4_with_their_own_words(recommend_it: Recommend) -> None:
    done = recommend_it(notes="victims")
    assert done.returncode == 4, done.stderr
    assert "KeyError: 'rope'" in done.stderr


def without_torch(folder: Path) -> Surroundings:
    """An interpreter of the probes as one is on whose path torch cannot be found."""
    (folder / "hide" / "torch").mkdir(parents=True)
    (folder / "hide" / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    python, path = folder / "no-torch", f"{folder}/hide:$PYTHONPATH"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return {"PLANNER_PROBE_PYTHON": str(python), "PLANNER_PROBE_PROGRAM": "planner.probes.worker"}


@pytest.mark.slow
def test_without_torch_nothing_is_spent_or_stored_and_the_extra_is_named(
    cli: Cli, tmp_path: Path, wiring: Wiring, surroundings: Surroundings
) -> None:
    assert cli("db", "upgrade").returncode == 0
    one = {**BARE, "layout": {"dp_shard": 2, "ac": "none"}}
    for arguments in (
        ("recommend", "--job", write(tmp_path, "job.json", JOB)),
        ("probe", "--job", write(tmp_path, "one.json", one)),
        ("sweep", "run", write(tmp_path, "sweep.json", SWEEP)),
        ("calibrate", "--pool", "local", "--gpu", "cpu"),
    ):
        done = cli(*arguments, env={**surroundings, **without_torch(tmp_path / str(arguments[0]))})
        assert (done.returncode, done.stdout) == (4, ""), (arguments, done.stderr)
        (line,) = done.stderr.splitlines()
        assert "cannot import torch (No module named 'torch')" in line
        assert "pip install '.[probe]' in planner's checkout" in line
    for stored in (wiring.tasks, wiring.probes, wiring.sweeps):
        assert not stored.list().items


@pytest.mark.slow
def test_what_is_missing_in_mid_study_stops_it_with_that_reason(recommend_it: Recommend) -> None:
    done = recommend_it(notes="missing")
    *before, last = done.stderr.splitlines()
    assert done.returncode == 4, done.stderr
    assert last.startswith("error: no probe can run here: ")
    assert "a_package_that_nobody_has" in last
    probing = json.loads(done.stdout)["probing"]
    assert (probing["probes"], probing["num_ruled_out"]) == (0, 0), "it was no layout that failed"
    assert sum(line.startswith("probe ") for line in before) == 1, "and no second one is tried"


def test_a_sweep_measures_learns_and_reports_changes(
    cli: Cli, tmp_path: Path, surroundings: Surroundings
) -> None:
    first = cli("sweep", "run", write(tmp_path, "sweep.json", SWEEP), "--json", env=surroundings)
    report = said(first)
    (job,) = report["jobs"]
    lines = first.stderr.splitlines()
    of_layouts = [line for line in lines if "[" in line]
    assert of_layouts == [line for line in lines if ": 0.125 s" in line], "a line for each layout"
    assert "" not in lines
    assert [line["why"].split(" ")[0] for line in job["layouts"]] == ["anchor", "rank", "least"]
    assert {line["status"] for line in job["layouts"]} == {"ok"}
    second = said(cli("sweep", "run", report["sweep"], "--json", env=surroundings))
    anchor, *others = second["jobs"][0]["layouts"]
    assert anchor["change"] == 0.0
    assert {line["change"] for line in others} <= {0.0, None}, "what was learnt may name others"
    assert second["jobs"][0]["new_winner"] is False
    shown = cli("sweep", "show", report["sweep"]).stdout
    assert shown.count("3 of 3 layouts measured") == 2
    assert shown.count("GPU-seconds; torch stand-in") == 2
    assert said(cli("calibrate", "--json"))[0]["gpu"] == "cpu"


@pytest.mark.slow
def test_a_terminal_shows_how_far_a_sweep_is(tmp_path: Path, environment: dict[str, str]) -> None:
    near, far = pty.openpty()
    command = [*PLANNER, "sweep", "run", str(write(tmp_path, "sweep.json", SWEEP))]
    terminal = {**environment, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        command, cwd=ROOT, env=terminal, stdout=subprocess.DEVNULL, stderr=far
    ) as running:
        os.close(far)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(pieces(near)))
    assert running.returncode == 0, shown
    assert re.search(r"layouts.* 3/3 ", shown)
    assert shown.count(": 0.125 s") >= 3


def pieces(terminal: int) -> Iterator[str]:
    """What is written to it, until its other end is closed."""
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while piece := stream.read(65536):
            yield piece.decode(errors="replace")


@pytest.mark.slow
def test_a_winner_that_was_faster_and_is_not_measured_again_has_no_heir(
    cli: Cli, wiring: Wiring, surroundings: Surroundings
) -> None:
    sweep = add_sweep(wiring, SWEEP, allow_files=False)
    for number, seconds in enumerate((0.01, 1.0)):
        job = {"winner": "another", "layouts": [{"layout": "another", "step_seconds": seconds}]}
        run = run_now(wiring, sweep, ours=True)
        wiring.tasks.finish(run, JobEnd(state="done", result={"headline": "", "jobs": [job]}))
        (found,) = said(cli("sweep", "run", sweep.id, "--json", env=surroundings))["jobs"]
        assert (found["winner_before"], found["new_winner"]) == ("another", bool(number))


@pytest.mark.slow
def test_a_sweep_killed_goes_on_by_hand_and_under_a_worker(
    cli: Cli, wiring: Wiring, surroundings: Surroundings, environment: dict[str, str]
) -> None:
    jobs = [{**job, "notes": "sleep 0.5"} for job in read_sweep(SWEEP).jobs]
    sweep = add_sweep(
        wiring,
        {**SWEEP, "jobs": jobs, "models": [], "clusters": [], "trainings": []},
        allow_files=False,
    )
    second = MOMENTS["during a probe after the first result"]
    kill_at(second, ["sweep", "run", sweep.id], wiring, environment)
    kill_at(lambda here: len(here.measurements.list().items) >= 2, ["worker"], wiring, environment)
    report = said(cli("sweep", "run", sweep.id, "--json", env=surroundings))
    (run,) = wiring.tasks.list().items
    # by hand; the worker, which puts it back and takes it from the queue; by hand again
    assert (report["id"], run.state, run.fencing_token) == (run.id, "done", 4)
    assert [line["status"] for line in report["jobs"][0]["layouts"]] == ["ok"] * 3
    shapes = [json.dumps(row["layout"], sort_keys=True) for row in items(cli)]
    assert len(shapes) == len(set(shapes)) == 3


@pytest.mark.slow
def test_a_sweep_killed_between_retries_goes_on_with_them(wiring: Wiring) -> None:
    values = {**SWEEP, "measure": {"top_k": 0, "anchors": [{"dp_shard": 2}]}, "retries": 2}
    sweep = add_sweep(wiring, values, allow_files=False)
    run_sweep(wiring, run_now(wiring, sweep, ours=True), Observer())
    (model,) = wiring.probes.list().items
    failed = replace(model, state="failed", measurement_id=None, results=(), message="it failed")
    for failures, attempts, status in (
        (["crash"], 2, "ok"),
        (["crash"] * 3, 3, "failed"),
        (["launch"], 1, "failed"),
    ):
        run = run_now(wiring, sweep, ours=True)
        for number, failure in enumerate(failures):
            name = f"probe-{run.id}-{number}"
            wiring.probes.add([replace(failed, id=name, plan_id=run.id, failure=failure)])
        ended = run_sweep(wiring, run, Observer())
        assert len(wiring.probes.list(plan_id=run.id).items) == attempts
        assert ended.result is not None
        (line,) = ended.result["jobs"][0]["layouts"]
        assert (ended.result["probes"], line["status"]) == (attempts, status)


TOO_LARGE = job_values("llama3-405b", "cpu", 1, 131072, 1)
THREE_PARTS = {**BARE, "search": {"fix": {"tp": 3}}}
THREE_HEADS = {**BARE, "model": {**TINY, "num_attention_heads": 3, "num_key_value_heads": 3}}


@pytest.mark.slow
@pytest.mark.parametrize(("sweep", "code", "words"), [
    ({"jobs": [THREE_PARTS, TOO_LARGE]}, 2, "error: search.fix"),
    ({"jobs": [TOO_LARGE, THREE_PARTS]}, 3, "smallest needs"),
    ({"jobs": [THREE_HEADS], "measure": {"top_k": 0, "anchors": [{"tp": 2}]}}, 2,
        "does not divide"),
], ids=["a request", "nothing fits", "layouts that cannot be run"])  # fmt: skip
def test_a_sweep_that_measures_nothing_ends_as_its_first_failure_would(
    cli: Cli, tmp_path: Path, sweep: dict[str, Any], code: int, words: str
) -> None:
    nothing = cli("sweep", "run", write(tmp_path, "sweep.json", {"name": "n", **sweep}), "--json")
    assert nothing.returncode == code, nothing.stderr
    (line,) = (line for line in nothing.stderr.splitlines() if line.startswith("error: "))
    assert words in line
    assert len(json.loads(nothing.stdout)["jobs"]) == len(sweep["jobs"])


def test_what_kept_a_sweep_from_measuring() -> None:
    def line(status: str, **more: str) -> dict[str, Any]:
        return {"layout": "fsdp 8", "status": status, "message": status, **more}

    def code(*jobs: dict[str, Any]) -> int | None:
        failure = failure_in({"jobs": [{"layouts": [], **job} for job in jobs]})
        return None if failure is None else codes_of(failure).exit_code

    cannot, budget = line("skipped", failure="invalid_request"), line("skipped")
    kinds = ("nothing_fits", "unknown_name", "probe_failed")
    unfit, asked, broken = ({"error": kind, "failure": kind} for kind in kinds)
    assert [code(job) for job in (unfit, asked, broken)] == [3, 2, 4]
    beside = {one: code(unfit, {"layouts": [line(one)]}) for one in ("ok", "oom", "failed")}
    assert beside == {"ok": None, "oom": None, "failed": 4}
    assert code(unfit, {"layouts": [budget]}) == 3
    for lines, expected in (
        ([], None),
        ([budget], None),
        ([cannot], 2),
        ([cannot, budget], None),
        ([cannot, line("failed")], 4),
    ):
        assert code({"layouts": lines}) == expected, lines


@pytest.mark.slow
def test_a_calibration_of_a_pool_that_measures_nothing_says_why(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    monkeypatch.setattr(
        "planner.api.cli.calibrate.grid_of", lambda *_: {"name": "grid", "jobs": [TOO_LARGE]}
    )
    assert root.run(["calibrate", "--gpu", "cpu", "--pool", "local", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)["error"]
    assert (told["type"], "smallest needs" in told["message"]) == ("nothing_fits", True)


def test_a_worker_says_what_starts_and_what_ends(
    cli: Cli, wiring: Wiring, surroundings: Surroundings
) -> None:
    sweep = add_sweep(wiring, SWEEP, allow_files=False)
    run = run_now(wiring, sweep, ours=False)
    study = ask_study(wiring, {**JOB, "notes": "victims"}, allow_files=False, ours=False)
    told = cli("worker", "--once", env=surroundings).stderr.splitlines()
    assert f"{run.id} starts: a run of {sweep.id}, nightly" in told
    assert any(line.startswith(f"{run.id} is done: 3 of 3 layouts measured") for line in told)
    assert f"{study.id} starts: a study of tiny on 2 cpu" in told
    assert any(line.startswith(f"{study.id} is done: ") for line in told)


def test_sweeps_are_scheduled_paused_cancelled(cli: Cli, tmp_path: Path, wiring: Wiring) -> None:
    def scheduled(when: str) -> Any:
        path = write(tmp_path, "sweep.json", {**SWEEP, "schedule": when})
        return cli("sweep", "schedule", path, "--json")

    sweep = said(scheduled("0 2 * * *"))
    assert sweep["next_due_at"].endswith("02:00:00+00:00")
    for command, state in (("pause", "paused"), ("resume", "active"), ("cancel", "cancelled")):
        assert cli("sweep", command, sweep["id"]).returncode == 0
        assert wiring.sweeps.get(sweep["id"]).state == state
    refused = cli("sweep", "resume", sweep["id"])
    assert (refused.returncode != 0, "was cancelled" in refused.stderr) == (True, True)
    bad = scheduled("61 2 * * *")
    assert (bad.returncode, "cron" in bad.stderr) == (2, True)
    endless = cli("sweep", "run", "-", input="name: n\nbudget: {max_gpu_seconds: .inf}\n")
    assert (endless.returncode, endless.stderr[:36]) == (2, "error: sweep.budget.max_gpu_seconds=")


@pytest.fixture
def busy(wiring: Wiring) -> Iterator[TestClient]:
    with TestClient(create_app(wiring.settings), raise_server_exceptions=False) as made:
        yield made


def test_over_http_a_plan_with_probes_is_accepted_followed_and_answered(busy: TestClient) -> None:
    accepted = busy.post("/plan", json={**JOB, "probe": {"max_probes": 1, "steps": 2}})
    assert accepted.status_code == 202, accepted.text
    where = accepted.headers["location"]
    text = busy.get(f"{where}/events").text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert names[-1] == "done"
    assert {"study", "probe"} <= set(names)
    numbers = re.findall(r"id: (\d+)\nevent: study\n", text)
    assert numbers == [str(number) for number in range(1, names.count("study") + 1)]
    for last, rest in (("1", numbers[1:]), (numbers[-1], []), ("mine", numbers)):
        again = busy.get(f"{where}/events", headers={"last-event-id": last}).text
        assert re.findall(r"id: (\d+)\nevent: study\n", again) == rest
        assert again.count("event: probe\n") == 1, "where its probes stand is told anew"
    plan = busy.get(where).json()
    assert (plan["id"], plan["ranked"][0]["source"]) == (accepted.json()["id"], "probed")
    known = busy.get("/calibrations").json()["items"]
    (learnt,) = (item["id"] for item in known if item.get("gpu") == "cpu")
    job = {**BARE, "layout": {"dp_shard": 2}}
    assert busy.post("/estimate", json=job).json()["calibration_id"] == learnt
    (one,) = busy.post("/estimate", json=[job]).json()
    assert one["calibration_id"] == learnt


def test_over_http_without_torch_a_plan_with_probes_is_a_failed_backend(
    tmp_path: Path, sqlite_url: str, surroundings: Surroundings
) -> None:
    given = {**surroundings, **without_torch(tmp_path)}
    with TestClient(create_app(settings_of(sqlite_url, given))) as client:
        answer = client.post("/plan", json=JOB)
        assert answer.status_code == 502
        assert answer.headers["content-type"] == "application/problem+json"
        assert "pip install '.[probe]' in planner's checkout" in answer.text
        assert client.get("/plans").json()["items"] == []


def test_over_http_a_queued_plan_can_be_cancelled(client: TestClient) -> None:
    where = client.post("/plan", json=JOB).headers["location"]
    assert client.get(where).json()["status"] == "queued"
    (line,) = client.get("/plans").json()["items"]
    assert (line["status"], line["model"], line["layout"]) == ("queued", "tiny", None)
    assert client.delete(where).json()["status"] == "cancelled"
    assert client.get(where).json()["status"] == "cancelled"
    assert client.get("/plans").json()["items"] == []


@pytest.mark.slow
def test_over_http_a_cancelled_plan_says_so_and_its_best_is_readable(busy: TestClient) -> None:
    def states(what: str, name: str) -> list[str]:
        return [one[name] for one in busy.get(what).json()["items"]]

    where = busy.post("/plan", json={**JOB, "notes": "sleep 30"}).headers["location"]
    until(lambda: "running" in states("/probes", "state"))
    assert states("/plans", "status") == ["running"]
    busy.delete(where)
    until(lambda: "ranked" in busy.get(where).json())
    assert states("/plans", "status") == ["cancelled"]
    assert states("/plans", "id") == [where.removeprefix("/plans/")]


def test_over_http_plans_and_open_studies_are_read_page_by_page(client: TestClient) -> None:
    paper = {key: value for key, value in JOB.items() if key != "probe"}
    asked = [client.post("/plan", json=job).json()["id"] for job in (paper, JOB, JOB, paper, JOB)]
    for limit in (1, 2, 3, 5):
        found = [line["id"] for page in pages(client, "/plans", limit) for line in page]
        assert found == asked[::-1]


@pytest.mark.slow
def test_over_http_a_sweep_is_stored_run_and_shown(busy: TestClient) -> None:
    made = busy.post("/sweeps", json=SWEEP)
    assert made.status_code == 201, made.text
    where = made.headers["location"]
    assert busy.post(f"{where}/run").status_code == 202
    until(lambda: busy.get(where).json()["runs"][0]["state"] not in ("queued", "running"))
    (run,) = busy.get(where).json()["runs"]
    assert run["state"] == "done", run
    assert run["report"]["headline"].startswith("3 of 3 layouts measured")
    assert busy.get("/sweeps").json()["items"][0]["id"] == made.json()["id"]
    assert busy.delete(where).json()["state"] == "cancelled"
    assert busy.get("/sweeps/sweep-nope").status_code == 404


@pytest.mark.slow
def test_a_pool_too_small_for_the_layouts_leaves_the_plan_on_paper(recommend_it: Recommend) -> None:
    """The CPU pool has 16 processes."""
    cluster = {"gpu": "cpu", "num_gpus": 32, "gpus_per_node": 4}
    plan = said(recommend_it(cluster=cluster, training={"seq_len": 32, "global_batch_size": 128}))
    assert plan["probing"]["probes"] == 0
    assert "the pool is smaller than 32 GPUs" in plan["probing"]["stopped"]
    assert plan["ranked"][0]["measurement"] is None


@pytest.mark.torch
@pytest.mark.slow
def test_the_loop_with_the_real_program(recommend_it: Recommend) -> None:
    needed("torch")
    plan = said(recommend_it(REAL_PROBE, probe={"max_probes": 1, "steps": 2}))
    assert plan["probing"]["probes"] == 1
    # a slow run on a busy machine may cost the measured layout its first rank
    (run,) = (entry["measurement"] for entry in plan["ranked"] if entry["measurement"])
    assert run["step_seconds"] > 0
