"""Seconds of kernels: roofline times a utilisation curve over the shape.

Letters: U distinct layouts; every argument is a column (U,).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.columns import FloatColumn, IntColumn
from planner.cost.machine.profile import (
    GROUPED,
    USUAL_GROUPED,
    AttentionCurve,
    KernelProfile,
    Profile,
)
from planner.precision import torchao
from planner.specs.cluster import ClusterSpec
from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import SILICON, STATIC_SHARE

TILE_ROWS, TILE_COLS = 128, 128
FP16_BYTES = 2.0
# of one element that a GEMM reads, by peak; 2 for the rest
OPERAND_BYTES: Mapping[str, float] = {"fp8": 1.0, "fp4": 0.5}
BF16, FP16 = 0, 1
WIDE_HEAD = 128.0
BEFORE_GROUPED = frozenset({"volta", "ampere", "ada"})
# torch's memory-efficient attention multiplies fp32 by three products of TF32 halves
# (aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h,
# OpMultiplyAddFastF32).
PRODUCTS_OF_3XTF32 = 3.0
SINGLE = -1  # last row of the rates, for param_dtype float32


def dynamic_power(gpu: GpuSpec, kernels: KernelProfile, limit_watts: float) -> float:
    """Dynamic power at a board limit, over that at which dense GEMMs hold the GPU's full clock.

    P = units^(1 / x) x (limit / (nominal units) - static) / (1 - static)
    static: share of the nominal power that is drawn whatever the clock.
    units: share of its units that a GPU runs; the others, which cost more static power than they
        bring, are off: units (limit / units - static)^x is largest at (1 - x) limit / static. So
        more units never make a GPU slower under the same limit.
    A family whose silicon nobody measured clocks as the one whose kernels price it.
    """
    silicon, x = SILICON.get(gpu.family), kernels.power_exponent
    static, alike = STATIC_SHARE, kernels.timed_power
    if silicon is not None and gpu.peak_flops_per_second.keys() & {"bf16", "fp16"}:
        static, alike = silicon.static_share(gpu.boost_clock_hz or silicon.clock_hz), 1.0
    limit = limit_watts / gpu.nominal_power_watts
    units = min(1.0, max((1.0 - x) * limit / static, limit))
    return float(alike * units ** (1.0 / x) * (limit / units - static) / (1.0 - static))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU under one trainer's software: achieved rates, ready for columns.

    linear_rate, linear_half_depth and operand_bytes are indexed by precision code, then SINGLE.
    linear_rate: FLOP/s that a large GEMM reaches (NaN: the GPU lacks the dtype).
    linear_half_depth: the depth at which it reaches half of that.
    operand_bytes: of an element that it reads.
    generation: of fused attention, see `trainers.attention`.
    attention: its curve; the rates are FLOP/s at long context.
    single_attention: seconds of fused attention in fp32 over those in 16 bits.
    half: precision code of its 16-bit format.
    """

    gpu: GpuSpec
    kernels: KernelProfile
    profile: Profile
    linear_rate: FloatColumn
    linear_half_depth: FloatColumn
    operand_bytes: FloatColumn
    generation: str
    attention: AttentionCurve
    attention_forward_rate: float
    attention_backward_rate: float
    single_attention: float
    memory_rate: float
    num_sms: int
    half: int

    @classmethod
    def build(
        cls,
        cluster: ClusterSpec,
        kernels: KernelProfile,
        profile: Profile,
        generation: str = "flash2",
        *,
        tf32: bool = False,
    ) -> "Device":
        """Rates of this cluster's GPU at its power limit.

        tf32: the trainer's products in fp32 run as TF32 where the GPU has it.
        """
        gpu = cluster.gpu
        limit = cluster.power_limit_watts or gpu.power_limit_watts
        attention = kernels.attention_curve(generation)
        power = dynamic_power(gpu, kernels, limit)
        clock = kernels.relative_clock(power)
        # judgement: power goes with products a second, so FlashAttention-2 keeps its clock on the
        # 500 W H100, where a GEMM loses a fifth
        activity = min(attention.forward / kernels.gemm["gemm_bf16"], 1.0)
        cool = kernels.relative_clock(power, activity)
        peaks: Mapping[str, float] = gpu.peak_flops_per_second
        rates, halves = [], []
        for recipe in torchao():
            share = kernels.gemm.get(recipe.gain_key)
            peak = peaks.get(recipe.peak)
            known = share is not None and peak is not None
            software = profile.compute * (
                1.0 if recipe.gain_key == "gemm_bf16" else profile.low_precision
            )
            rates.append(peak * share * clock * software if known and peak and share else np.nan)
            halves.append(kernels.gemm_half_depth.get(recipe.gain_key, 1.0))
        vector, rounded = peaks.get("fp32", 0.0), peaks.get("tf32", 0.0)
        single = (tf32 and rounded) or vector or rounded
        rates.append(
            single * kernels.gemm["gemm_bf16"] * clock * profile.compute if single else np.nan
        )
        halves.append(kernels.gemm_half_depth["gemm_bf16"])
        operand_bytes = [OPERAND_BYTES.get(recipe.peak, FP16_BYTES) for recipe in torchao()] + [
            2 * FP16_BYTES
        ]
        half_precision = peaks.get("bf16") or peaks.get("fp16") or peaks["fp32"]
        speed = half_precision * cool * profile.compute * profile.attention
        return cls(
            gpu=gpu,
            kernels=kernels,
            profile=profile,
            linear_rate=np.array(rates),
            linear_half_depth=np.array(halves),
            operand_bytes=np.array(operand_bytes),
            generation=generation,
            attention=attention,
            single_attention=half_precision / (max(single, rounded / PRODUCTS_OF_3XTF32) or np.nan),
            attention_forward_rate=speed * attention.forward,
            attention_backward_rate=speed * attention.backward,
            memory_rate=gpu.memory_bandwidth_bytes_per_second * kernels.memory,
            num_sms=max(gpu.num_sms, 1),
            half=BF16 if peaks.get("bf16") else FP16,
        )

    @property
    def loops_over_experts(self) -> bool:
        """Whether torch._grouped_mm cannot run: it needs compute capability 9.0.

        Source: torch 2.9 aten/src/ATen/native/cuda/Blas.cpp (_grouped_mm_cuda); the families are
        those before Hopper.
        """
        return self.gpu.family in BEFORE_GROUPED

    def gemm_seconds(
        self,
        rows: FloatColumn,
        cols: FloatColumn,
        depth: FloatColumn,
        batch: FloatColumn,
        precision: IntColumn,
    ) -> FloatColumn:
        """Seconds of `batch` independent GEMMs rows x depth by depth x cols.

        t = max(2 r c d b / (rate u), bytes / memory rate)
        u = d / (d + half) x wave quantisation
        Wave quantisation: share of useful work in the waves of 128 x 128 output tiles over the SMs;
            the last wave may be part empty.
        Assumes one kernel for the whole batch (grouped GEMM).
        Source: NVIDIA Matrix Multiplication Background guide.
        """
        tiles = batch * np.ceil(rows / TILE_ROWS) * np.ceil(cols / TILE_COLS)
        waves = tiles / self.num_sms
        filled = batch * rows * cols / (TILE_ROWS * TILE_COLS) / self.num_sms
        wave_share = filled / np.where(waves < 1.0, 1.0, waves + 0.5 * (np.ceil(waves) - waves))
        half_depth = self.linear_half_depth[precision]
        utilisation = np.minimum(wave_share, 1.0) * depth / (depth + half_depth)
        flops = 2.0 * batch * rows * cols * depth
        written = np.where(precision == SINGLE, 2 * FP16_BYTES, FP16_BYTES)
        moved = batch * (
            self.operand_bytes[precision] * (rows * depth + depth * cols) + written * rows * cols
        )
        return np.maximum(
            flops / (self.linear_rate[precision] * np.maximum(utilisation, 1e-6)),
            moved / self.memory_rate,
        )

    def grouped_gemm_seconds(
        self,
        rows: FloatColumn,
        cols: FloatColumn,
        depth: FloatColumn,
        groups: FloatColumn,
        precision: IntColumn,
        *,
        tokens: FloatColumn,
        vendor: bool,
        gradient_bytes: FloatColumn | None = None,
    ) -> FloatColumn:
        """Seconds of one product rows x depth by depth x cols for each of `groups` experts.

        t = sqrt(compute^2 + memory^2)
        compute = 2 r c d g / (rate share u), u = d / (d + half) x tokens / (tokens + half_rows)
        memory = bytes / memory rate: operands read, result written

        tokens (U,): rows of one expert, whichever dimension of the product they are.
        vendor: Transformer Engine's kernels, not torch's.
        gradient_bytes (U,): of a weight gradient, what one weight moves: 8 where it is added to
            an fp32 gradient (read and written), 2 where it is written in 16 bits. Its depth are
            the tokens, so no second share counts for it. None: a product of activations.
        With few rows a tile of 128 is part empty and every weight is read for few products; the
        root of squares, rather than the larger, is what micro.csv shows between the two.
        Source: micro.csv, grouped GEMM (tests/unit/test_grouped_gemm.py).
        """
        curve = GROUPED.get(self.gpu.kernel_family, USUAL_GROUPED)
        share = curve.vendor if vendor else curve.torch
        used = share * tokens / (tokens + curve.half_rows)
        if gradient_bytes is None:
            used = used * depth / (depth + self.linear_half_depth[precision])
        operand = self.operand_bytes[precision]
        written = (
            np.where(precision == SINGLE, 2 * FP16_BYTES, FP16_BYTES)
            if gradient_bytes is None
            else gradient_bytes
        )
        moved = groups * (operand * (rows * depth + depth * cols) + written * rows * cols)
        compute = 2.0 * groups * rows * cols * depth / (self.linear_rate[precision] * used)
        return np.asarray(np.hypot(compute, moved / self.memory_rate))

    def attention_seconds(
        self,
        flops: FloatColumn,
        context: FloatColumn,
        *,
        backward: bool,
        head_size: float | FloatColumn = WIDE_HEAD,
    ) -> FloatColumn:
        """Seconds of fused attention: flops over a rate that rises with context.

        rate = ceiling x c / (c + half) x min(1, head size / 128)^small_heads
        Source: the fits that `benchmarks/fit_kernels.py` prints.
        """
        rate = self.attention_backward_rate if backward else self.attention_forward_rate
        narrow = np.minimum(head_size / WIDE_HEAD, 1.0) ** self.attention.small_heads
        return np.asarray(
            flops * (context + self.attention.half_context) / (rate * narrow * context)
        )

    def moved_seconds(self, num_bytes: FloatColumn) -> FloatColumn:
        """Seconds of a memory-bound kernel by the bytes it reads and writes."""
        return num_bytes / self.memory_rate
