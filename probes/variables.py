"""Environment variables of a probe: which it inherits, and which its lease adds."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from planner.probes import guardian
from planner.probes.packages import search_path
from planner.probes.protocol import ProbeTask

OF_OTHERS = frozenset(
    {*("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")}
    | {guardian.TOKEN, guardian.GUARDIAN}
)
NEEDED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM"),
    *("TMPDIR", "TEMP", "TMP", "XDG_*", "HOSTNAME", "LD_*", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
    *("PYTHON*", "VIRTUAL_ENV*", "CONDA_*", "MODULE*", "LOADEDMODULES", "LMOD_*", "NIX_*"),
    *("CUDA*", "NVIDIA_*", "NCCL_*", "CUBLAS*", "CUDNN*", "NVTE_*", "NVSHMEM_*", "MPS_*"),
    *("ROCM_*", "ROCR_*", "HIP_*", "HSA_*", "RCCL_*", "MIOPEN_*", "GPU_*", "AMD_*"),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "INDUCTOR_*", "GLOO_*", "FBGEMM_*", "HF_*"),
    *("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*"),
    *("UCX_*", "FI_*", "IB_*", "IBV_*", "MLX*", "OFI_*", "EFA_*", "SHARP_*", "MASTER_*"),
    *("SLURM_*", "SLURMD_*", "SRUN_*", "OMPI_*", "PMI_*", "PMIX_*", "PRTE_*", "MPI_*", "MUNGE_*"),
)
SECRETS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "PRIVATE_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLease:
    """Devices and environment that a lease gives a probe.

    devices: for CUDA_VISIBLE_DEVICES; None on a CPU.
    bus_ids: of these GPUs, see `planner.probes.pools.nvidia.Gpu`.
    others: who holds memory of these GPUs besides, as far as the operator tolerates it.
    locks: open files that the guardian holds open too.
    gpu_name: the driver's name of the GPUs.
    token: carried by all processes of the probe.
    """

    devices: tuple[str, ...] | None = None
    bus_ids: tuple[str, ...] = ()
    others: str = ""
    locks: tuple[int, ...] = ()
    gpu_name: str | None = None
    token: str | None = None


def inherited(more: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of our variables that a probe needs: to find its libraries, devices and networks.

    more: patterns that are added. Database URLs, API keys and whatever else the service runs with
    stay here; of these patterns' secrets only what `more` names goes along.
    """
    found = []
    for name in environment:
        asked = any(fnmatchcase(name, pattern) for pattern in more)
        needed = any(fnmatchcase(name, pattern) for pattern in NEEDED)
        secret = any(word in name.upper() for word in SECRETS)
        if name not in OF_OTHERS and (asked or (needed and not secret)):
            found.append(name)
    return found


def environment(
    folder: Path, task: ProbeTask, lease: DeviceLease, extra: Mapping[str, str]
) -> dict[str, str]:
    """Variables of a probe here: devices, threads, package path. folder: the parent of probes."""
    threads = max(1, (os.cpu_count() or 1) // task.num_processes())
    ours = {
        "PYTHONPATH": search_path(folder),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "CUDA_VISIBLE_DEVICES": ",".join(lease.devices or ()),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return {**ours, **extra}
