"""Fits the kernel curves of `planner.cost.machine.profile.KERNELS` to published kernel timings.

    python benchmarks/fit_kernels.py [--csv benchmarks/measured/micro.csv]

Prints the fit and its error. GEMMs are also compared with the shipped predictions of isolated
kernels (`planner.calibration.kernels.alone`): mean and deviation of log measured over predicted.

GEMM: share of the dense peak and half depth per GPU and dtype, through the cost
    model's own `Device.gemm_seconds`.
Attention: share of the bf16 peak and half context, forward (causal) and backward.
"""

import argparse
import csv
import dataclasses
import pathlib
import re

import numpy as np
from scipy.optimize import minimize

from planner.calibration.kernels import KernelShape, alone, shape_seconds
from planner.cost.machine.device import Device
from planner.cost.machine.profile import kernel_profile, software_profile
from planner.cost.price import Pricer
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu, read_cluster
from planner.precision import PRECISIONS
from planner.trainers.registry import TRAINERS

GPUS = {
    "A100-SXM-80GB": "a100-sxm-80gb", "H100-SXM-80GB": "h100-sxm-80gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM-180GB": "b200-sxm-180gb", "GB200-NVL72": "gb200-nvl72-186gb",
}  # fmt: skip
DTYPES = {
    "GEMM bfloat16": "bf16",
    "GEMM bf16 (TE)": "bf16",
    "GEMM fp8": "float8-tensorwise",
    "GEMM fp8_block": "float8-blockwise",
    "GEMM nvfp4": "nvfp4",
}
CODE = {name: index for index, name in enumerate(PRECISIONS)}


def numbers(text: str) -> dict[str, float]:
    return {key: float(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def read(path: pathlib.Path) -> dict[tuple[str, str], list[tuple[dict[str, float], float]]]:
    rows: dict[tuple[str, str], list[tuple[dict[str, float], float]]] = {}
    for row in csv.DictReader(path.open()):
        if row["unit"].startswith("TFLOP/s") and row["gpu"] in GPUS:
            rows.setdefault((GPUS[row["gpu"]], row["what"]), []).append(
                (numbers(row["shape_message"]), float(row["value"]) * 1e12)
            )
    return rows


def fit(residuals, start: list[float]) -> tuple[np.ndarray, float]:
    best = minimize(
        lambda x: (
            float(np.median(np.abs(residuals(np.exp(x)))))
            + 0.5 * float(np.mean(np.abs(residuals(np.exp(x)))))
        ),
        np.log(start),
        method="Nelder-Mead",
    )
    errors = np.abs(np.expm1(residuals(np.exp(best.x))))
    return np.exp(best.x), float(errors.mean())


def fit_gemm(gpu: str, recipe: str, rows: list[tuple[dict[str, float], float]]) -> None:
    rows = [(shape, rate) for shape, rate in rows if {"m", "n", "k"} <= shape.keys()]
    m, n, k, b = (
        np.array([shape.get(axis, 1.0) for shape, _ in rows]) for axis in ("m", "n", "k", "b")
    )
    measured = np.array([rate for _, rate in rows])
    cluster = read_cluster(
        {
            "gpu": gpu,
            "num_gpus": 8 if "nvl72" not in gpu else 4,
            "gpus_per_node": 8 if "nvl72" not in gpu else 4,
        }
    )
    key, code = PRECISIONS[recipe].torchao.gain_key, np.full(len(rows), CODE[recipe])
    profile = dataclasses.replace(software_profile(TRAINERS["torchtitan"]), compute=1.0)
    base = kernel_profile(load_gpu(gpu))

    def residuals(x: np.ndarray) -> np.ndarray:
        kernels = dataclasses.replace(
            base, gemm={**base.gemm, key: x[0]}, gemm_half_depth={**base.gemm_half_depth, key: x[1]}
        )
        seconds = Device.build(cluster, kernels, profile).gemm_seconds(m, n, k, b, code)
        return np.log(2 * b * m * n * k / seconds / measured)

    (share, half), error = fit(residuals, [0.7, 300.0])
    print(
        f"{gpu:20s} {recipe:18s} {len(rows):4d} rows  share {share:.3f}  half depth {half:6.0f}  "
        f"mean error {error:.1%}"
    )


def shipped_gemm(gpu: str, recipe: str, rows: list[tuple[dict[str, float], float]]) -> None:
    """The GEMMs compared with the shipped calibration's prediction of them in isolation."""
    nvl = "nvl72" in gpu
    cluster = {"gpu": gpu, "num_gpus": 4 if nvl else 8, "gpus_per_node": 4 if nvl else 8}
    job = read_job(
        {
            "model": "llama3-8b",
            "cluster": cluster,
            "training": {"seq_len": 4096, "global_batch_size": 64},
        }
    )
    shapes, seconds = [], []
    for sizes, rate in rows:
        if {"m", "n", "k"} <= sizes.keys():
            groups = {"groups": sizes["b"]} if sizes.get("b", 1) > 1 else {}
            shapes.append(
                KernelShape.of(
                    "grouped-gemm" if groups else "gemm",
                    dtype=recipe,
                    **{key: sizes[key] for key in "mnk"},
                    **groups,
                )
            )
            seconds.append(2.0 * sizes.get("b", 1) * sizes["m"] * sizes["n"] * sizes["k"] / rate)
    ratio = np.log(
        np.array(seconds)
        / shape_seconds(alone(Pricer.build(job.model, job.cluster, job.training)), shapes)
    )
    print(
        f"{gpu:20s} {recipe:18s} {len(shapes):4d} rows  shipped, alone: mean {ratio.mean():+.3f}  "
        f"deviation {ratio.std():.3f}"
    )


def fit_attention(gpu: str, what: str, rows: list[tuple[dict[str, float], float]]) -> None:
    rows = [(shape, rate) for shape, rate in rows if shape.get("s", 0) and shape.get("d") == 128]
    if len(rows) < 4:
        return
    context, rate = np.array([shape["s"] for shape, _ in rows]), np.array([r for _, r in rows])
    peak = load_gpu(gpu).peak_flops_per_second["bf16"]
    (share, half), error = fit(
        lambda x: np.log(peak * x[0] * context / (context + x[1]) / rate), [0.5, 500.0]
    )
    print(
        f"{gpu:20s} {what[:32]:32s} {len(rows):4d} rows  share {share:.3f}  half context "
        f"{half:6.0f}  mean error {error:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--csv", type=pathlib.Path, default=pathlib.Path(__file__).parent / "measured" / "micro.csv"
    )
    rows = read(parser.parse_args().csv)
    for (gpu, what), members in sorted(rows.items()):
        if what in DTYPES:
            fit_gemm(gpu, DTYPES[what], members)
            shipped_gemm(gpu, DTYPES[what], members)
        elif what.startswith("attention"):
            fit_attention(gpu, what, members)


if __name__ == "__main__":
    main()
