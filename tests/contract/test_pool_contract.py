"""One suite for every kind of pool, each opened by its name as a user writes it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError, SpecError
from planner.intake.jobs import read_job
from planner.probes.launch import LaunchSettings, Watch
from planner.probes.pools import BACKENDS, backend_of, open_pool
from planner.probes.pools.protocol import Pool, PoolSettings
from planner.probes.pools.replay import ReplayPool
from planner.probes.preflight import Need
from planner.probes.protocol import (
    Failed,
    FailureKind,
    MeasuredRun,
    OutOfMemory,
    ProbeResult,
    ProbeTask,
)
from tests.conftest import ROOT, job_values, needed
from tests.slurm_cluster import PATH
from tests.stand_ins import light_python, worker

JOB: dict[str, Any] = {
    "model": "debug-tiny", "cluster": {"gpu": "cpu", "num_gpus": 2, "gpus_per_node": 1},
    "training": {"seq_len": 64, "global_batch_size": 4},
    "layout": {"dp_shard": 2, "ac": "none"},
}  # fmt: skip
# what the worker does, by the notes of the job, and the fields of the task that differ
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ok": ("", {"warmup_steps": 1}), "oom": ("oom", {}), "killed": ("die", {}),
    "victims": ("victims", {}), "slow": ("sleep 600", {"time_limit_seconds": 3.0}),
    "emulated": ("", {"emulate_rank": 1, "fake_tensors": True}),
}  # fmt: skip
needed("torch")


def task(case: str) -> ProbeTask:
    """A task that ends as its case says. Recordings tell the cases apart by the batch size."""
    notes, fields = CASES[case]
    batch = 4 * (1 + list(CASES).index(case))
    job = {**JOB, "notes": notes, "training": {"seq_len": 64, "global_batch_size": batch}}
    values = {"time_limit_seconds": 300.0, **fields}
    return ProbeTask(id=f"probe-{case}", job=job, device="cpu", **values)


def settings(folder: Path, python: str | None = None) -> PoolSettings:
    program = {} if python is None else {"python": python}
    launch = LaunchSettings(folder=folder / "probes", worker=worker.__file__, **program)
    return PoolSettings(launch=launch, leases=folder / "leases")


@dataclass(frozen=True)
class Subject:
    """A pool, and what became of every case that ran on it."""

    pool: Pool
    results: dict[str, ProbeResult]

    @classmethod
    def of(cls, pool: Pool) -> "Subject":
        with ThreadPoolExecutor(len(CASES)) as threads:
            results = threads.map(lambda case: pool.run(task(case)), CASES)
            return cls(pool, dict(zip(CASES, results, strict=True)))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("local")
    return Subject.of(open_pool("local", settings(folder, str(light_python.install(folder)))))


@pytest.fixture(scope="module")
def recorded(local: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of a real pool, in a file."""
    path = tmp_path_factory.mktemp("recorded") / "results.jsonl"
    path.write_text("\n".join(result.model_dump_json() for result in local.results.values()))
    return path


@pytest.fixture(scope="module")
def replay(recorded: Path) -> Subject:
    return Subject.of(open_pool(f"replay:{recorded}", settings(recorded.parent)))


@pytest.fixture(scope="module")
def on_slurm(slurm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(slurm))
        patch.setenv("PATH", PATH)
        folder = tmp_path_factory.mktemp("on-slurm")
        python = str(light_python.install(folder))
        yield Subject.of(open_pool("slurm:debug", settings(folder, python)))


FIXTURES = {"local": "local", "replay": "replay", "slurm": "on_slurm"}


