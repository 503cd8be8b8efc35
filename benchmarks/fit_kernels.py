"""Fits the kernel curves of `planner.cost.machine.profile.KERNELS` to published kernel timings.

    python benchmarks/fit_kernels.py [--csv benchmarks/measured/micro.csv]

Prints, by GPU family and number format and by attention generation: the fit, its mean error, and
the mean error of the shipped curves without any calibration.

GEMM: share of the dense peak and half depth, through the cost model's own `Device.gemm_seconds`.
The published low-precision GEMMs are linear layers of inference engines:

    t = max(product + input bytes x m k / memory rate, host)

input bytes: read and written for each input element to quantise it, in the same measurement.
host: seconds that the host takes to launch them, where kernels are shorter.
Both are fitted besides, here for the family and for each GPU, and are no part of the product.
Attention: share of the bf16 peak and half context, forward (causal) and backward, heads of 128.
Those of cuDNN from 9.17 on are in benchmarks/measured/cudnn.csv.
"""

import argparse
import csv
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize

from planner.cost.machine.device import Device
from planner.cost.machine.profile import KernelProfile, Profile, kernel_profile
from planner.intake.machines import load_gpu, read_cluster
from planner.precision import PRECISIONS

MEASURED = pathlib.Path(__file__).parent / "measured"
MICRO, CUDNN = MEASURED / "micro.csv", MEASURED / "cudnn.csv"
GPUS = {
    "A100-SXM-80GB": "a100-sxm-80gb", "A100-PCIe-80GB": "a100-pcie-80gb",
    "H100-SXM-80GB": "h100-sxm-80gb", "H100 (Meta)": "h100-sxm-80gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM-180GB": "b200-sxm-180gb", "GB200-NVL72": "gb200-nvl72-186gb",
}  # fmt: skip
FORMATS = {
    "GEMM bfloat16": "bf16",
    "GEMM bf16 (TE)": "bf16",
    "GEMM fp8": "float8-tensorwise",
    "GEMM fp8_block": "float8-blockwise",
    "GEMM nvfp4": "nvfp4",
}
# What is timed -> (generation, pass, share of the published FLOP that a causal mask leaves).
# SimuMax counts the whole square: its A100 would exceed the peak otherwise.
ATTENTION = {
    "attention fwd fp16 FlashAttention-2": ("flash2", "forward", 1.0),
    "attention fwd+bwd FlashAttention-2": ("flash2", "both", 1.0),
    "attention fwd fp16 FlashAttention-3": ("flash3", "forward", 1.0),
    "attention fwd FlashAttention-3": ("flash3", "forward", 1.0),
    "attention fwd fp16 cuDNN": ("cudnn", "forward", 1.0),
    "attention fwd (TE/cuDNN)": ("cudnn", "forward", 0.5),
    "attention bwd (TE/cuDNN)": ("cudnn", "backward", 0.5),
    "attention fwd (cuDNN from 9.17)": ("cudnn-9.17", "forward", 1.0),
    "attention bwd (cuDNN from 9.17)": ("cudnn-9.17", "backward", 1.0),
}
# The kernel that an inference engine's prefill runs, by family; Blackwell's is TensorRT-LLM's own.
PREFILL = {"ampere": "flash2", "hopper": "flash3", "blackwell": "cudnn"}
CAUSAL = "attention fwd causal bf16"
BACKWARD_FLOPS = 2.5
WIDE_HEAD = 128
FASTEST_HOST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """Published GEMMs of one GPU in one format: columns m, n, k, b and seconds."""

    gpu: str
    source: str
    precision: str
    sizes: tuple[np.ndarray, ...]
    seconds: np.ndarray

    def predicted(self, kernels: KernelProfile) -> np.ndarray:
        """Seconds of the products alone."""
        m, n, k, b = self.sizes
        code = np.full(len(m), PRECISIONS.names.index(self.precision))
        return np.asarray(device(self.gpu, kernels).gemm_seconds(m, n, k, b, code))

    def residuals(
        self, kernels: KernelProfile, input_bytes: float, host_seconds: float
    ) -> np.ndarray:
        """Log of predicted over published seconds."""
        m, _, k, _ = self.sizes
        product = self.predicted(kernels)
        if self.precision != "bf16":
            rate = load_gpu(self.gpu).memory_bandwidth_bytes_per_second * kernels.memory
            product = np.maximum(product + input_bytes * m * k / rate, host_seconds)
        return np.asarray(np.log(product / self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attentions:
    """Published timings of one generation on one GPU: contexts and FLOP/s, causal, heads of 128."""

    gpu: str
    generation: str
    direction: str
    context: np.ndarray
    rate: np.ndarray

    def residuals(self, kernels: KernelProfile) -> np.ndarray:
        """Log of published over predicted FLOP/s."""
        on = device(self.gpu, kernels, self.generation)
        one = np.ones(len(self.context))
        forward = on.attention_seconds(one, self.context, backward=False)
        backward = on.attention_seconds(BACKWARD_FLOPS * one, self.context, backward=True)
        seconds, flops = {
            "forward": (forward, 1.0),
            "backward": (backward, BACKWARD_FLOPS),
            "both": (forward + backward, 1.0 + BACKWARD_FLOPS),
        }[self.direction]
        return np.asarray(np.log(self.rate * seconds / flops))


def device(gpu: str, kernels: KernelProfile, generation: str = "flash2") -> Device:
    """A GPU with nothing else on it and no software around its kernels."""
    return Device.build(_cluster(gpu), kernels, Profile(compute=1.0), generation)


@functools.lru_cache
def _cluster(gpu: str):
    return read_cluster({"gpu": gpu, "num_gpus": 1})


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["unit"].startswith("TFLOP/s") and row["gpu"] in GPUS
        ]


def numbers(text: str) -> dict[str, float]:
    """Sizes by name: "m=1024 n=8192" or "batch=1, seq_len=4096"."""
    return {key: float(value) for key, value in re.findall(r"\b(\w+)=(\d+)", text)}


def gemms(path: pathlib.Path = MICRO) -> list[Gemms]:
    """Published GEMMs by GPU, source and format."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for row in _rows(path):
        sizes = numbers(row["shape_message"])
        if row["what"] in FORMATS and {"m", "n", "k"} <= sizes.keys():
            shape = (sizes["m"], sizes["n"], sizes["k"], sizes.get("b", 1.0))
            seconds = 2.0 * np.prod(shape) / (float(row["value"]) * 1e12)
            found.setdefault((GPUS[row["gpu"]], row["what"]), []).append((*shape, seconds))
    groups = []
    for (gpu, what), members in found.items():
        *sizes, seconds = np.array(members).T
        precision = FORMATS[what]
        groups.append(
            Gemms(gpu=gpu, source=what, precision=precision, sizes=tuple(sizes), seconds=seconds)
        )
    return groups


def attentions(path: pathlib.Path = MICRO) -> list[Attentions]:
    """Published attention kernels by GPU, generation and direction."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in (*_rows(path), *_rows(CUDNN)):
        gpu, what, text = GPUS[row["gpu"]], row["what"], row["shape_message"]
        sizes = numbers(text)
        head = sizes.get("d", sizes.get("v_head_dim", 0))
        narrow = head != WIDE_HEAD or sizes.get("qk_head_dim", WIDE_HEAD) != WIDE_HEAD
        # kernels of one long sequence with few heads do not fill the GPU
        few = sizes.get("head_num", 64) < 32
        if narrow or few or "causal=False" in text or what not in (*ATTENTION, CAUSAL):
            continue
        prefill = (PREFILL[load_gpu(gpu).kernel_family], "forward", 1.0)
        generation, direction, share = ATTENTION.get(what, prefill)
        context = sizes.get("s", sizes.get("seq_len", 0.0))
        rate = float(row["value"]) * 1e12 * share
        found.setdefault((gpu, generation, direction), []).append((context, rate))
    return [
        Attentions(
            gpu=gpu,
            generation=generation,
            direction=direction,
            context=np.array([context for context, _ in members]),
            rate=np.array([rate for _, rate in members]),
        )
        for (gpu, generation, direction), members in found.items()
    ]


def mean_error(residuals: np.ndarray) -> float:
    """Mean of |predicted / published - 1|."""
    return float(np.abs(np.expm1(residuals)).mean())


def fitted(
    residuals: Callable[[np.ndarray], Iterable[np.ndarray]], starts: Iterable[list[float]]
) -> np.ndarray:
    """The positive numbers that make all groups' residuals smallest (mean and median)."""

    def loss(logs: np.ndarray) -> float:
        parts = [np.abs(part) for part in residuals(np.exp(logs))]
        return float(sum(part.mean() + 0.5 * np.median(part) for part in parts))

    options = {"maxiter": 3000, "maxfev": 3000}
    found = (
        minimize(loss, np.log(start), method="Nelder-Mead", options=options) for start in starts
    )
    return np.asarray(np.exp(min(found, key=lambda one: one.fun).x))


def quantising(groups: list[Gemms], kernels: KernelProfile) -> list[np.ndarray]:
    """Residuals of these kernels once input bytes and each GPU's host are fitted besides."""

    def residuals(x: np.ndarray) -> list[np.ndarray]:
        return [
            one.residuals(kernels, x[0], host * FASTEST_HOST)
            for one, host in zip(groups, x[1:], strict=True)
        ]

    if groups[0].precision == "bf16":
        return residuals(np.ones(1 + len(groups)))
    starts = ([4.0, *[host] * len(groups)] for host in (2.0, 100.0))
    return residuals(fitted(residuals, starts))


def fit_gemms(groups: list[Gemms], base: KernelProfile, key: str) -> np.ndarray:
    """(share, half depth, input bytes, hosts in us) of one family and format."""

    def residuals(x: np.ndarray) -> list[np.ndarray]:
        kernels = replace(
            base, gemm={**base.gemm, key: x[0]}, gemm_half_depth={**base.gemm_half_depth, key: x[1]}
        )
        return [
            one.residuals(kernels, x[2], host * FASTEST_HOST)
            for one, host in zip(groups, x[3:], strict=True)
        ]

    return fitted(
        residuals, ([0.7, half, 5.0, *[90.0] * len(groups)] for half in (300.0, 600.0, 1500.0))
    )


def gemms_by_family(path: pathlib.Path = MICRO) -> Mapping[tuple[str, str], list[Gemms]]:
    """Published GEMMs by (family, precision).

    Of Blackwell's two bf16 sources one throttles to half on GB200; both stay.
    """
    found: dict[tuple[str, str], list[Gemms]] = {}
    for one in gemms(path):
        found.setdefault((load_gpu(one.gpu).kernel_family, one.precision), []).append(one)
    return found


def attention_by_generation(
    path: pathlib.Path = MICRO,
) -> Mapping[tuple[str, str], list[Attentions]]:
    """Published attention by (family, generation)."""
    found: dict[tuple[str, str], list[Attentions]] = {}
    for one in attentions(path):
        found.setdefault((load_gpu(one.gpu).kernel_family, one.generation), []).append(one)
    return found


def _print_gemms(path: pathlib.Path) -> None:
    for (family, precision), groups in sorted(gemms_by_family(path).items()):
        base = kernel_profile(load_gpu(groups[0].gpu))
        key = PRECISIONS[precision].torchao.gain_key
        share, half, input_bytes, *hosts = fit_gemms(groups, base, key)
        low = "" if precision == "bf16" else f"  input {input_bytes:4.1f} bytes an element"
        print(f"{family:10s} {precision:18s} fit: share {share:.2f}  half depth {half:5.0f}{low}")
        shipped = quantising(groups, base)
        for one, left, host in zip(groups, shipped, hosts, strict=True):
            waits = "" if precision == "bf16" else f"  host {host:4.0f} us"
            print(
                f"    {one.gpu:18s} {one.source:16s} {len(left):4d} rows  shipped: mean error "
                f"{mean_error(left):.1%}, log deviation {left.std():.3f}{waits}"
            )


def _print_attention(path: pathlib.Path) -> None:
    for (family, generation), groups in sorted(attention_by_generation(path).items()):
        base = kernel_profile(load_gpu(groups[0].gpu))

        def residuals(
            x: np.ndarray,
            base: KernelProfile = base,
            generation: str = generation,
            groups: list[Attentions] = groups,
        ) -> list[np.ndarray]:
            curve = replace(
                base.attention_curve(generation), forward=x[0], backward=x[1], half_context=x[2]
            )
            kernels = replace(base, attention={**base.attention, generation: curve})
            return [one.residuals(kernels) for one in groups]

        forward, backward, half = fitted(residuals, [[0.5, 0.4, 500.0], [0.5, 0.4, 1500.0]])
        timed = {one.direction for one in groups}
        found = f"forward {forward:.2f}" * bool(timed & {"forward", "both"})
        found += f"  backward {backward:.2f}" * bool(timed & {"backward", "both"})
        print(f"{family:10s} {generation:8s} fit: {found}  half context {half:5.0f}")
        for one in groups:
            left = one.residuals(base)
            print(
                f"    {one.gpu:18s} {one.direction:10s} {len(left):4d} rows  shipped: mean error "
                f"{mean_error(left):.1%}, log deviation {left.std():.3f}"
            )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=pathlib.Path, default=MICRO)
    path = parser.parse_args().csv
    _print_gemms(path)
    _print_attention(path)


if __name__ == "__main__":
    main()
