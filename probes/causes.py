"""Texts of torch, NCCL, Triton and the driver, with a failure class and a remedy for each.

`CAUSES` is read from the top and the first pattern that matches counts, so what is narrow stands
above what is wide. The patterns match what torch 2.11 to 2.13, NCCL 2.27 and 2.28, gloo, Triton,
Slurm and NVIDIA's drivers print.
"""

import re
from dataclasses import dataclass

from planner.probes.protocol import FailureKind
from planner.units import parse_quantity

OOM = "oom"
# of a GPU's memory: what a desktop holds is part of the machine; a judgement
FOREIGN_FRACTION = 0.05
SIZE = r"(?P<size>[\d.]+ ?[KMGT]?i?[Bb]\w*)"
TRIED = re.compile(rf"[Tt]ried to allocate {SIZE}")
ALLOCATED = re.compile(rf"Of the allocated memory {SIZE} is allocated by PyTorch")
CAPACITY = re.compile(rf"total capacity of {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
OTHERS = re.compile(rf"Process \d+ has {SIZE} memory in use")


@dataclass(frozen=True, slots=True)
class Cause:
    """One row: a text, the class that it shows, and what to do.

    pattern: searched in the innermost file of a traceback, its error and the lines after it.
    machine: the machine is to blame, so it says nothing of the layout.
    """

    kind: FailureKind | str
    pattern: re.Pattern[str]
    remedy: str = ""
    machine: bool = False

    @property
    def told_by_logs(self) -> bool:
        """Whether the words are a cause wherever they stand, not in the error of a rank alone."""
        return self.machine or self.kind in (FailureKind.PORT, FailureKind.KILLED)


def _row(
    kind: FailureKind | str, pattern: str, remedy: str = "", *, machine: bool = False
) -> Cause:
    return Cause(kind, re.compile(pattern, re.DOTALL), remedy, machine)


CAUSES = (
    _row(FailureKind.PORT, "EADDRINUSE|[Aa]ddress already in use"),
    _row(OOM,
         r"OutOfMemoryError|(?:CUDA|HIP|XPU)\]?:? (?:driver error: |error: )?out of memory"
         r"|CU[A-Z]+_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|Cuda failure[ \d]* '?out of memory"
         r"|Failed to CUDA (?:m|c)alloc|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)"
         r"|CUDA_ERROR_OUT_OF_MEMORY|DefaultCPUAllocator: (?:can't|not enough)"),
    # ---- what this machine cannot run
    _row(FailureKind.INVALID_LAYOUT,
         r"out of resources?: |OutOfResources|No valid triton configs|too many resources requested",
         "this GPU has too little shared memory or too few registers for the compiled kernel: plan "
         "without compile, or with smaller heads"),
    _row(FailureKind.INVALID_LAYOUT,
         r"only supports? [^\n]*(?:Ampere|Hopper|Blackwell)|only supported (?:on|for|with) [^\n]*"
         r"(?:compute capability|capability >|MI300|Ampere|Hopper|Blackwell|[Ss][Mm]_?\d)"
         r"|not supported (?:in|on) this (?:architecture|GPU|device)"
         r"|requires? [^\n]*(?:compute capability|[Ss][Mm]_?\d\d)"
         r"|CU[A-Z]+_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH)|No available kernel"
         r"|too old to be supported|only supports devices of",
         "this GPU has no kernel for it: plan another precision (bf16 runs everywhere), or take a "
         "GPU that has it"),
    _row(FailureKind.CRASH, r"Cuda failure[ \d]* '?peer access|P2P[^\n]*(?:not supported|failed)",
         "these GPUs cannot reach each other's memory, though the driver says so: turn ACS and the "
         "IOMMU off, or set NCCL_P2P_DISABLE=1", machine=True),
    _row(FailureKind.INVALID_LAYOUT,
         r"(?:[Ss]ymm(?:etric)?[_ ]?[Mm]em|[Mm]ulticast).*(?:not supported|unsupported|requires)"
         r"|peer access is not supported",
         "its GPUs do not share memory as symmetric memory needs: plan with async_tp: false"),
    # ---- packages, compilers, drivers
    _row(FailureKind.IMPORT,
         r"(?:find|working) C(?:\+\+)? compiler|InvalidCxxCompiler|\b(?:gcc|g\+\+|cc): not found"
         r"|directory: '(?:/usr/bin/)?(?:gcc|g\+\+|cc|c\+\+)'",
         "install a C compiler (gcc and g++) where probes run, or name it in CC; compile needs "
         "one"),
    _row(FailureKind.IMPORT, r"Python\.h: No such file",
         "install Python's headers (python3-dev) for the interpreter of the probe"),
    _row(FailureKind.IMPORT,
         r"ptxas|PTXASError|device kernel image is invalid|no PTX|CUDA_ERROR_INVALID_PTX"
         r"|nvcc: not found|CUDA_HOME environment variable is not set|cuda\.h: No such file",
         "its ptxas or CUDA toolkit does not know this GPU, or is missing: install a newer triton, "
         "or name a newer one in TRITON_PTXAS_PATH and CUDA_HOME"),
    _row(FailureKind.IMPORT,
         r"libcuda\.so(?:\.1)?:? (?:cannot|not) (?:be )?found|cannot find -lcuda"
         r"|libcuda\.so\.1: cannot open",
         "link libcuda.so to the driver's libcuda.so.1 and run ldconfig, or start the container "
         "with its GPUs"),
    _row(FailureKind.IMPORT, r"failed to map segment",
         "the cache of compiled kernels lies on a file system mounted noexec: set TMPDIR and "
         "TORCHINDUCTOR_CACHE_DIR to one that is not"),
    _row(FailureKind.IMPORT,
         r"driver version is insufficient|driver on your system is too old"
         r"|[Dd]river/library version mismatch|unsupported (?:display driver|toolchain)"
         r"|forward compatibility was attempted|Error 80[34]|in the installed CUDA driver"
         r"|CUDA_ERROR_UNSUPPORTED_PTX_VERSION|cudaErrorInsufficientDriver",
         "update the NVIDIA driver (reboot if it was updated just now), or install a torch built "
         "for the older CUDA"),
    _row(FailureKind.IMPORT,
         r"no kernel image is available|not compatible with the current PyTorch"
         r"|not compiled with CUDA enabled",
         "install a torch that is built for this GPU"),
    _row(FailureKind.IMPORT, r"Mismatched NCCL version",
         "the nodes have different NCCL versions: use one environment, or one image, on all"),
    # ---- GPUs that are not there
    _row(FailureKind.LOST_GPU, r"Error 802|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
         "start nvidia-fabricmanager, in the driver's version; NVSwitch machines need it"),
    _row(FailureKind.LOST_GPU,
         r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver"
         r"|invalid device ordinal",
         "the process sees fewer GPUs than it has ranks: look at CUDA_VISIBLE_DEVICES, nvidia-smi "
         "and the container's --gpus"),
    _row(FailureKind.LOST_GPU,
         r"CUDA unknown error|initialize NVML|cudaErrorUnknown|CUDA_ERROR_NOT_INITIALIZED",
         "start the container again if others still have their GPUs, else load the module "
         "nvidia_uvm again (modprobe), or reboot"),
    _row(FailureKind.FOREIGN,
         r"busy or unavailable|cudaErrorDevicesUnavailable|exclusive.{0,20}mode"
         r"|another process has the GPU",
         "another process has the GPU, or its compute mode is exclusive: end that process, or "
         "`nvidia-smi -c DEFAULT`"),
    _row(FailureKind.LOST_GPU,
         r"fallen off the bus|GPU is lost|[Uu]ncorrectable (?:ECC|NVLink)|hardware error"
         r"|cudaErrorECCUncorrectable|Unable to determine the device handle|reports Xid",
         "keep jobs off this GPU, reset it or reboot, and have it looked at if that comes again"),
    # ---- what else a machine lacks
    _row(FailureKind.CRASH,
         r"(?:No space|extend|creat|truncate)[^\n]*/dev/shm|/dev/shm[^\n]*No space"
         r"|shared memory segment|insufficient shared memory",
         "/dev/shm is too small: --shm-size=8g or --ipc=host for a container", machine=True),
    _row(FailureKind.KILLED, r"SIGBUS|[Ss]ignal 7\b|Bus error|out of shared memory",
         "a full /dev/shm ends programs so: --shm-size=8g or --ipc=host for a container",
         machine=True),
    _row(FailureKind.CRASH,
         r"No space left on device|Disk quota exceeded|Read-only file system"
         r"|Permission denied: '[^']*(?:cache|triton|inductor|tmp)|[Ss]tale file handle",
         "free the disk, or set TMPDIR, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to one with "
         "room that may be written", machine=True),
    _row(FailureKind.CRASH, r"Too many open files",
         "raise the limit of open files (ulimit -n 65536)", machine=True),
    _row(FailureKind.KILLED,
         r"oom[-_]kill|OOM Killed|task \d+: Out Of Memory|ran out of host memory"
         r"|Memory cgroup out of memory",
         "the job needs more host memory: ask for more (--mem), or offload less"),
    # ---- networks
    _row(FailureKind.CRASH,
         r"ibv_\w+ [^\n]*(?:Cannot allocate memory|error 12\b)|RLIMIT_MEMLOCK|memlock",
         "let programs lock memory: ulimit -l unlimited (--ulimit memlock=-1 for a container)",
         machine=True),
    _row(FailureKind.CRASH,
         r"NET/IB ?: (?:No device found|Unable to open)|ibv_(?:open_device|get_device_list)",
         "NCCL finds no InfiniBand device: look at `ibv_devinfo`, name it in NCCL_IB_HCA and give "
         "the container /dev/infiniband, or set NCCL_IB_DISABLE=1", machine=True),
    _row(FailureKind.CRASH,
         r"IBV_WC_\w*ERR|ibv_poll_cq|NET/IB ?: Got completion [^\n]*(?:status|error)[= ](?!0)",
         "the fabric lost packets: look at its links, switches and NCCL_IB_GID_INDEX",
         machine=True),
    _row(FailureKind.CRASH,
         r"no socket interface found|[Uu]nable to find (?:address|interface)"
         r"|makeDeviceFor\w+|No route to host|Name or service not known"
         r"|Temporary failure in name resolution|[Nn]etwork is unreachable"
         r"|[Cc]onnect\w*[ :][^\n]*[Cc]onnection timed out|initialize any NET plugin",
         "the nodes do not reach each other: name the interface that joins them in "
         "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and see that each node's name resolves",
         machine=True),
    _row(FailureKind.HANG, r"waiting for clients|client socket has (?:timed out|failed to connect)",
         "a node never came: see that all of them started, and that the port of the first is open",
         machine=True),
    # ---- wide patterns, last
    _row(FailureKind.INTERRUPTED, r"\bKeyboardInterrupt\b"),
    _row(FailureKind.CRASH, r"Duplicate GPU detected",
         "two ranks have the same GPU: look at CUDA_VISIBLE_DEVICES and at the ranks of each node",
         machine=True),
    _row(FailureKind.KILLED,
         r"Errno 12\]|Cannot allocate memory|std::bad_alloc|\bMemoryError\b|cudaErrorHostMemory"
         r"|Failed to CUDA host alloc",
         "it needs more host memory: ask for more (--mem), or offload less"),
    _row(FailureKind.IMPORT,
         r"\b(?:ModuleNotFoundError|ImportError|PackageNotFoundError)\b|undefined symbol"
         r"|cannot open shared object file|version `GLIBC",
         "install it for the interpreter that runs probes (PLANNER_PROBE_PYTHON)"),
    _row(FailureKind.NON_FINITE_LOSS,
         r"(?i)nonfinite|non-?finite|(?:loss|norm)\b[^\n]{0,40}\bis (?:not finite|nan|[-+]?inf)\b"),
)  # fmt: skip


def cause_of(text: str) -> Cause | None:
    """The first row that matches; memory that others hold is no lack of the layout's."""
    found = next((one for one in CAUSES if one.pattern.search(text)), None)
    return FOREIGN if found is not None and found.kind == OOM and is_foreign(text) else found


FOREIGN = Cause(
    FailureKind.FOREIGN,
    OTHERS,
    "another process holds memory of this GPU: end it (nvidia-smi lists it), or take another GPU",
)


def is_foreign(text: str) -> bool:
    """Whether an allocation failed for memory that other processes hold.

    It would have fitted without them, and they hold more than `FOREIGN_FRACTION` of the GPU. Inside
    a container the program's own memory is listed under a process too.
    """
    capacity = size_in(CAPACITY, text)
    if capacity is None:
        return False
    others = [size_of(found["size"]) or 0 for found in OTHERS.finditer(text)]
    if others and "this process has" not in text:
        allocated = size_in(ALLOCATED, text) or 0
        others.remove(min((one for one in others if one >= allocated), default=max(others)))
    missing = (size_in(TRIED, text) or 0) - (size_in(FREE, text) or 0)
    return sum(others) >= max(missing, FOREIGN_FRACTION * capacity)


def size_in(pattern: re.Pattern[str], text: str) -> int | None:
    """The size that a text names, in bytes; None if it names none."""
    found = pattern.search(text)
    return None if found is None else size_of(found["size"])


def size_of(size: str) -> int | None:
    """A size as torch writes it, in bytes; None if it cannot be read."""
    try:
        return round(parse_quantity(size.replace("bytes", "B").replace("byte", "B"), "bytes"))
    except ValueError:
        return None
