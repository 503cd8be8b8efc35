"""Rules on Muon where a trainer deals whole matrices out to ranks."""

import numpy as np

from planner.precision import PRECISIONS
from planner.rules.base import Context, Rule


def _owns_matrices(c: Context) -> bool:
    """Whether Muon runs, and ranks own whole matrices of it."""
    return c.training.optimizer == "muon" and c.muon.whole_owners


MUON_RULES: tuple[Rule, ...] = (
    Rule(
        key="Muon's owners need one group",
        field="zero_stage",
        reads=frozenset({"zero_stage", "dp_replicate"}),
        # Megatron-LM training/arguments.py: "does not support Megatron-FSDP for now";
        # core/optimizer/__init__.py: "num_distributed_optimizer_instances > 1"
        applies=_owns_matrices,
        broken=lambda x, c: (x.zero_stage >= 2) | ((x.zero_stage == 1) & (x.dp_replicate > 1)),
        rule="{c.release_name} deals Muon's matrices out to one group of ranks at stage 1, and "
        "zero_stage is {x.zero_stage} with dp_replicate {x.dp_replicate}",
        remedy="set zero_stage to 1 with dp_replicate 1, or to 0",
    ),
    Rule(
        key="Muon's states stay on the device",
        field="cpu_offload",
        # core/optimizer/__init__.py: "skip_megatron_wrapping=True is incompatible with
        # optimizer_cpu_offload"; HybridDeviceOptimizer is of Adam and SGD
        applies=_owns_matrices,
        broken=lambda x, c: np.asarray(x.cpu_offload),
        rule="{c.release_name} cannot move Muon's states to the host",
        remedy="set cpu_offload to false",
    ),
    Rule(
        key="Muon excludes fp16",
        field="precision",
        # core/optimizer/__init__.py: "emerging optimizer with fp16 is not supported"
        applies=_owns_matrices,
        broken=lambda x, c: x.precision == PRECISIONS.names.index("fp16"),
        rule="{c.release_name} has no Muon in fp16",
        remedy="set precision to bf16",
    ),
)
