"""A real Slurm of two nodes on this machine, whose daemons a test may kill and start again."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import missing, needed, ran
from tests.stand_ins.runners import JOB

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
LIMIT_SECONDS = 240.0  # for what has to happen, on however busy a machine
TWO_NODES: dict[str, Any] = {
    **JOB,
    "cluster": {"gpu": "cpu", "num_gpus": 4, "gpus_per_node": 2},
    "layout": {"dp_shard": 4, "ac": "none"},
}
# Two nodes with two "GPUs" each: character devices that every machine has.
GPUS = "NodeName=n1,n2 Name=gpu File=/dev/full,/dev/zero\n"
# A container may have no cgroup file system: slurmd would look for one to choose its plugin by, and
# end. Nothing else here asks for cgroups (proctrack/linuxproc, task/none).
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
EnforcePartLimits=NO
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=20
KillWait=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=30 PriorityTier=1 State=UP
PartitionName=brief Nodes=n1,n2 MaxTime=1 PriorityTier=1 State=UP
PartitionName=one Nodes=n1,n2 MaxNodes=1 PriorityTier=1 State=UP
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 State=UP
"""


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class SlurmCluster:
    """A cluster of the nodes n1 and n2. conf: its configuration file."""

    def __init__(self, folder: Path) -> None:
        lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
        if lacking:
            missing(", ".join(lacking), "apt-get install slurm-wlm")
        needed("torch")
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.conf)}
        self.user = ran("id", "-un", check=True).stdout.strip()
        self.conf.write_text(CONFIG.format(folder=folder, user=self.user, ports=free_ports(3)))
        (folder / "gres.conf").write_text(GPUS)
        (folder / "cgroup.conf").write_text(CGROUPS)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Starts munged, slurmctld, or the slurmd of a node."""
        folder = self.folder
        munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        munge += [f"--socket={folder}/munge.socket", "--num-threads=2"]
        commands = {
            "munged": ["munged", "--force", "--foreground", *munge],
            "slurmctld": ["slurmctld", "-D", "-i"],
        }
        program, *arguments = commands.get(name, ["slurmd", "-D", "-N", name])
        command = [str(shutil.which(program, path=PATH)), *arguments]
        with (folder / f"{name}.out").open("a") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out
            )
        if name == "munged":
            self.wait_for((folder / "munge.socket").exists, "munge")

    def kill(self, name: str) -> None:
        """Ends a daemon as a crash of its machine does.

        The controller saves its state before: one that forgets a running job gives its number to
        the next one, and Slurm drains the node.
        """
        daemon = self.daemons.pop(name)
        (daemon.terminate if name == "slurmctld" else daemon.kill)()
        daemon.wait(60)

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints, and what it complains of."""
        done = ran(*command, env=self.environment, timeout=120)
        return done.stdout + done.stderr

    def jobs(self) -> list[str]:
        """Ids of the jobs in the queue."""
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def wait_for(self, so: Callable[[], object], what: str) -> None:
        """Waits until something is so. Raises AssertionError with Slurm's logs, or at once with the
        last lines of a daemon that ended by itself.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while not so():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    said = (self.folder / f"{name}.out").read_text(errors="replace").splitlines()
                    raise AssertionError(f"{name} ended with {daemon.returncode}: {said[-3:]}")
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
                    for path in self.folder.glob("*.log")
                )
                raise AssertionError(f"not so: {what}\n{self.ask('sinfo')}\n{logs}")
            time.sleep(0.2)

    def wait_until_idle(self) -> None:
        """Waits until both nodes are idle and the queue is empty."""

        def idle() -> bool:
            self.ask("scontrol", "update", "nodename=n[1-2]", "state=resume")  # what was drained
            nodes = self.ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T").split()
            return nodes == ["n1", "idle", "n2", "idle"] and not self.jobs()

        self.wait_for(idle, "both nodes are idle")

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        if "slurmctld" in self.daemons:
            self.ask("scancel", "--user", self.user)
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # slurmd waits for its messages without end
                process.kill()
                process.wait(60)


def running_slurm(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster of two nodes, which runs until the iterator goes on."""
    cluster = SlurmCluster(folder)
    try:
        for name in ("munged", "slurmctld", "n1", "n2"):
            cluster.start(name)
        cluster.wait_until_idle()
        yield cluster
    finally:
        cluster.stop()
