"""Classes and first causes: recorded logs, and the texts that torch, NCCL and the driver print."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.probes.evidence import Evidence, RankError, read_errors, read_stacks
from planner.probes.failures import classify
from planner.probes.protocol import TAKEN_AWAY, Failed, FailureKind, OutOfMemory
from planner.probes.trainers.titan_log import failure as titan_failure
from planner.probes.trainers.titan_log import read_log
from planner.specs.measurement import BLAMELESS

RECORDED = Path(__file__).parents[1] / "fixtures" / "failures"
EXIT = Evidence(reason="exit", exit_code=1, time_limit_seconds=60.0)
STUCK = (
    'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 5 in wait\n\n'
    'Current thread 0x2 (most recent call first):\n  File "/w/data.py", line 9 in fetch\n  '
    'File "/w/train.py", line 3 in main\n'
)
WAITING = (
    "Current thread 0x2 (most recent call first):\n  File "
    '"/v/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
)


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def raised(
    rank: int, said: str, at: float = 0.0, file: str = "/w/train.py", **more: Any
) -> RankError:
    name, _, message = said.partition(": ")
    text = f'Traceback (most recent call last):\n  File "{file}", line 1, in main\n{said}\n'
    return RankError(rank=rank, type=name, message=message, traceback=text, time=at, **more)


def failed(**left: Any) -> Failed:
    """How a probe ended that left this, with exit code 1 unless said otherwise."""
    outcome = classify(replace(EXIT, **left))
    assert isinstance(outcome, Failed), outcome
    return outcome


def told(*errors: RankError, **left: Any) -> tuple[FailureKind, int | None, str]:
    found = failed(errors=errors, **left)
    return found.kind, found.rank, found.message


def out_of_memory(**left: Any) -> OutOfMemory:
    outcome = classify(replace(EXIT, **left))
    assert isinstance(outcome, OutOfMemory), outcome
    return outcome


PEER = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:12701: Connection "
    "closed by peer"
)
GONE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited "
    "or there was a network error"
)


class TestFirstCause:
    def test_the_last_of_eight_is_never_the_cause(self) -> None:
        ranks = [rank for rank in range(8) if rank != 5]
        errors = [raised(rank, PEER if rank % 2 else GONE, at=rank) for rank in ranks]
        errors.append(raised(5, "KeyError: 'rope'", at=7.5))
        assert told(*errors) == (FailureKind.CRASH, 5, "KeyError: 'rope'")
        assert "KeyError" in str(failed(errors=tuple(errors)).traceback)

    def test_a_killed_rank_is_found_behind_the_victims_of_its_death(self) -> None:
        for errors in ((), (raised(0, PEER),)):
            kind, rank, message = told(*errors, log=recorded("torch-2.13-gloo-rank-killed.log"))
            assert (kind, rank) == (FailureKind.KILLED, 1)
            assert "signal 9 (SIGKILL)" in message

    def test_ranks_that_somebody_asked_to_end_are_named_where_no_other_did(self) -> None:
        line = "failed (exitcode: {}) local_rank: {} (pid: {}) of binary: python\n"
        log = line.format(-15, 1, 11)
        ended = "rank 1 was ended by signal 15 (SIGTERM)"
        assert told(log=log) == (FailureKind.KILLED, 1, ended)
        other = failed(log=log + line.format(-11, 2, 12))
        assert other.message == "rank 2 was ended by signal 11 (SIGSEGV)"

    def test_the_kernel_says_why_it_killed(self) -> None:
        log = recorded("torch-2.13-gloo-rank-killed.log")
        pid = log.rpartition("received by PID ")[2].split()[0]
        kernel = f"Out of memory: Killed process {pid} (python) total-vm:9000kB, anon-rss:8000kB"
        assert "ran out of host memory" in failed(log=log, kernel=kernel).message

    def test_a_rank_that_reports_a_timeout_is_healthy(self) -> None:
        log = recorded("torch-2.13-gloo-timeout.log")
        kind, rank, message = told(log=log, stacks={0: WAITING, 1: STUCK})
        assert (kind, rank) == (FailureKind.HANG, 1)
        assert message.startswith("rank 0 waited in vain")
        assert "rank 1 was in fetch (data.py:9)" in message

    def test_a_real_error_beats_the_timeout_it_caused(self) -> None:
        words = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
        own = raised(2, "ZeroDivisionError: division by zero", at=2.0)
        assert told(raised(0, words, at=1.0), own)[:2] == (FailureKind.CRASH, 2)

    def test_of_causes_the_earlier_and_only_victims_is_still_an_answer(self) -> None:
        causes = (raised(3, "KeyError: 'a'", at=2.0), raised(1, "KeyError: 'b'", at=3.0))
        assert told(*causes)[:2] == (FailureKind.CRASH, 3)
        victims = (raised(4, PEER, at=2.0), raised(1, PEER, at=1.0))
        assert told(*victims)[:2] == (FailureKind.CRASH, 4)

    def test_printed_tracebacks_serve_where_there_are_no_error_files(self) -> None:
        log = (
            "[rank1]:[rank1]: Traceback (most recent call last):\n"
            "[rank0]:Traceback (most recent call last):\n"
            '[rank1]:[rank1]:   File "/w/a.py", line 1, in f\n'
            '[rank0]:  File "/w/b.py", line 2, in g\n'
            "[rank0]:RuntimeError: Connection closed by peer\n"
            "[rank1]:[rank1]: KeyError: 'x'\n"
        )
        found = failed(log=log)
        assert (found.rank, found.message) == (1, "KeyError: 'x'")
        own = "Traceback (most recent call last):\n  File \"/w/a.py\", line 1, in f\nKeyError: 'x'"
        assert found.traceback == own


NCCL = (
    "[rank{0}]:[E1121 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught "
    "collective operation timeout: "
    "WorkNCCL(SeqNum=15, OpType=ALLREDUCE, NumelIn=4661, NumelOut=4661, Timeout(ms)=60000) "
    "ran for 60060 milliseconds before timing out.\n"
)
ABORTED = (
    "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : "
    "-6 (pid: 100)\n"
)
TORCH = "/v/torch/distributed/"
PIPELINING = f"{TORCH}pipelining/schedules.py"


class TestKinds:
    def test_a_watchdog_is_a_hang_not_the_abort_that_follows(self) -> None:
        found = failed(log=NCCL.format(0) + NCCL.format(3) + ABORTED)
        assert found.kind == FailureKind.HANG
        words = "rank 0, 3 waited in vain: WorkNCCL(SeqNum=15, OpType=ALLREDUCE"
        assert found.message.startswith(words)

    @pytest.mark.parametrize(("kind", "said"), [
        ("import-error", "AssertionError: Torch not compiled with CUDA enabled"),
        ("non-finite-loss", "FloatingPointError: loss at step 3 is nan"),
        ("non-finite-loss", "planner.probes.reference.errors.NonFiniteLoss: step 2"),
        ("invalid-layout", "planner.errors.SpecError: tp=16: does not divide 8 KV heads"),
        ("crash", "RuntimeError: expected scalar type Float but found BFloat16"),
    ])  # fmt: skip
    def test_texts(self, kind: str, said: str) -> None:
        found, rank, message = told(raised(2, said))
        assert (found, rank, message.split("; remedy: ")[0]) == (kind, 2, said)

    def test_a_peer_that_never_came_is_a_hang(self) -> None:
        said = (
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. "
            "1/2 clients joined."
        )
        kind, rank, message = told(raised(0, said))
        assert (kind, rank, said in message) == (FailureKind.HANG, None, True)

    @pytest.mark.parametrize(("kind", "said", "file"), [
        ("invalid-layout", "ValueError: n_microbatches must be at least 4", PIPELINING),
        ("invalid-layout", "RuntimeError: Mesh should not be bigger", f"{TORCH}device_mesh.py"),
        ("invalid-layout", "AssertionError: seq 7 % tp 2", "/x/probes/reference/tensor.py"),
        ("crash", "ValueError: bad", "/v/numpy/core.py"),
        ("crash", "RuntimeError: unknown", f"{TORCH}distributed_c10d.py"),
    ])  # fmt: skip
    def test_a_rule_is_told_by_its_place(self, kind: str, said: str, file: str) -> None:
        assert told(raised(0, said, file=file))[0] == kind

    def test_a_program_may_say_the_class_itself(self) -> None:
        error = raised(1, "ValueError: a rule of ours", kind="invalid-layout")
        assert told(error)[0] == FailureKind.INVALID_LAYOUT

    def test_a_lost_gpu_explains_every_error(self) -> None:
        kernel = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen "
        kind, _, message = told(raised(0, PEER), kernel=f"{kernel}off the bus.")
        assert (kind, "Xid 79" in message) == (FailureKind.LOST_GPU, True)
        kernel = "NVRM: The NVIDIA GPU 0000:b3:00.0 NVRM: fallen off the bus and is not responding "
        assert told(kernel=f"{kernel}to commands.")[0] == FailureKind.LOST_GPU

    def test_an_xid_of_the_program_is_no_lost_gpu(self) -> None:
        kernel = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python3, Ch 00000001, MMU Fault"
        words = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        assert told(raised(0, words), kernel=kernel)[0] == FailureKind.CRASH


class TestOutOfMemory:
    GPU = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 5 has a "
        "total capacity of 23.43 GiB of which "
        "210.06 MiB is free. Including non-PyTorch memory, this process has 23.22 GiB memory "
        "in use. Of the allocated memory 22.41 GiB is "
        "allocated by PyTorch, and 206.09 MiB is reserved by PyTorch but unallocated."
    )

    def test_rank_and_bytes(self) -> None:
        found = out_of_memory(errors=(raised(7, PEER, at=0.0), raised(5, self.GPU, at=1.0)))
        assert found.rank == 5
        assert found.attempted_bytes == round(1.96 * 2**30)
        assert found.allocated_bytes == round(22.41 * 2**30)

    @pytest.mark.parametrize(("attempted", "said"), [
        (None, "RuntimeError: CUDA error: out of memory"),
        (None, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"),
        (None, "torch.distributed.DistBackendError: NCCL\nCuda failure 2 'out of memory'"),
        (4000, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "4000 bytes."),
        (2**29, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. G"),
    ])  # fmt: skip
    def test_other_ways_to_say_it(self, attempted: int | None, said: str) -> None:
        found = out_of_memory(errors=(raised(1, said),))
        assert (found.attempted_bytes, found.allocated_bytes) == (attempted, None)

    def test_it_is_told_from_the_log_too(self) -> None:
        lines = ("Traceback (most recent call last):", '  File "/w/a.py", line 1, in f', self.GPU)
        log = "".join(f"[rank1]:{line}\n" for line in lines)
        assert out_of_memory(log=log).rank == 1

    OTHERS = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total "
        "capacity of 79.10 GiB of which 311.25 MiB is free. {others}Of the allocated memory 36.10 "
        "GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
    )
    OWN = "Including non-PyTorch memory, this process has 38.65 GiB memory in use. "

    @pytest.mark.parametrize(
        ("tried", "others", "foreign"),
        [
            ("512.00 MiB", f"Process 5 has 40.12 GiB memory in use. {OWN}", True),
            ("512.00 MiB", f"{OWN}Process 5 has 30 GiB memory in use. Process 6 has 10 GiB "
             "memory in use. ", True),
            # in a container the program's own memory is a process too
            ("512.00 MiB", "Process 5 has 38.65 GiB memory in use. Process 6 has 40.12 GiB memory "
             "in use. ", True),
            ("512.00 MiB", "Process 5 has 78.79 GiB memory in use. ", False),
            # a desktop
            ("512.00 MiB", f"Process 5 has 900.00 MiB memory in use. {OWN}", False),
            # it would not have fitted without the others
            ("60.00 GiB", f"Process 5 has 40.12 GiB memory in use. {OWN}", False),
            ("512.00 MiB", OWN, False),
        ],
    )  # fmt: skip
    def test_memory_of_others_is_foreign(self, tried: str, others: str, foreign: bool) -> None:
        said = self.OTHERS.format(tried=tried, others=others)
        # the program names the class before anybody has read the message
        for kind in (None, "oom"):
            outcome = classify(replace(EXIT, errors=(raised(0, said, kind=kind),)))
            assert isinstance(outcome, Failed if foreign else OutOfMemory), outcome
            assert not foreign or outcome.kind == FailureKind.FOREIGN


TEXTS = [json.loads(line) for line in recorded("texts.jsonl").splitlines()]
OTHERS = [json.loads(line) for line in recorded("others.jsonl").splitlines()]
PROGRAMS = ["reference", "torchtitan"]


class TestRealTexts:
    """Texts of torch, NCCL, Triton, Slurm and the driver: accepted classes, words of the remedy."""

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("text", TEXTS, ids=lambda text: text["name"])
    def test_each_has_its_class_and_a_remedy(self, text: dict[str, Any], program: str) -> None:
        found = of_program(program, replace(EXIT, log=text["log"], kernel=text["kernel_log"]))
        assert kind_of(found) in text["accepted"]
        assert text["remedy_names"].lower() in found.message.lower()
        assert not text["remedy_names"] or "; remedy: " in found.message

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("text", OTHERS, ids=lambda text: text["said"][-40:])
    def test_others_than_the_table_is_made_for(self, text: dict[str, Any], program: str) -> None:
        start = 'Traceback (most recent call last):\n  File "/w/a.py", line 1, in f\n'
        lines = "\n".join(
            f"[rank1]:[rank1]: {line}" for line in (start + text["said"]).splitlines()
        )
        log = f"{lines}\n[rank1]:[W1127 09:00:00] leaked\n"
        found = of_program(program, replace(EXIT, log=log))
        assert kind_of(found) == text["kind"]
        assert text["remedy"] in found.message.rpartition("; remedy: ")[2]
        assert "leaked" not in found.message
        machine = text.get("machine")
        assert machine is None or not isinstance(found, Failed) or found.machine is machine

    def test_words_of_a_log_do_not_replace_the_cause(self) -> None:
        quiet = "gpu:1:1 [0] NCCL INFO NET/IB : No device found.\n"
        log = f"{quiet}[rank1]:gpu:1:1 [0] NCCL WARN NET/IB: Got completion with status=12\n"
        victim = (raised(0, PEER),)
        own = failed(log=log, errors=(*victim, raised(1, "KeyError: 'x'")))
        assert (own.message, own.machine) == ("KeyError: 'x'", False)
        killed = f"{log}{recorded('torch-2.13-gloo-rank-killed.log')}"
        assert "remedy" not in failed(log=killed).message
        found = failed(log=quiet, errors=victim)
        assert (found.kind, found.machine) == (FailureKind.CRASH, False)
        assert failed(log=log, errors=victim).machine

    def test_what_a_pool_takes_away_is_blamed_on_no_layout(self) -> None:
        assert {*TAKEN_AWAY, FailureKind.FOREIGN, FailureKind.LOST_GPU} <= BLAMELESS


def kind_of(found: OutOfMemory | Failed) -> str:
    return found.kind if isinstance(found, Failed) else "oom"


def of_program(program: str, evidence: Evidence) -> OutOfMemory | Failed:
    if program == "reference":
        return classify(evidence)
    return titan_failure(read_log(evidence.log), evidence)


class TestEndsFromOutside:
    def test_time_limit_says_where_each_rank_was(self) -> None:
        found = failed(reason="time-limit", exit_code=None, stacks={0: WAITING, 1: STUCK})
        assert (found.kind, found.rank) == (FailureKind.TIMEOUT, 1)
        assert (
            "time limit of 60 s; rank 0 was in all_reduce (distributed_c10d.py:7); rank 1 was in "
            "fetch (data.py:9)"
        ) in found.message
        assert "fetch" in str(found.traceback)

    @pytest.mark.parametrize("reason", ["asked", "runner-gone"])
    def test_interrupted_unless_a_cause_came_first(self, reason: str) -> None:
        assert told(reason=reason, exit_code=None)[0] == FailureKind.INTERRUPTED
        error = raised(0, "ZeroDivisionError: division by zero")
        assert told(error, reason=reason, exit_code=None)[0] == FailureKind.CRASH

    def test_a_killed_launcher_and_no_word_at_all(self) -> None:
        ended = "the launcher was ended by signal 9 (SIGKILL)"
        assert told(exit_code=-9) == (FailureKind.KILLED, None, ended)
        nothing = "the program ended with exit code 1 and without its result: it left no output"
        assert failed().message == nothing
        log = "usage: worker TASK\n====\n"
        assert "usage: worker" in failed(exit_code=2, log=log).message


def test_error_files_are_read_in_order_of_time(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    for rank, moment in ((0, 3.0), (11, 1.0)):
        values = {"type": "ValueError", "message": "m", "traceback": "t", "time": moment}
        (tmp_path / f"result.json.rank{rank}.error.json").write_text(json.dumps(values))
    (tmp_path / "result.json.rank2.error.json").write_text("{half")
    (tmp_path / "result.json.rank3.stack").write_text("")
    (tmp_path / "result.json.rank4.stack").write_text("here")
    assert [error.rank for error in read_errors(result)] == [11, 0]
    assert read_stacks(result) == {4: "here"}


@pytest.mark.parametrize(
    ("reason", "kind"), [("time-limit", FailureKind.TIMEOUT), ("exit", FailureKind.HANG)]
)
def test_a_stopped_rank_is_named_and_not_who_waited(reason: str, kind: FailureKind) -> None:
    found, rank, message = told(reason=reason, stacks={0: WAITING}, stopped=(2,))
    assert (found, rank) == (kind, 2)
    assert "rank 2 was stopped by a signal" in message
    assert failed(reason="time-limit", stacks={0: WAITING}).rank != 2
