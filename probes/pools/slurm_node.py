"""`srun` starts this on every node: `-m planner.probes.pools.slurm_node WORKER PROCESSES BYTES`.

It runs in the probe's folder, works out torchrun's part in a rendezvous over all nodes, and becomes
its guardian. BYTES: memory that others may hold on a GPU; where they hold more the probe fails.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from planner.probes import guardian
from planner.probes.evidence import RankError
from planner.probes.folder import BEGIN, RESULT, TASK
from planner.probes.launch import GuardianSpec, command_of
from planner.probes.outcome import Begin
from planner.probes.pools.nvidia import Gpu, Survey, others_on, survey, visible
from planner.probes.pools.slurm_allocation import MASTER, STEP
from planner.probes.protocol import Failed, FailureKind, ProbeTask
from planner.probes.trainers import trainer_of

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the range that Linux gives to clients (32768 on)
STRIDE = 101
SETTLE_SECONDS = 10.0  # that the driver may take to release what a killed process held
NODE_NAME = "SLURMD_NODENAME"


def main() -> None:
    """Replaces itself with the guardian of this node's torchrun."""
    worker, per_node, tolerated_bytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    folder = Path.cwd()
    task = ProbeTask.model_validate_json((folder / TASK).read_text(encoding="utf-8"))
    begin = Begin.read(folder / BEGIN)
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
    problem = shortage(task, nodes, per_node, os.environ)
    if problem is not None:
        sys.exit(f"srun: error: {problem}")  # read as a failure of Slurm's to launch it
    program = trainer_of(task.trainer, worker=worker).program(task)
    assert not isinstance(program, Failed), "the runner has asked before"
    port = master_port(int(os.environ["SLURM_JOB_ID"]), int(os.environ[STEP]))
    grid = f"--nnodes {nodes} --node-rank {node} --nproc-per-node {per_node}"
    grid += f" --master-addr {os.environ[MASTER]} --master-port {port}"
    argv = command_of(sys.executable, program, grid)
    gpus = own_gpus(tolerated_bytes) if task.device == "cuda" else ()
    if foreign := others_on(gpus, tolerated_bytes):
        write_foreign(folder / RESULT, node * per_node, f"{os.environ[NODE_NAME]}: {foreign}")
        argv = ["false"]
    elif others := others_on(gpus):
        guardian.write_private(folder / f"others.node{node}.txt", others)
    spec = GuardianSpec(
        argv=argv,
        env={NODE_NAME: os.environ[NODE_NAME]},
        inherit=[name for name in os.environ if name not in (guardian.TOKEN, NODE_NAME)],
        folder=str(folder),
        suffix=f".node{node}",
        token=node_token(begin.token, node),
        bus_ids=[gpu.bus_id for gpu in gpus if gpu.bus_id],
        watch_runner=False,
        time_limit_seconds=task.time_limit_seconds,
    )
    path = folder / f"guardian.node{node}.json"
    guardian.write_json(path, asdict(spec))
    os.environ.pop(guardian.TOKEN, None)  # or it would find and end itself
    os.execv(sys.executable, [sys.executable, "-I", "-S", guardian.__file__, str(path)])


def own_gpus(tolerated_bytes: float, see: Callable[[], Survey] = survey) -> tuple[Gpu, ...]:
    """The GPUs that Slurm gave this step, once what a job before us left there has gone."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while others_on(gpus := visible(see()), tolerated_bytes) and time.monotonic() < deadline:
        time.sleep(1.0)
    return gpus


def write_foreign(result: Path, rank: int, others: str) -> None:
    """Writes the error of this node's first rank: others have its GPUs."""
    RankError(
        rank=rank,
        type="ForeignProcess",
        message=f"{others}; another process has the GPU",
        kind=FailureKind.FOREIGN.value,
        traceback="",
        time=time.time(),
    ).write(result)


def shortage(
    task: ProbeTask, nodes: int, per_node: int, environment: Mapping[str, str]
) -> str | None:
    """A sentence if Slurm gave less than it was asked for; None if not."""
    processes = task.num_processes()
    if nodes * per_node != processes:
        needed = processes // per_node
        return f"the step has {nodes} nodes, {processes} processes need {needed}"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if task.device == "cuda" and visible is not None:
        given = len([one for one in visible.split(",") if one])
        if given < per_node:
            return f"this node gives {given} GPUs, {per_node} were asked for"
    return None


def node_token(token: str, node: int) -> str:
    """The token of one node's processes: nodes that share a machine end one by one."""
    return f"{token}-{node}"


def master_port(job: int, order: int) -> int:
    """A port that all nodes derive alike, and another one for every job and order in it."""
    return FIRST_PORT + (job * STRIDE + order) % NUM_PORTS


if __name__ == "__main__":
    main()
