"""One job of Slurm in which probes run one after the other, so that they wait in its queue once.

The job is a script that runs the orders of a folder which all nodes share. An order is a file with
one `srun`. We need not live while it runs: who comes after us finds the folder and the job by the
probe's name, and reads how the order ended.
"""

import contextlib
import os
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planner.errors import ProbeError
from planner.probes.guardian import STOP, write_private
from planner.probes.pools.slurm_commands import NoControllerError, Slurm

FOLDER = "allocations"
JOB, CLOSE, HEARTBEAT, SCRIPT, OUTPUT = "job", "close", "heartbeat", "script.sh", "slurm.out"
# A job whose submitter is gone does not start its probe, or stays for the next one.
START_MINUTES, IDLE_MINUTES = 15, 3
MASTER = "PLANNER_MASTER_ADDRESS"
STEP = "PLANNER_SLURM_ORDER"
PROGRAM = f"""\
#!/bin/sh
# script.sh FOLDER MINUTES MINUTES: runs order.1, order.2 ... of a folder, one after the other.
# Ends with the file `close`, or when nobody has touched `heartbeat`: before the start for the
# first number of minutes, and between two orders for the second.
cd "$1" || exit 1
alive() {{ [ -n "$(find {HEARTBEAT} -mmin "-$1" 2>/dev/null)" ]; }}
# our own change of the folder makes a network file system look at it anew
look() {{ : > .look && rm -f .look; }}
look
alive "$2" || exit 0
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" --oneliner | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export {MASTER}="${{address:-$first}}"
n=1
while [ -e "started.$n" ]; do n=$((n + 1)); done
while [ ! -e {CLOSE} ]; do
  if [ -e "order.$n" ]; then
    echo "${{SLURM_RESTART_COUNT:-0}}" > .started && mv .started "started.$n"
    {STEP}=$n sh "./order.$n"
    echo $? > .ended && mv .ended "ended.$n"
    n=$((n + 1))
  else
    alive "$3" || exit 0
    sleep 1
  fi
  look
done
"""


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """One probe in an allocation. job, probe: folders of the allocation's job and of the probe."""

    number: int
    task_id: str
    job: Path
    probe: Path

    @property
    def started(self) -> int | None:
        """The restart count of the job that began it; None if none has."""
        return _number(self.job / f"started.{self.number}")

    @property
    def ended(self) -> int | None:
        """The exit code of its srun; None while it has none."""
        return _number(self.job / f"ended.{self.number}")

    def seconds(self) -> float:
        """Seconds from its start to our last heartbeat, both by the file system's clock."""
        with contextlib.suppress(OSError):
            begun = (self.job / f"started.{self.number}").stat().st_mtime
            return max(0.0, (self.job / HEARTBEAT).stat().st_mtime - begun)
        return 0.0

    def beat(self) -> None:
        """Says that somebody waits for the job's results."""
        (self.job / HEARTBEAT).touch()

    def output(self) -> str:
        """Output of the job's script, if it failed."""
        with contextlib.suppress(OSError):
            return " ".join((self.job / OUTPUT).read_text(errors="replace").split())[-500:]
        return ""

    def conclude(self) -> None:
        """Notes that its result has been read."""
        (self.job / f"concluded.{self.number}").touch()


