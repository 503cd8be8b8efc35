"""Doubt that no knob holds: an unknown attention kernel, a GPU that nobody measured.

Letters: N layouts, G kernels that attention may run with.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.machine.device import Device
from planner.cost.machine.knobs import Calibration
from planner.cost.price import Pricer
from planner.specs.gpu import GpuSpec
from planner.specs.gpu_families import KERNEL_ROWS
from planner.trainers.registry import TRAINERS

# Products of one family against each other under one trainer: B200 and GB200 deviate by 0.03 from
# what power and units say, MI350X and MI355X by 0.03 (training runs), H100 and H200 by 0.05, A100
# SXM and PCIe by 0.02, B200 and GB200 by 0.1 in long bf16 GEMMs (micro.csv).
UNMEASURED_GPU_SD = 0.06


def attention_sd(pricer: Pricer, batch: LayoutBatch) -> FloatColumn:
    """Standard deviation of log step seconds that comes from not knowing the kernel, (N,).

    sd = deviation over G of log seconds, each kernel as likely as the others.
    It grows with the share of the step that attention takes, since each layout is priced with every
    kernel that the release may bring (`trainers.attention`). 0 where the kernel is known or
    attention is unfused.
    """
    training = pricer.training
    kernels = TRAINERS[training.trainer].fused_attention(training, pricer.cluster.gpu, pricer.model)
    if len(kernels) == 1 or training.attention_kernel == "unfused":
        return np.zeros(len(batch))
    cluster, curves, profile = pricer.cluster, pricer.device.kernels, pricer.profile
    devices = (
        Device.build(cluster, curves, profile, kernel, tf32=pricer.rules.tf32) for kernel in kernels
    )
    logs = [np.log(replace(pricer, device=one).price(batch).step_seconds) for one in devices]
    return np.asarray(np.std(logs, axis=0))


def measured_gpu(gpu: GpuSpec) -> str:
    """Name in `Calibration.seen` of a run measured on this product."""
    return f"gpu {gpu.name}"


def unmeasured_gpu_sd(calibration: Calibration, gpu: GpuSpec) -> float:
    """Standard deviation of log step seconds that all layouts on a GPU never measured share.

    0 where a run on this product was measured. An unknown family has its doubt in its knobs
    (`cost.machine.knobs.rates_sd`), which is larger.
    """
    measured = any(name == measured_gpu(gpu) for _, _, name in calibration.seen)
    return 0.0 if measured or gpu.family not in KERNEL_ROWS else UNMEASURED_GPU_SD
