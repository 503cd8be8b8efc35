"""Published timings of matrix products against what the cost model says of them alone."""

import re

import numpy as np
import pytest

from planner.calibration.kernels import ALONE_SD, KernelShape, alone, shape_seconds
from tests.golden.rows import timings
from tests.pricing import pricer

GPUS = {"A100-SXM-80GB": "a100-sxm-80gb", "H100-SXM-80GB": "h100-sxm-80gb"}
GPUS["H200-SXM-141GB"] = "h200-sxm-141gb"


def published(gpu: str) -> tuple[list[KernelShape], np.ndarray]:
    """Shapes and seconds of 16-bit products."""
    shapes, seconds = [], []
    for row in timings("GEMM bfloat16", gpu):
        found = re.findall(r"(\w+)=(\d+)", row["shape_message"])
        sizes = {key: int(value) for key, value in found}
        if row["what"] == "GEMM bfloat16" and {"m", "n", "k"} <= sizes.keys():
            m, n, k, groups = sizes["m"], sizes["n"], sizes["k"], sizes.get("b", 1)
            more = {"groups": groups} if groups > 1 else {}
            kind = "grouped-gemm" if more else "gemm"
            shapes.append(KernelShape.of(kind, m=m, n=n, k=k, **more))
            seconds.append(2.0 * groups * m * n * k / (float(row["value"]) * 1e12))
    return shapes, np.array(seconds)


@pytest.mark.parametrize("gpu", GPUS)
def test_products_alone_are_met_within_their_deviation(gpu: str) -> None:
    p = pricer("llama3-8b", 8, GPUS[gpu])
    shapes, seconds = published(gpu)
    assert len(shapes) >= 80
    ratio = np.log(seconds / shape_seconds(alone(p), shapes))
    assert abs(ratio.mean()) < ALONE_SD
    in_step = np.log(seconds / shape_seconds(p, shapes))
    assert in_step.mean() < -1.5 * ALONE_SD, "a step makes the same products slower"
