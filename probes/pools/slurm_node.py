"""`srun` starts this on every node: `python -m probes.pools.slurm_node WORKER ATTEMPT`.

It runs in the probe's folder, works out torchrun's part in a rendezvous over all nodes, and becomes
its guardian.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from probes import guardian
from probes.folder import BEGIN, RESULT, TASK
from probes.launch import TORCHRUN_FLAGS, GuardianSpec
from probes.outcome import Begin
from probes.protocol import Failed, ProbeTask
from probes.trainers import trainer_of

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the range that Linux gives to clients (32768 on)
STRIDE = 101


def main() -> None:
    """Replaces itself with the guardian of this node's torchrun."""
    worker, attempt = sys.argv[1], int(sys.argv[2])
    folder = Path.cwd()
    task = ProbeTask.model_validate_json((folder / TASK).read_text(encoding="utf-8"))
    begin = Begin.read(folder / BEGIN)
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])
    program = trainer_of(task.trainer, worker=worker).program(task)
    assert not isinstance(program, Failed), "the runner has asked before"
    inside = ["-m", "probes.inside", RESULT, program.target, *program.arguments]
    elastic = [
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(node),
        "--nproc-per-node",
        str(task.num_processes() // nodes),
        "--master-addr",
        master_address(os.environ),
        "--master-port",
        str(master_port(int(os.environ["SLURM_JOB_ID"]), attempt)),
    ]
    argv = (
        [sys.executable, *inside]
        if program.single
        else [sys.executable, "-m", "torch.distributed.run", *elastic, *TORCHRUN_FLAGS, *inside]
    )
    spec = GuardianSpec(
        argv=argv,
        env={},
        inherit=[name for name in os.environ if name != guardian.TOKEN],
        cwd=str(folder),
        output=str(folder / f"output.node{node}.log"),
        end=str(folder / f"end.node{node}.json"),
        token=node_token(begin.token, node),
        watch_runner=False,
        time_limit_seconds=task.time_limit_seconds,
    )
    path = folder / f"guardian.node{node}.json"
    guardian.write_json(path, asdict(spec))
    os.environ.pop(guardian.TOKEN, None)  # or it would find and end itself
    os.execv(sys.executable, [sys.executable, "-I", "-S", guardian.__file__, str(path)])


def node_token(token: str, node: int) -> str:
    """The token of one node's processes.

    Nodes may share a machine, and the end of one must not end the other.
    """
    return f"{token}-{node}"


def master_port(job: int, attempt: int) -> int:
    """A port that all nodes derive alike, and another one for every job and attempt."""
    return FIRST_PORT + (job * STRIDE + attempt) % NUM_PORTS


def master_address(environment: Mapping[str, str]) -> str:
    """Address of the job's first node, as Slurm knows it; its name if Slurm has no address."""
    name = _scontrol("show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()[0]
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name, "--oneliner"))
    return found[1] if found else name


def _scontrol(*arguments: str) -> str:
    return subprocess.run(
        ["scontrol", *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout


if __name__ == "__main__":
    main()
