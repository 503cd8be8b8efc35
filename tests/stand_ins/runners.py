"""Runners as `planner-cli probe` is one, forked from a process that has loaded everything, so that
many can be killed in little time.

`python -m tests.stand_ins.runners FOLDER`; each line {"folder", "light"} on stdin starts one and is
answered "PID PROBE_ID".
"""

import json
import os
import signal
import sys
from pathlib import Path

from planner.api.jobs.probes import enqueue, probe_of_job, run_all
from planner.api.settings import Settings
from planner.api.wiring import SystemClock, Wiring, wire
from planner.probes.folder import RESULT
from planner.probes.launch import Launcher, LaunchSettings, Watch, torchrun
from planner.probes.pools.local import LocalPool, LocalSettings
from planner.probes.pools.protocol import Pool
from planner.probes.protocol import ProbeTask
from planner.probes.trainers import Program
from tests.stand_ins import torchrun as light_torchrun
from tests.stand_ins import worker

JOB = {
    "model": "debug-tiny", "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"seq_len": 64, "global_batch_size": 4},
    "layout": {"dp_shard": 2, "ac": "none"}, "notes": "scatter 0.4",
}  # fmt: skip


class LightWiring(Wiring):
    """The CPU pool with light programs in the place of the worker and, if told so, of torchrun."""

    light = True

    def pool(self, name: str, *, files: bool = True) -> Pool:
        command = light_command if self.light else torchrun
        folder = self.settings.probe_folder
        launch = LaunchSettings(folder=folder, worker=worker.__file__, command=command)
        local = LocalSettings(leases=self.settings.lease_folder, cpu_slots=64)
        return LocalPool(Launcher(launch), local)


def light_command(python: str, task: ProbeTask, program: Program, *, port: int) -> list[str]:
    command = [python, light_torchrun.__file__, "0", "1", str(task.num_processes()), RESULT]
    return [*command, program.target, *program.arguments]


def light_wiring(
    folder: Path, probes: Path, *, light: bool, clock: SystemClock | None = None
) -> Wiring:
    own = {"probe_folder": probes, "lease_folder": folder / "leases"}
    settings = Settings(database_url=f"sqlite:///{folder / 'planner.db'}", **own)
    made = LightWiring(settings=settings, clock=clock or SystemClock(), ids=wire(settings).ids)
    made.light = light
    return made


def run(folder: Path, probes: Path, light: bool) -> None:
    outside = light_wiring(folder, probes, light=light)
    asked = probe_of_job({"job": JOB, "time_limit_seconds": 900.0}, allow_files=False)
    records = enqueue(outside, asked, max_attempts=1, ours=True)
    print(os.getpid(), records[0].id, flush=True)
    run_all(outside, records, {records[0].id: Watch()})


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies, and nobody to wait for them
    for line in sys.stdin:
        asked = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os.setsid()
            try:
                run(Path(sys.argv[1]), Path(asked["folder"]), asked["light"])
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
