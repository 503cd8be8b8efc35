"""One suite for every runner: this machine's CPU pool under the real torchrun, and recordings."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError
from planner.intake.jobs import read_job
from probes.campaign import Pool
from probes.launch import Launcher, LaunchSettings, Watch
from probes.pools.local import LocalPool, LocalSettings
from probes.pools.replay import ReplayPool
from probes.protocol import Failed, FailureKind, Measured, OutOfMemory, ProbeTask
from tests.conftest import needed
from tests.stand_ins import worker

STAND_IN = str(Path(worker.__file__))
JOB: dict[str, Any] = {
    "model": "debug-tiny", "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"seq_len": 64, "global_batch_size": 4},
    "layout": {"dp_shard": 2, "ac": "none"},
}  # fmt: skip
NOTES = {"ok": "", "oom": "oom", "killed": "die", "victims": "victims"}
needed("torch")


def task(how: str, **more: Any) -> ProbeTask:
    """One that ends as told; the recordings tell tasks apart by their seed's stand-in, the
    batch.
    """
    batch = 4 * (1 + list(NOTES).index(how))
    job = {**JOB, "notes": NOTES[how], "training": {"seq_len": 64, "global_batch_size": batch}}
    return ProbeTask(id=f"probe-{how}", job=job, device="cpu", time_limit_seconds=60.0, **more)


def local(folder: Path) -> LocalPool:
    launcher = Launcher(LaunchSettings(folder=folder / "probes", worker=STAND_IN))
    return LocalPool(launcher, LocalSettings(leases=folder / "leases", cpu_slots=4))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of a real pool, in a file."""
    folder = tmp_path_factory.mktemp("recorded")
    pool = local(folder)
    (folder / "results.jsonl").write_text(
        "\n".join(pool.run(task(how)).model_dump_json() for how in NOTES)
    )
    return folder / "results.jsonl"


@pytest.fixture(params=["local", "replay"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Pool:
    return (
        local(tmp_path)
        if request.param == "local"
        else ReplayPool.from_file(request.getfixturevalue("recorded"))
    )


class TestRunners:
    def test_numbers_come_back_with_the_task_that_asked(self, pool: Pool) -> None:
        asked = task("ok", warmup_steps=1)
        result = pool.run(asked)
        assert isinstance(result.outcome, Measured)
        assert (result.task, result.complete, result.outcome.step_seconds) == (asked, True, 0.125)
        assert result.gpu_seconds == pytest.approx(2 * result.wall_seconds)
        measurement = result.measurement()
        assert (
            measurement.id,
            measurement.measured.rung,
            measurement.measured.peak_reserved_bytes,
        ) == ("probe-ok", "probed", 2**22)

    def test_out_of_memory_is_a_result(self, pool: Pool) -> None:
        outcome = pool.run(task("oom")).outcome
        assert isinstance(outcome, OutOfMemory)
        assert (outcome.rank, outcome.attempted_bytes, outcome.allocated_bytes) == (
            1,
            2**31,
            round(70.5 * 2**30),
        )

    def test_a_killed_worker_is_named(self, pool: Pool) -> None:
        outcome = pool.run(task("killed")).outcome
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.rank) == (FailureKind.KILLED, 1)

    def test_the_first_cause_is_told_not_the_victims(self, pool: Pool) -> None:
        outcome = pool.run(task("victims")).outcome
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.rank, outcome.message) == (
            FailureKind.CRASH,
            1,
            "KeyError: 'rope'",
        )

    def test_it_says_what_it_can_run(self, pool: Pool) -> None:
        capacity = pool.capacity(read_job(JOB).cluster)
        assert (capacity.device, capacity.num_devices >= 2) == ("cpu", True)

    def test_what_cannot_be_run_is_an_error_not_a_result(self, pool: Pool) -> None:
        wide = {**JOB, "cluster": {"gpu": "cpu", "num_gpus": 64}, "layout": {"dp_shard": 64}}
        wide["training"] = {"seq_len": 64, "global_batch_size": 64}
        with pytest.raises(ProbeError):
            pool.run(ProbeTask(id="wide", job=wide, device="cpu"))


class TestReplay:
    def test_repeats_are_given_in_turn(self, recorded: Path) -> None:
        pool = ReplayPool.from_file(recorded)
        first = pool.run(task("ok"))
        slower = first.model_copy(
            update={"outcome": first.outcome.model_copy(update={"step_seconds": 0.25})}
        )
        pool = ReplayPool([first, slower])
        seconds = [
            outcome.step_seconds
            for _ in range(3)
            if isinstance(outcome := pool.run(task("ok")).outcome, Measured)
        ]
        assert seconds == [0.125, 0.25, 0.125]

    def test_published_rows_are_recordings_too(self) -> None:
        import json

        path = Path(__file__).parents[2] / "benchmarks" / "measured" / "public.jsonl"
        row = json.loads(path.read_text().splitlines()[0])
        pool = ReplayPool.from_file(path)
        job = {key: row[key] for key in ("model", "cluster", "training", "layout")}
        result = pool.run(ProbeTask(id="probe-1", job=job))
        assert result.measurement().measured.step_seconds == row["measured"]["step_seconds"]

    def test_a_file_that_is_no_recording_is_refused_by_line(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text('\n{"model": "llama3-8b"}\n')
        with pytest.raises(ProbeError, match="line 2"):
            ReplayPool.from_file(tmp_path / "x.jsonl")
        with pytest.raises(ProbeError, match="No such file"):
            ReplayPool.from_file(tmp_path / "y.jsonl")


class TestLocalPool:
    def test_probes_wait_for_devices_that_others_hold(self, tmp_path: Path) -> None:
        pool = local(tmp_path)
        pool.settings = LocalSettings(leases=tmp_path / "leases", cpu_slots=2)
        spans: list[tuple[float, float]] = []

        def one(number: int) -> None:
            asked = ProbeTask(
                id=f"probe-{number}",
                job={**JOB, "notes": "sleep 0.5"},
                device="cpu",
                time_limit_seconds=60.0,
            )
            result = pool.run(asked)
            assert result.outcome.status == "ok"
            spans.append((time.time() - result.wall_seconds, time.time()))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (_, first_end), (second_start, _) = sorted(spans)
        assert second_start > first_end - 0.2

    def test_a_wait_can_be_ended(self, tmp_path: Path) -> None:
        pool = local(tmp_path)
        busy = threading.Thread(
            target=pool.run,
            args=(task("ok").model_copy(update={"job": {**JOB, "notes": "sleep 3"}}),),
        )
        pool.settings = LocalSettings(leases=tmp_path / "leases", cpu_slots=1)
        busy.start()
        time.sleep(0.5)
        watch = Watch()
        threading.Timer(0.5, watch.stop.set).start()
        with pytest.raises(ProbeError, match="stopped while waiting"):
            pool.run(task("ok"), watch)
        busy.join()
