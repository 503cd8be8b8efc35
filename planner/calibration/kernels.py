"""Kernels and collectives in isolation: their shapes, predictions and timings.

Letters: S shapes; every size is a column (S,).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from planner.columns import FloatColumn
from planner.cost.machine.device import SINGLE
from planner.cost.machine.knobs import KNOBS, kernels_at, profile_at
from planner.cost.network.collectives import collective_seconds, send_seconds
from planner.cost.price import Pricer
from planner.precision import PRECISIONS
from planner.specs.training import Optimizer
from planner.trainers.registry import code_of

_ATTENTION = ("batch", "head_dim", "heads", "kv_heads", "seq", "v_head_dim", "window")
SIZES: dict[str, tuple[str, ...]] = {  # of each kind, sorted
    "gemm": ("k", "m", "n"), "grouped-gemm": ("groups", "k", "m", "n"), "attention": _ATTENTION,
    "attention-backward": _ATTENTION,
    "memory": ("bytes",), "optimizer": ("parameters",), "collective": ("bytes", "ranks", "stride"),
}  # fmt: skip
# and "send", between pipeline ranks
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
COPY = "copy"  # the memory-bound kernel that defines the memory rate
NAMES: dict[str, tuple[str, ...]] = {  # operations of a kind that has several
    "memory": (COPY, "add", "swiglu", "rmsnorm", "cross-entropy"),
    "collective": (*COLLECTIVES, "send"),
    "optimizer": get_args(Optimizer),
}
BACKWARD = 2.5  # of attention, as the cost model prices it
# knobs of a trainer that affect kernels in isolation
FELT_ALONE = ("intra_node", "inter_node")
STEP = 0.03
FINGERPRINT_DIGITS = 12
# per parameter: fused AdamW in fp32 reads parameter, gradient and two states, and writes all
# but the gradient
UPDATE_BYTES = 28.0

# Deviation of an isolated kernel from the same kernel inside a step, and from what the model's
# curves can follow. Of micro.csv, 16-bit products deviate by 10% on Ampere and Hopper,
# low-precision ones by 8 to 17% once what their engines add is taken off
# (`benchmarks/fit_kernels.py`).
ALONE_SD, LOW_PRECISION_SD = 0.10, 0.17


def declare(kind: str, sizes: Iterable[str], names: Iterable[str] = ()) -> None:
    """Adds a kind of kernel that can be timed and has no prediction.

    sizes: its dimensions; with `ranks` and `stride` a group of ranks runs it together.
    names: its operations, if it has several.

    Raises ValueError if the kind is taken.
    """
    if kind in SIZES:
        raise ValueError(f"kind={kind!r} is taken; choose another name")
    SIZES[kind] = tuple(sorted(sizes))
    if tuple(names):
        NAMES[kind] = tuple(names)


@dataclass(frozen=True, slots=True, order=True)
class KernelShape:
    """One kernel to time.

    kind: a key of SIZES.
    name: which operation of the kind ("all-gather", "copy", "adamw"), else empty.
    dtype: a value of `layout.precision`, or float32.
    sizes: (dimension, size) pairs, sorted; bytes of a collective are those of the whole buffer.
    """

    kind: str
    name: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kind: str, name: str = "", dtype: str = "bf16", **sizes: float) -> "KernelShape":
        """From sizes by name, rounded to integers of at least one; a window may be zero."""
        whole = {key: max(0 if key == "window" else 1, round(size)) for key, size in sizes.items()}
        return cls(kind, name, dtype, tuple(sorted(whole.items())))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KernelShape":
        """Inverse of `as_dict`; ignores further keys.

        Raises KeyError, TypeError or ValueError for an invalid shape.
        """
        kind, sizes = values["kind"], values["sizes"]
        name, dtype = values.get("name", ""), values.get("dtype", "bf16")
        if kind not in SIZES:
            raise ValueError(f"kind={kind!r} is none of {', '.join(SIZES)}")
        if name not in NAMES.get(kind, ("",)):
            known = ", ".join(NAMES[kind]) if kind in NAMES else "any: it has no names"
            raise ValueError(f"name={name!r} of a {kind} is none of {known}")
        if dtype not in (*PRECISIONS, "float32"):
            raise ValueError(f"dtype={dtype!r} is none of {', '.join(PRECISIONS)}, float32")
        if tuple(sorted(sizes)) != SIZES[kind]:
            given = ", ".join(map(str, sizes)) or "none"
            raise ValueError(f"sizes of a {kind} are {', '.join(SIZES[kind])}, not {given}")
        for key, size in sizes.items():
            least = 0 if key == "window" else 1
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(f"size {key}={size!r} is no whole number of at least {least}")
        return cls(kind, name, dtype, tuple(sorted(sizes.items())))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": dict(self.sizes)}

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    @property
    def num_gpus(self) -> int:
        """GPUs needed to time it: a group of ranks with its stride, else one."""
        sizes = dict(self.sizes)
        return (sizes["ranks"] - 1) * sizes["stride"] + 1 if self.between_ranks else 1

    @property
    def between_ranks(self) -> bool:
        return "ranks" in dict(self.sizes)

    def octaves_to(self, other: "KernelShape") -> float:
        """Distance in factors of two: Euclidean over log2 of the sizes.

        Infinite between different kernels.
        """
        same = (self.kind, self.name, self.dtype) == (other.kind, other.name, other.dtype)
        if not same or [key for key, _ in self.sizes] != [key for key, _ in other.sizes]:
            return math.inf
        pairs = zip(self.sizes, other.sizes, strict=True)
        return math.sqrt(
            sum(math.log2((1 + mine) / (1 + theirs)) ** 2 for (_, mine), (_, theirs) in pairs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTiming:
    """One kernel, timed. seconds: median of its runs."""

    shape: KernelShape
    seconds: float


def alone(pricer: Pricer, shifts: FloatColumn | None = None) -> Pricer:
    """The pricer of isolated kernels: the same machine with nothing else on it.

    shifts (K,): where its calibration's knobs are; unless given, where they are now.
    What a trainer's steps add to a kernel's time is left out: the clock, the caches and the
    neighbours in a step (the profile's `compute`, `low_precision` and `attention`). Networks are as
    fast as their curves, times how far shifts move them.
    """
    trainer, gpu = code_of(pricer.training), pricer.cluster.gpu
    centre = pricer.calibration.shift(trainer, gpu.family)
    here = profile_at(trainer, centre)
    moved = here if shifts is None else profile_at(trainer, shifts)
    profile = replace(
        moved,
        compute=1.0,
        low_precision=1.0,
        attention=1.0,
        intra_node=moved.intra_node / here.intra_node,
        inter_node=moved.inter_node / here.inter_node,
    )
    kernels = kernels_at(gpu, centre if shifts is None else shifts)
    return Pricer.build(
        pricer.model,
        pricer.cluster,
        pricer.training,
        pricer.calibration,
        profile=profile,
        kernels=kernels,
    )


def kernel_seconds(
    pricer: Pricer, kind: str, name: str, dtypes: Sequence[str], sizes: Mapping[str, FloatColumn]
) -> FloatColumn:
    """Seconds of one kind of kernel at many sizes, (S,); 0 without a prediction.

    There is none for a dtype that the GPU lacks, for memory-bound kernels other than a copy, and
    for kinds that `declare` adds. kind, name, dtypes, sizes: see `KernelShape`.
    """
    device = pricer.device
    if kind in ("gemm", "grouped-gemm"):
        code_of_dtype = {name: code for code, name in enumerate(PRECISIONS)}
        code_of_dtype |= {"bf16": device.half, "float32": SINGLE}
        codes = np.array([code_of_dtype[dtype] for dtype in dtypes])
        groups = sizes.get("groups", np.ones(len(codes)))
        return np.nan_to_num(device.gemm_seconds(sizes["m"], sizes["n"], sizes["k"], groups, codes))
    if kind in ("attention", "attention-backward"):
        return _attention_seconds(pricer, sizes, backward=kind != "attention")
    if kind == "memory":
        return device.moved_seconds(2.0 * sizes["bytes"]) * (name == COPY)
    if kind == "optimizer":
        return device.moved_seconds(UPDATE_BYTES * sizes["parameters"])
    if kind != "collective":
        return np.zeros(len(dtypes))
    if name == "send":
        return send_seconds(sizes["bytes"], sizes["stride"], pricer.fabric)
    return collective_seconds(
        name, sizes["bytes"], sizes["ranks"], sizes["stride"], pricer.fabric, base_seconds=0.0
    )


def _attention_seconds(
    pricer: Pricer, sizes: Mapping[str, FloatColumn], *, backward: bool
) -> FloatColumn:
    """Causal attention: a token attends to half the sequence on average, or less under a window."""
    seq, window = sizes["seq"], sizes["window"]
    context = np.where(
        window > 0, np.minimum(seq / 2.0, window - window**2 / (2.0 * seq)), seq / 2.0
    )
    flops = (
        2.0
        * sizes["batch"]
        * seq
        * context
        * sizes["heads"]
        * (sizes["head_dim"] + sizes["v_head_dim"])
    )
    return pricer.device.attention_seconds(
        (BACKWARD if backward else 1.0) * flops,
        2.0 * context,
        backward=backward,
        head_size=sizes["v_head_dim"],
    )


def shape_seconds(pricer: Pricer, shapes: Sequence[KernelShape]) -> FloatColumn:
    out = np.zeros(len(shapes))
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        group = (shape.kind, shape.name, tuple(key for key, _ in shape.sizes))
        alike.setdefault(group, []).append(index)
    for places in alike.values():
        first = shapes[places[0]]
        sizes = {
            key: np.array([shapes[index][key] for index in places], dtype=np.float64)
            for key, _ in first.sizes
        }
        out[places] = kernel_seconds(
            pricer, first.kind, first.name, [shapes[index].dtype for index in places], sizes
        )
    return out


def alone_sd(shapes: Iterable[KernelShape]) -> float:
    """Standard deviation of log measured over predicted seconds of isolated kernels.

    Of the mean over kernels of one kind, which all have nearly the same error.
    """
    low = any(shape.dtype not in ("bf16", "float32") for shape in shapes)
    return LOW_PRECISION_SD if low else ALONE_SD


def within_reach(log_ratio: float, spread: float, sd: float) -> tuple[float, float]:
    """Limits an observed log ratio; returns (value, its variance).

    spread: prior deviation of the log ratio.
    sd: noise in it that carries no information.

    Slopes are differences over small moves, so they hold no further than one deviation of what was
    expected. What lies beyond is misfit of the model, not evidence about its knobs.
    """
    reach = math.hypot(spread, sd)
    value = min(max(log_ratio, -reach), reach)
    return value, sd**2 + (log_ratio - value) ** 2


def timing_fingerprint(gpu: str, timing: KernelTiming) -> str:
    text = json.dumps([gpu, timing.shape.as_dict(), f"{timing.seconds:.6g}"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def alone_gradient(pricer: Pricer, shapes: Sequence[KernelShape]) -> FloatColumn:
    """Derivative of log seconds in isolation by each knob, (S, K), by forward differences."""
    centre = pricer.calibration.shift(code_of(pricer.training), pricer.cluster.gpu.family)
    base = shape_seconds(alone(pricer), shapes)
    gradient = np.zeros((len(shapes), len(KNOBS)))
    for index, knob in enumerate(KNOBS):
        if knob.scope == "family" or knob.name in FELT_ALONE:
            moved = centre.copy()
            moved[index] += STEP
            ahead = shape_seconds(alone(pricer, moved), shapes)
            known = (base > 0) & (ahead > 0)
            gradient[known, index] = np.log(ahead[known] / base[known]) / STEP
    return gradient


def by_kind(shapes: Iterable[KernelShape]) -> dict[str, list[KernelShape]]:
    """Shapes by kind, operation and dtype: "gemm bf16", "collective all-gather"."""
    found: dict[str, list[KernelShape]] = {}
    for shape in shapes:
        words = (shape.kind, shape.name, "" if shape.kind == "collective" else shape.dtype)
        found.setdefault(" ".join(filter(None, words)), []).append(shape)
    return found
