"""Which GPU a pool has, where the command does not say: what nvidia-smi names, or a person."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.api.cli.calibrate import gpu_of
from planner.errors import ProbeError, SpecError
from planner.probes.launch import Launcher, LaunchSettings
from planner.probes.pools.local import LocalPool, LocalSettings
from planner.probes.pools.nvidia import Survey
from planner.probes.pools.slurm import SlurmPool
from planner.units import MIB
from tests.unit.test_local_pool import H100


def wiring_with(tmp_path: Path, *names: str, mib: float = 81559) -> Any:
    gpus = tuple(replace(H100, name=name, memory_bytes=mib * MIB) for name in names)
    seen = Survey(gpus=gpus, problem=None if gpus else "nvidia-smi is not installed")
    launch = LaunchSettings(folder=tmp_path)
    local = LocalPool(Launcher(launch), LocalSettings(survey=lambda: seen, environment={}))
    slurm = SlurmPool(launch, partition=None)
    return SimpleNamespace(pool=lambda name: local if name == "local" else slurm)


def test_the_gpu_of_this_machine_is_found(tmp_path: Path) -> None:
    two = wiring_with(tmp_path, H100.name, H100.name)
    assert gpu_of(two, "local") == "h100-sxm-80gb"


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"nvidia-smi is not installed.*--gpu cpu"):
        gpu_of(wiring_with(tmp_path), "local")


def test_what_a_pool_does_not_tell_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="name the pool's GPU"):
        gpu_of(wiring_with(tmp_path), "slurm")
    with pytest.raises(SpecError, match="not told by this pool"):
        gpu_of(wiring_with(tmp_path, "NVIDIA GeForce GTX 1080", mib=8192), "local")
