"""A worker without torch: TASK.json RESULT.json; the job's `notes` say what it does. Without: 0.125
s a step, 10 us a kernel.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEP_SECONDS, KERNEL_SECONDS = 0.125, 1e-5
GPU_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB "
    "of which 1.06 GiB is free. "
    "Of the allocated memory 70.50 GiB is allocated by PyTorch, and 1.20 GiB is reserved by "
    "PyTorch but unallocated."
)


class OutOfMemoryError(RuntimeError):
    pass


class NonFiniteLossError(RuntimeError):
    pass


def main() -> None:
    task, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    how, _, number = str(task["job"].get("notes", "")).partition(" ")
    BEHAVIOURS.get(how, lambda *_: None)(rank, number)
    if rank == 0:
        write(task, result, losses=[float("nan")] if how == "quiet-nan" else [2.5, 2.25])


def write(task: dict, result: Path, losses: list[float]) -> None:
    peaks = {"peak_allocated_bytes": 2**21, "peak_reserved_bytes": 2**22}
    memory = [{"rank": 0, **peaks}]
    outcome = {
        "status": "ok", "step_seconds": STEP_SECONDS,
        "step_seconds_each": [0.12, STEP_SECONDS, 0.13], "tokens_per_second_per_gpu": 1024.0,
        "mfu": 0.25, "losses": losses, "gradient_norms": [1.0, 1.0], "memory": memory,
    }  # fmt: skip
    untimed = {"step_seconds": None, "step_seconds_each": []}
    if task["kernels"]:
        timed = {"status": "ok", "seconds": KERNEL_SECONDS}
        timings = [{**shape, **timed} for shape in task["kernels"]]
        outcome |= {**untimed, "memory": [], "timings": timings}
    if task["fake_tensors"]:
        outcome |= {**untimed, "tokens_per_second_per_gpu": None, "mfu": None}
    environment = {"python": "3", "torch": "stand-in"}
    seconds = {"wall_seconds": 1.0, "gpu_seconds": 2.0}
    whole = {"task": task, "outcome": outcome, "environment": environment, **seconds}
    partial = result.with_suffix(".half")
    partial.write_text(json.dumps({**whole, "started_at": "2026-11-21T12:00:00+00:00"}))
    os.replace(partial, result)


def oom(rank: int, _: str) -> None:
    if rank == 1:
        raise OutOfMemoryError(GPU_OOM)
    time.sleep(60)


def full(rank: int, _: str) -> None:
    raise OutOfMemoryError(GPU_OOM)


def victims(rank: int, _: str) -> None:
    """Rank 1 fails; the others notice and complain louder and later."""
    if rank == 1:
        raise KeyError("rope")
    failed = Path(f"{sys.argv[2]}.rank1.error.json")
    while not failed.exists():  # a rank may start long after another
        time.sleep(0.02)
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error: Connection closed by peer")


def die(rank: int, _: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def nan(rank: int, _: str) -> None:
    raise NonFiniteLossError("the loss of step 3 is nan")


def missing(rank: int, _: str) -> None:
    import a_package_that_nobody_has  # noqa: F401


def refuse(rank: int, _: str) -> None:
    from planner.errors import Fault, SpecError

    raise SpecError(Fault("layout.tp", 3, "does not divide 8 heads", "use 2 or 4"))


def sleep(rank: int, seconds: str) -> None:
    print("step 1 of 9", flush=True)
    time.sleep(float(seconds))


def once(rank: int, _: str) -> None:
    """Sleeps in the probe's first folder, and ends at once in those of later attempts."""
    print("step 1 of 9", flush=True)
    if "." not in Path.cwd().name:
        time.sleep(600)


def devices(rank: int, _: str) -> None:
    """Says which GPUs it may use."""
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)


def scatter(rank: int, seconds: str) -> None:
    """Children in sessions of their own, and orphans of theirs, that outlive their parent."""
    start = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
    orphan = f"import subprocess, sys; {start}; print('x')"
    subprocess.run([sys.executable, "-S", "-c", orphan], check=True, stdout=subprocess.DEVNULL)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("step 1 of 9", flush=True)
    time.sleep(float(seconds))


def hang(rank: int, seconds: str) -> None:
    """Rank 1 never comes to the barrier."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)))
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def allocate(rank: int, size: str) -> None:
    import torch

    if rank == 1:
        torch.empty(int(size))
    time.sleep(600)


def leave(rank: int, code: str) -> None:
    sys.exit(int(code))


def late(rank: int, code: str) -> None:
    """Fails after the result is written, as a communicator that cannot be torn down does."""
    import atexit

    while rank and not Path(sys.argv[2]).exists():  # rank 0 writes it
        time.sleep(0.02)
    atexit.register(lambda: os._exit(int(code)))


BEHAVIOURS = {
    "oom": oom, "full": full, "victims": victims, "die": die, "nan": nan, "missing": missing,
    "refuse": refuse, "sleep": sleep, "once": once, "devices": devices,
    "scatter": scatter, "leave": leave, "late": late, "hang": hang, "allocate": allocate,
}  # fmt: skip

if __name__ == "__main__":
    main()
