"""Classes and first causes: recorded logs, and the texts that torch, NCCL and the driver print."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.probes.evidence import Evidence, RankError, read_errors, read_stacks
from planner.probes.failures import classify
from planner.probes.protocol import TAKEN_AWAY, Failed, FailureKind, OutOfMemory
from planner.probes.trainers.titan_failures import failure as titan_failure
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


def failed(evidence: Evidence) -> Failed:
    outcome = classify(evidence)
    assert isinstance(outcome, Failed), outcome
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
        found = failed(replace(EXIT, errors=tuple(errors)))
        assert (found.kind, found.rank, found.message) == (FailureKind.CRASH, 5, "KeyError: 'rope'")
        assert "KeyError" in found.traceback

    def test_of_two_causes_the_earlier(self) -> None:
        errors = (raised(3, "KeyError: 'a'", at=2.0), raised(1, "KeyError: 'b'", at=3.0))
        assert failed(replace(EXIT, errors=errors)).rank == 3

    def test_a_killed_rank_is_found_behind_the_victims_of_its_death(self) -> None:
        log = recorded("torch-2.13-gloo-rank-killed.log")
        for errors in ((), (raised(0, PEER),)):
            found = failed(replace(EXIT, log=log, errors=errors))
            assert (found.kind, found.rank) == (FailureKind.KILLED, 1)
            assert "signal 9 (SIGKILL)" in found.message

    def test_ranks_that_somebody_asked_to_end_are_named_where_no_other_did(self) -> None:
        line = "failed (exitcode: {}) local_rank: {} (pid: {}) of binary: python\n"
        log = line.format(-15, 1, 11)
        found = failed(replace(EXIT, log=log))
        assert (found.kind, found.rank) == (FailureKind.KILLED, 1)
        assert found.message == "rank 1 was ended by signal 15 (SIGTERM)"
        other = failed(replace(EXIT, log=log + line.format(-11, 2, 12)))
        assert other.message == "rank 2 was ended by signal 11 (SIGSEGV)"

    def test_the_kernel_says_why_it_killed(self) -> None:
        log = recorded("torch-2.13-gloo-rank-killed.log")
        pid = log.rpartition("received by PID ")[2].split()[0]
        kernel = f"Out of memory: Killed process {pid} (python) total-vm:9000kB, anon-rss:8000kB"
        assert "ran out of host memory" in failed(replace(EXIT, log=log, kernel=kernel)).message

    def test_a_rank_that_reports_a_timeout_is_healthy(self) -> None:
        log = recorded("torch-2.13-gloo-timeout.log")
        found = failed(replace(EXIT, log=log, stacks={0: WAITING, 1: STUCK}))
        assert (found.kind, found.rank) == (FailureKind.HANG, 1)
        assert found.message.startswith("rank 0 waited in vain")
        assert "rank 1 was in fetch (data.py:9)" in found.message

    def test_a_real_error_beats_the_timeout_it_caused(self) -> None:
        words = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
        waited = raised(0, words, at=1.0)
        own = raised(2, "ZeroDivisionError: division by zero", at=2.0)
        found = failed(replace(EXIT, errors=(waited, own)))
        assert (found.kind, found.rank) == (FailureKind.CRASH, 2)

    def test_only_victims_is_still_an_answer(self) -> None:
        found = failed(replace(EXIT, errors=(raised(4, PEER, at=2.0), raised(1, PEER, at=1.0))))
        assert (found.kind, found.rank) == (FailureKind.CRASH, 4)

    def test_printed_tracebacks_serve_where_there_are_no_error_files(self) -> None:
        log = (
            "[rank1]:[rank1]: Traceback (most recent call last):\n"
            "[rank0]:Traceback (most recent call last):\n"
            '[rank1]:[rank1]:   File "/w/a.py", line 1, in f\n'
            '[rank0]:  File "/w/b.py", line 2, in g\n'
            "[rank0]:RuntimeError: Connection closed by peer\n"
            "[rank1]:[rank1]: KeyError: 'x'\n"
        )
        found = failed(replace(EXIT, log=log))
        assert (found.rank, found.message) == (1, "KeyError: 'x'")
        assert (
            found.traceback
            == "Traceback (most recent call last):\n  File \"/w/a.py\", line 1, in f\nKeyError: 'x'"
        )


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


class TestKinds:
    def test_a_watchdog_is_a_hang_not_the_abort_that_follows(self) -> None:
        found = failed(replace(EXIT, log=NCCL.format(0) + NCCL.format(3) + ABORTED))
        assert found.kind == FailureKind.HANG
        words = "rank 0, 3 waited in vain: WorkNCCL(SeqNum=15, OpType=ALLREDUCE"
        assert found.message.startswith(words)

    @pytest.mark.parametrize(
        ("said", "kind"),
        [
            ("ModuleNotFoundError: No module named 'torchao'", FailureKind.IMPORT),
            (
                "ImportError: libcudart.so.12: cannot open shared object file: No such file or "
                "directory",
                FailureKind.IMPORT,
            ),
            ("AssertionError: Torch not compiled with CUDA enabled", FailureKind.IMPORT),
            (
                "RuntimeError: CUDA error: no kernel image is available for execution on the "
                "device",
                FailureKind.IMPORT,
            ),
            (
                "torch.distributed.DistNetworkError: port: 29500, code: -98, name: EADDRINUSE",
                FailureKind.PORT,
            ),
            ("RuntimeError: CUDA error: uncorrectable ECC error encountered", FailureKind.LOST_GPU),
            ("RuntimeError: no CUDA-capable device is detected", FailureKind.LOST_GPU),
            ("FloatingPointError: loss at step 3 is nan", FailureKind.NON_FINITE_LOSS),
            ("planner.probes.reference.errors.NonFiniteLoss: step 2", FailureKind.NON_FINITE_LOSS),
            (
                "planner.errors.SpecError: tp=16: does not divide 8 KV heads; try 8",
                FailureKind.INVALID_LAYOUT,
            ),
            ("RuntimeError: expected scalar type Float but found BFloat16", FailureKind.CRASH),
        ],
    )
    def test_texts(self, said: str, kind: FailureKind) -> None:
        found = failed(replace(EXIT, errors=(raised(2, said),)))
        assert (found.kind, found.rank, found.message.split("; remedy: ")[0]) == (kind, 2, said)

    def test_a_peer_that_never_came_is_a_hang(self) -> None:
        said = (
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. "
            "1/2 clients joined."
        )
        found = failed(replace(EXIT, errors=(raised(0, said),)))
        assert (found.kind, found.rank, said in found.message) == (FailureKind.HANG, None, True)

    @pytest.mark.parametrize(("said", "file", "kind"), [
        ("ValueError: n_microbatches must be at least 4",
            "/v/torch/distributed/pipelining/schedules.py", FailureKind.INVALID_LAYOUT),
        ("RuntimeError: Mesh should not be bigger", "/v/torch/distributed/device_mesh.py",
            FailureKind.INVALID_LAYOUT),
        ("AssertionError: seq 7 % tp 2", "/x/probes/reference/tensor_parallel.py",
            FailureKind.INVALID_LAYOUT),
        ("ValueError: bad", "/v/numpy/core.py", FailureKind.CRASH),
        ("RuntimeError: unknown", "/v/torch/distributed/distributed_c10d.py", FailureKind.CRASH),
    ])  # fmt: skip
    def test_a_rule_is_told_by_its_place(self, said: str, file: str, kind: FailureKind) -> None:
        assert failed(replace(EXIT, errors=(raised(0, said, file=file),))).kind == kind

    def test_a_program_may_say_the_class_itself(self) -> None:
        error = raised(1, "ValueError: a rule of ours", kind="invalid-layout")
        assert failed(replace(EXIT, errors=(error,))).kind == FailureKind.INVALID_LAYOUT

    def test_a_lost_gpu_explains_every_error(self) -> None:
        kernel = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen "
        kernel += "off the bus."
        found = failed(replace(EXIT, kernel=kernel, errors=(raised(0, PEER),)))
        assert found.kind == FailureKind.LOST_GPU
        assert "Xid 79" in found.message
        kernel = "NVRM: The NVIDIA GPU 0000:b3:00.0 NVRM: fallen off the bus and is not responding "
        kernel += "to commands."
        assert failed(replace(EXIT, kernel=kernel)).kind == FailureKind.LOST_GPU

    def test_an_xid_of_the_program_is_no_lost_gpu(self) -> None:
        kernel = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python3, Ch 00000001, MMU Fault"
        words = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        error = raised(0, words)
        assert failed(replace(EXIT, kernel=kernel, errors=(error,))).kind == FailureKind.CRASH


class TestOutOfMemory:
    GPU = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 5 has a "
        "total capacity of 23.43 GiB of which "
        "210.06 MiB is free. Including non-PyTorch memory, this process has 23.22 GiB memory "
        "in use. Of the allocated memory 22.41 GiB is "
        "allocated by PyTorch, and 206.09 MiB is reserved by PyTorch but unallocated."
    )

    def test_rank_and_bytes(self) -> None:
        errors = (raised(7, PEER, at=0.0), raised(5, self.GPU, at=1.0))
        outcome = classify(replace(EXIT, errors=errors))
        assert isinstance(outcome, OutOfMemory)
        assert (outcome.rank, outcome.attempted_bytes, outcome.allocated_bytes) == (
            5,
            round(1.96 * 2**30),
            round(22.41 * 2**30),
        )

    @pytest.mark.parametrize(
        ("said", "attempted"),
        [
            ("RuntimeError: CUDA error: out of memory", None),
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
                "`cublasCreate(handle)`",
                None,
            ),
            (
                "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, "
                "unhandled cuda error\nLast error:\n"
                "Cuda failure 2 'out of memory'",
                None,
            ),
            (
                "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "4000 bytes. Error code 12",
                4000,
            ),
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 "
                "has",
                2**29,
            ),
        ],
    )
    def test_other_ways_to_say_it(self, said: str, attempted: int | None) -> None:
        outcome = classify(replace(EXIT, errors=(raised(1, said),)))
        assert isinstance(outcome, OutOfMemory)
        assert (outcome.attempted_bytes, outcome.allocated_bytes) == (attempted, None)

    def test_it_is_told_from_the_log_too(self) -> None:
        log = (
            '[rank1]:Traceback (most recent call last):\n[rank1]:  File "/w/a.py", line 1, in '
            f"f\n[rank1]:{self.GPU}\n"
        )
        outcome = classify(replace(EXIT, log=log))
        assert isinstance(outcome, OutOfMemory)
        assert outcome.rank == 1

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
    def test_memory_of_others_is_not_the_layouts(
        self, tried: str, others: str, foreign: bool
    ) -> None:
        said = self.OTHERS.format(tried=tried, others=others)
        # the program names the class before anybody has read the message
        for kind in (None, "oom"):
            outcome = classify(replace(EXIT, errors=(raised(0, said, kind=kind),)))
            assert isinstance(outcome, Failed if foreign else OutOfMemory), outcome
            assert not foreign or outcome.kind == FailureKind.FOREIGN


TEXTS = [json.loads(line) for line in recorded("texts.jsonl").splitlines()]
OTHERS = [json.loads(line) for line in recorded("others.jsonl").splitlines()]


class TestRealTexts:
    """Texts of torch, NCCL, Triton, Slurm and the driver: accepted classes, words of the remedy."""

    @pytest.mark.parametrize("program", ["reference", "torchtitan"])
    @pytest.mark.parametrize("text", TEXTS, ids=lambda text: text["name"])
    def test_each_has_its_class_and_says_what_to_do(
        self, text: dict[str, Any], program: str
    ) -> None:
        found = of_program(program, replace(EXIT, log=text["log"], kernel=text["kernel_log"]))
        kind = found.kind if isinstance(found, Failed) else "oom"
        assert kind in text["accepted"]
        assert text["remedy_names"].lower() in found.message.lower()
        assert not text["remedy_names"] or "; remedy: " in found.message

    @pytest.mark.parametrize("text", OTHERS, ids=lambda text: text["said"][-40:])
    def test_others_that_the_table_was_not_written_for(self, text: dict[str, str]) -> None:
        lines = "".join(f"[rank0]:[rank0]: {line}\n" for line in text["said"].splitlines())
        start = "[rank0]:[rank0]: Traceback (most recent call last):\n"
        found = classify(replace(EXIT, log=start + lines))
        kind = found.kind if isinstance(found, Failed) else "oom"
        assert kind == text["kind"]
        assert text["remedy"] in found.message.rpartition("; remedy: ")[2]

    @pytest.mark.parametrize(
        ("said", "kind", "remedy", "machine"),
        [
            ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
             "`cublasCreate(handle)`", "oom", "", False),
            ("RuntimeError: CUDA driver error: out of memory", "oom", "", False),
            ("torch._inductor.exc.InductorError: CalledProcessError: cuda_utils.c:6:10: fatal "
             "error: Python.h: No such file or directory", "import-error", "python3-dev", False),
            ("RuntimeError: No CUDA GPUs are available", "lost-gpu", "nvidia-smi", False),
            ("ImportError: /tmp/x.so: failed to map segment from shared object", "import-error",
             "TORCHINDUCTOR_CACHE_DIR", False),
            ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, internal "
             "error\nncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket "
             "interface found", "crash", "NCCL_SOCKET_IFNAME", True),
            ("triton.compiler.errors.CompilationError: type fp8e4nv not supported in this "
             "architecture", "invalid-layout", "precision", False),
        ],
    )  # fmt: skip
    def test_others_of_their_kind(self, said: str, kind: str, remedy: str, machine: bool) -> None:
        lines = "\n".join(f"[rank1]:[rank1]: {line}" for line in said.splitlines())
        start = "[rank1]:[rank1]: Traceback (most recent call last):\n[rank1]:[rank1]:   File "
        log = f'{start}"/w/a.py", line 1, in f\n{lines}\n[rank1]:[W1127 09:00:00] leaked\n'
        for program in ("reference", "torchtitan"):
            found = of_program(program, replace(EXIT, log=log))
            assert (found.kind if isinstance(found, Failed) else "oom") == kind
            assert remedy in found.message
            assert "leaked" not in found.message
            assert not isinstance(found, Failed) or found.machine is machine

    def test_words_of_a_log_do_not_replace_the_cause(self) -> None:
        log = (
            "gpu:1:1 [0] NCCL INFO NET/IB : No device found.\n"
            "[rank1]:gpu:1:1 [0] NCCL WARN NET/IB: Got completion with status=12\n"
        )
        own = failed(replace(EXIT, log=log, errors=(raised(0, PEER), raised(1, "KeyError: 'x'"))))
        assert (own.message, own.machine) == ("KeyError: 'x'", False)
        killed = f"{log}{recorded('torch-2.13-gloo-rank-killed.log')}"
        assert "remedy" not in failed(replace(EXIT, log=killed)).message
        quiet = failed(replace(EXIT, log=log.splitlines()[0], errors=(raised(0, PEER),)))
        assert (quiet.kind, quiet.machine) == (FailureKind.CRASH, False)
        assert failed(replace(EXIT, log=log, errors=(raised(0, PEER),))).machine

    def test_what_a_pool_takes_away_is_blamed_on_no_layout(self) -> None:
        assert {*TAKEN_AWAY, FailureKind.FOREIGN, FailureKind.LOST_GPU} <= BLAMELESS


def of_program(program: str, evidence: Evidence) -> OutOfMemory | Failed:
    if program == "reference":
        return classify(evidence)
    return titan_failure(read_log(evidence.log), evidence)


class TestEndsFromOutside:
    def test_time_limit_says_where_each_rank_was(self) -> None:
        stacks = {0: WAITING, 1: STUCK}
        found = failed(replace(EXIT, reason="time-limit", exit_code=None, stacks=stacks))
        assert (found.kind, found.rank) == (FailureKind.TIMEOUT, 1)
        assert (
            "time limit of 60 s; rank 0 was in all_reduce (distributed_c10d.py:7); rank 1 was in "
            "fetch (data.py:9)"
        ) in found.message
        assert "fetch" in found.traceback

    @pytest.mark.parametrize("reason", ["asked", "runner-gone"])
    def test_interrupted(self, reason: str) -> None:
        assert failed(replace(EXIT, reason=reason, exit_code=None)).kind == FailureKind.INTERRUPTED

    def test_a_cause_that_came_first_stays_the_cause(self) -> None:
        errors = (raised(0, "ZeroDivisionError: division by zero"),)
        ended = replace(EXIT, reason="runner-gone", exit_code=None, errors=errors)
        assert failed(ended).kind == FailureKind.CRASH

    def test_a_killed_launcher(self) -> None:
        found = failed(replace(EXIT, exit_code=-9))
        assert found.kind is FailureKind.KILLED
        assert found.message == "the launcher was ended by signal 9 (SIGKILL)"

    def test_no_word_at_all(self) -> None:
        assert (
            failed(EXIT).message
            == "the program ended with exit code 1 and without its result: it left no output"
        )
        log = "usage: worker TASK\n====\n"
        assert "usage: worker" in failed(replace(EXIT, exit_code=2, log=log)).message


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
    left = replace(EXIT, reason=reason, stacks={0: WAITING}, stopped=(2,))
    outcome = failed(left)
    assert (outcome.kind, outcome.rank) == (kind, 2)
    assert "rank 2 was stopped by a signal" in outcome.message
    assert failed(replace(left, reason="time-limit", stopped=())).rank != 2
