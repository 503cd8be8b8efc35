"""Memory of one rank, from the GPU's allocator, or elsewhere from a tracker of live storages."""

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from planner.probes.protocol import RankMemory

ROUNDING_BYTES = 512  # what the CUDA caching allocator rounds every request up to (kMinBlockSize)
BACKWARD_OVER_FORWARD = 2.5  # products of a flash attention: two forward, five backward (Dao 2023)
_PAYLOADS = {  # operator -> (its name, which argument holds the whole buffer; -1: the result)
    "_c10d_functional.all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.send": ("send", 0),
}

_PROPAGATOR: Any = ShardingPropagator  # one of its methods is replaced for a while


class Tracker(TorchDispatchMode):
    """Counts bytes of live storages, flops and bytes of collectives of everything that runs inside.

    Works on real and on fake tensors. For DTensors it counts what each operator does on this rank,
    not the global shapes that DTensor tries out to find its placements.
    live, peak: bytes, each storage rounded up as the CUDA allocator does.
    flops: floating-point operations; attention without credit for its mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = 0.0
        self.collective_bytes: Counter[str] = Counter()
        self._held: dict[int, tuple[Any, int]] = {}
        self._paused = False
        self._resize = torch.UntypedStorage.resize_
        self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that existed before."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def reset(self) -> None:
        self.peak, self.flops = self.live, 0.0
        self.collective_bytes.clear()

    def __enter__(self) -> "Tracker":
        tracker = self

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            tracker._resize(storage, size)
            if id(storage) in tracker._held:
                tracker._count(id(storage), tracker._held[id(storage)][0], size)

        def propagate(*args: Any, **kwargs: Any) -> Any:
            before, tracker._paused = tracker._paused, True
            try:
                return tracker._propagate(*args, **kwargs)
            finally:
                tracker._paused = before

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        _PROPAGATOR._propagate_tensor_meta_non_cached = propagate
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        _PROPAGATOR._propagate_tensor_meta_non_cached = self._propagate
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and counts its results; wrappers first unwrap themselves."""
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused:
            return out
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        self._count_work(func, args, kwargs, out)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._held:
            self._count(key, weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())

    def _count(self, key: int, reference: Any, size: int) -> None:
        rounded = -(-size // ROUNDING_BYTES) * ROUNDING_BYTES
        self.live += rounded - (self._held[key][1] if key in self._held else 0)
        self._held[key] = (reference, rounded)
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._held.pop(key)[1]

    def _count_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "flash_attention_for_cpu" in str(packet):
            self.flops += _cpu_attention_flops(str(packet), args)
        if (found := _PAYLOADS.get(str(packet))) is not None:
            kind, place = found
            buffers = tree_iter(out if place < 0 else args[place])
            tensors = (one for one in buffers if isinstance(one, torch.Tensor))
            self.collective_bytes[kind] += sum(one.nbytes for one in tensors)


def _cpu_attention_flops(name: str, args: Any) -> float:
    backward = "backward" in name
    q, k, v = args[1:4] if backward else args[:3]
    products: float = 2.0 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
    return products * (BACKWARD_OVER_FORWARD if backward else 1.0)


def device_used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def reset_gpu(device: torch.device) -> None:
    """Restarts the counts of peaks and retries."""
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_accumulated_memory_stats(device)


def of_gpu(rank: int, device: torch.device, used_before: int, unseen: int) -> RankMemory:
    """Peaks since the last reset.

    unseen: bytes that the whole step would have held besides.
    used_before: bytes in use on the device with a context but before any communicator.
    communicator_bytes: what the device holds beyond that and beyond the allocator's blocks: NCCL's
        buffers, and workspaces that libraries allocate for themselves.
    """
    used, reserved = device_used_bytes(device), torch.cuda.memory_reserved(device)
    return RankMemory(
        rank=rank,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) + unseen,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) + unseen,
        device_used_bytes=used + unseen,
        communicator_bytes=max(0, used - reserved - used_before),
        allocator_retries=torch.cuda.memory_stats(device).get("num_alloc_retries"),
    )
