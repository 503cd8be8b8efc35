"""How unsure a step is of the kernel that its attention runs with.

Letters: N layouts, G kernels that it may be.
"""

from dataclasses import replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch
from planner.cost.machine.device import Device
from planner.cost.price import Pricer
from planner.trainers.registry import TRAINERS


def attention_sd(pricer: Pricer, batch: LayoutBatch) -> FloatColumn:
    """Standard deviation of log step seconds that comes from not knowing the kernel, (N,).

    sd = deviation over G of log seconds, each kernel as likely as the others.
    It grows with the share of the step that attention takes, since each layout is priced with every
    kernel that the release may bring (`trainers.attention`). 0 where the kernel is known or
    attention is unfused.
    """
    training = pricer.training
    kernels = TRAINERS[training.trainer].fused_attention(
        training, pricer.cluster.gpu, mla=pricer.model.uses_mla
    )
    if len(kernels) == 1 or training.attention_kernel == "unfused":
        return np.zeros(len(batch))
    logs = [
        np.log(
            replace(
                pricer,
                device=Device.build(
                    pricer.cluster, pricer.device.kernels, pricer.profile, generation
                ),
            )
            .price(batch)
            .step_seconds
        )
        for generation in kernels
    ]
    return np.asarray(np.std(logs, axis=0))