@dataclass(kw_only=True)
class Allocation:
    """The job of one name, submitted when an order needs it and again when it has ended.

    name: the probe's id, or the name of what holds it; jobs are called `planner-NAME`.
    arguments: for sbatch: nodes, partition and the like, without the time.
    environment: of sbatch, and so of the script.
    seconds: how long the job may last.
    """

    slurm: Slurm
    parent: Path
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    seconds: float

    @property
    def folder(self) -> Path:
        return self.parent / FOLDER / self.name

    @property
    def job_folder(self) -> Path | None:
        """The folder of the newest job."""
        jobs = [int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit()]
        return self.folder / str(max(jobs)) if jobs else None

    def left(self, task_id: str, *, parts: bool = False) -> ProbeOrder | None:
        """The order of this task that a process before us left, unread.

        parts: also one of a task that is a part of the probe of this id, as TASK-rank0 is.
        """
        folder = self.job_folder
        if folder is None:
            return None
        for path in folder.glob("order.*"):
            number = int(path.suffix[1:])
            _, owner, probe = path.read_text(encoding="utf-8").splitlines()[0].split(" ", 2)
            same = owner == task_id or (parts and owner.startswith(f"{task_id}-"))
            if same and not (folder / f"concluded.{number}").exists():
                return ProbeOrder(number, owner, folder, Path(probe))
        return None

    def put(self, task_id: str, probe: Path, command: Sequence[str], seconds: float) -> ProbeOrder:
        """Adds an order to a job that lasts for it. Raises ProbeError.

        command: an srun, which runs in the probe's folder. seconds: how long it may take.
        """
        folder = self._usable(seconds) or self._new_folder()
        number = 1 + len(list(folder.glob("order.*")))
        text = (
            f"# {task_id} {probe}\n[ ! -e {shlex.quote(str(probe / STOP))} ] || exit 0\n"
            f"cd {shlex.quote(str(probe))} && exec {shlex.join(command)} >> output.log 2>&1\n"
        )
        write_private(folder / f".order.{number}", text)
        os.replace(folder / f".order.{number}", folder / f"order.{number}")
        return ProbeOrder(number, task_id, folder, probe)

    def submitted(self, order: ProbeOrder) -> int:
        """The id of the order's job, submitted if need be. Raises ProbeError, NoControllerError."""
        known = _number(order.job / JOB)
        if known is not None:
            return known
        order.beat()
        called = f"planner-{self.name}" + ("" if order.job.name == "1" else f".{order.job.name}")
        found = self.slurm.find(called)
        if found is None:
            minutes = str(max(1, -(-round(self.seconds) // 60)))
            found = self.slurm.submit(
                [
                    *("--job-name", called, "--comment", f"planner {self.name} {order.probe}"),
                    *("--time", minutes, "--no-requeue", "--export=ALL", "--open-mode=append"),
                    *("--output", str(order.job / OUTPUT), "--chdir", str(order.job)),
                    *self.arguments,
                    str(order.job / SCRIPT),
                    *(str(order.job), str(START_MINUTES), str(IDLE_MINUTES)),
                ],
                self.environment,
            )
        write_private(order.job / JOB, str(found))
        return found

    def give_up(self, order: ProbeOrder) -> None:
        """Ends the job; the next order gets another one."""
        (order.job / CLOSE).touch()
        job = _number(order.job / JOB)
        if job is not None:
            with contextlib.suppress(ProbeError):  # then the file ends it
                self.slurm.cancel(job)

    def close(self) -> None:
        """Lets the job end, and forgets it."""
        folder = self.job_folder
        if folder is None:
            return
        (folder / CLOSE).touch()
        job, ran = _number(folder / JOB), any(folder.glob("started.*"))
        if job is not None and not ran:
            with contextlib.suppress(ProbeError):
                self.slurm.cancel(job)
        # a script that still looks for `close` ends where its folder is gone
        shutil.rmtree(self.folder, ignore_errors=True)

    def _usable(self, seconds: float) -> Path | None:
        """The folder of a job that has not ended and lasts this long."""
        folder = self.job_folder
        if folder is None or (folder / CLOSE).exists():
            return None
        job = _number(folder / JOB)
        if job is None:
            return folder
        try:
            state = self.slurm.job(job)
        except NoControllerError:
            return folder  # the wait for the order finds out
        if state is None or state.has_ended or self.seconds - state.seconds < seconds:
            (folder / CLOSE).touch()
            return None
        return folder

    def _new_folder(self) -> Path:
        last = self.job_folder
        folder = self.folder / str(1 + (0 if last is None else int(last.name)))
        folder.mkdir(parents=True, mode=0o700)
        write_private(folder / SCRIPT, PROGRAM)
        (folder / HEARTBEAT).touch(mode=0o600)
        return folder


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrid:
    """How many nodes a probe gets, and processes on each. whole: one for each GPU of a node."""

    nodes: int
    per_node: int
    whole: bool = False

    @classmethod
    def of(cls, processes: int, widest: int) -> "NodeGrid":
        """The grid of processes on nodes of so many GPUs. Raises ProbeError if one is not full."""
        per_node = min(processes, widest)
        if processes % per_node:
            raise ProbeError(
                f"{processes} processes do not fill nodes of {per_node}; give the job's "
                "cluster gpus_per_node that divides them"
            )
        return cls(nodes=processes // per_node, per_node=per_node, whole=per_node == widest)

    def holds(self, other: "NodeGrid") -> bool:
        fits = other.nodes <= self.nodes and other.per_node <= self.per_node
        return fits and (self.whole or not other.whole)


@dataclass(kw_only=True)
class Held:
    """An allocation that stays between probes; one of them runs in it at a time."""

    allocation: Allocation
    grid: NodeGrid
    device: str
    free: threading.Lock = field(default_factory=threading.Lock)

    def has_room(self, grid: NodeGrid, device: str, seconds: float) -> bool:
        """Whether a task fits into it when it has just begun."""
        lasts = seconds <= self.allocation.seconds
        return lasts and device == self.device and self.grid.holds(grid)
