"""A real Slurm of two nodes on this machine, started by the fixture `slurm`."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import missing, needed

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "squeue", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
READY_SECONDS = 300.0
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
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
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
KillWait=3
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=30 State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def running_slurm(folder: Path) -> Iterator[Path]:
    """The configuration file of a cluster of two nodes, which runs until the iterator goes on."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        missing(", ".join(lacking), "apt-get install slurm-wlm")
    needed("torch")
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, user=user, ports=free_ports(3)))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "--force",
        "--foreground",
        f"--socket={folder}/munge.socket",
        f"--key-file={key}",
        f"--pid-file={folder}/munge.pid",
    ]
    munge += [
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/munge.seed",
        "--num-threads=2",
    ]
    daemons = [
        ["munged", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started = []
    try:
        for command in daemons:
            program = str(shutil.which(command[0], path=PATH))
            out = (folder / f"{len(started)}.out").open("w")
            started.append(
                subprocess.Popen([program, *command[1:]], env=environment, stdout=out, stderr=out)
            )
            out.close()
            if command[0] == "munged":
                _wait_for(folder / "munge.socket")
        _wait_for_nodes(environment, folder)
        yield folder / "slurm.conf"
    finally:
        subprocess.run(
            ["scancel", "--user", user],
            env=environment,
            capture_output=True,
            timeout=30,
            check=False,
        )
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    seen = ""
    while time.monotonic() < deadline:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seen = asked.stdout + asked.stderr
        if seen.split() == ["n1", "idle", "n2", "idle"]:
            return
        time.sleep(0.5)
    logs = "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in folder.glob("*.log")
    )
    raise AssertionError(f"Slurm did not come up: {seen}\n{logs}")