@pytest.fixture(params=sorted(BACKENDS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(FIXTURES[request.param])


class TestPools:
    def failed(self, subject: Subject, case: str) -> Failed:
        outcome = subject.results[case].outcome
        assert isinstance(outcome, Failed), outcome
        return outcome

    def test_it_is_what_its_name_says_and_ready_before_it_runs(self, subject: Subject) -> None:
        assert type(subject.pool) in [one.load() for one in BACKENDS.values()]
        subject.pool.check(Need.of(read_job(JOB), "reference"))

    def test_numbers_come_back_with_the_task_that_asked(self, subject: Subject) -> None:
        result = subject.results["ok"]
        assert isinstance(result.outcome, MeasuredRun), result
        assert (result.task, result.complete) == (task("ok"), True)
        assert result.outcome.step_seconds == worker.STEP_SECONDS
        assert result.gpu_seconds == pytest.approx(2 * result.wall_seconds)
        measurement = result.measurement()
        assert (measurement.id, measurement.measured.rung) == ("probe-ok", "probed")
        assert measurement.measured.peak_reserved_bytes == 2**22

    def test_out_of_memory_is_a_result(self, subject: Subject) -> None:
        outcome = subject.results["oom"].outcome
        assert isinstance(outcome, OutOfMemory), outcome
        bytes_ = (outcome.attempted_bytes, outcome.allocated_bytes)
        assert (outcome.rank, bytes_) == (1, (2**31, round(70.5 * 2**30)))

    def test_a_killed_worker_and_the_cause_are_named_not_victims(self, subject: Subject) -> None:
        killed, first = self.failed(subject, "killed"), self.failed(subject, "victims")
        assert (killed.kind, killed.rank) == (FailureKind.KILLED, 1)
        assert (first.kind, first.rank, first.message) == (FailureKind.CRASH, 1, "KeyError: 'rope'")

    def test_the_time_limit_ends_a_probe(self, subject: Subject) -> None:
        assert self.failed(subject, "slow").kind == FailureKind.TIMEOUT
        assert subject.results["slow"].wall_seconds >= 3.0

    def test_what_it_can_run_it_runs(self, subject: Subject) -> None:
        capacity = subject.pool.capacity(read_job(JOB).cluster)
        assert (capacity.device, capacity.num_devices >= 2) == ("cpu", True)
        result = subject.results["emulated"]
        assert isinstance(result.outcome, MeasuredRun), result
        assert (result.rung, result.outcome.step_seconds) == ("emulated", None)

    def test_a_stop_ends_a_probe(self, subject: Subject) -> None:
        if not subject.pool.capacity(read_job(JOB).cluster).measures:
            return  # a recording takes no time
        watch = Watch()
        watch.stop.set()
        outcome = subject.pool.run(task("slow"), watch).outcome
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind == FailureKind.INTERRUPTED

    def test_tasks_run_on_what_is_held_for_them(self, subject: Subject) -> None:
        cluster = read_job(JOB).cluster
        with subject.pool.hold("held", cluster, num_devices=2, seconds=600.0) as held:
            outcomes = [held.run(task("ok")).outcome for _ in range(2)]
        assert [one.status for one in outcomes] == ["ok", "ok"]

    def test_nothing_is_left_of_what_has_ended(self, subject: Subject) -> None:
        assert not any(subject.pool.is_left(task(case).id) for case in CASES)
        subject.pool.end_left("probe-ok")

    def test_what_cannot_be_run_is_an_error_not_a_result(self, subject: Subject) -> None:
        wide = {**job_values("debug-tiny", "cpu", 64, 64, 64), "layout": {"dp_shard": 64}}
        wide["cluster"]["gpus_per_node"] = 2
        with pytest.raises(ProbeError):
            subject.pool.run(ProbeTask(id="wide", job=wide, device="cpu"))


class TestNames:
    @pytest.mark.parametrize("text", ["cloud", "local:x", "slurm:", "replay", "replay:", ""])
    def test_what_is_no_pool_is_refused_with_all_that_are(self, text: str) -> None:
        fix = r"use local, slurm, slurm:PARTITION or replay:FILE\.jsonl"
        with pytest.raises(SpecError, match=fix):
            backend_of(text)


class TestReplay:
    def test_repeats_are_given_in_turn(self, local: Subject) -> None:
        first = local.results["ok"]
        outcome = first.outcome.model_copy(update={"step_seconds": 0.25})
        pool = ReplayPool([first, first.model_copy(update={"outcome": outcome})])
        given = [pool.run(task("ok")).outcome for _ in range(3)]
        seconds = [one.step_seconds for one in given if isinstance(one, MeasuredRun)]
        assert seconds == [0.125, 0.25, 0.125]

    def test_published_rows_are_recordings_too(self) -> None:
        path = ROOT / "benchmarks" / "measured" / "public.jsonl"
        row = json.loads(path.read_text().splitlines()[0])
        job = {key: row[key] for key in ("model", "cluster", "training", "layout")}
        result = ReplayPool.from_file(path).run(ProbeTask(id="probe-1", job=job))
        assert result.measurement().measured.step_seconds == row["measured"]["step_seconds"]

    def test_a_file_that_is_no_recording_is_refused_by_line(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text('\n{"model": "llama3-8b"}\n')
        for name, words in (("x", "line 2"), ("y", "No such file")):
            with pytest.raises(ProbeError, match=words):
                ReplayPool.from_file(tmp_path / f"{name}.jsonl")
