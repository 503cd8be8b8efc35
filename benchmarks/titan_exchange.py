"""What selective-op of the real TorchTitan 0.2.2 keeps of what expert parallelism sends.

    PYTHONPATH=.venv/titan torchrun --nproc-per-node 2 benchmarks/titan_exchange.py

Two ranks on a CPU share the experts of three blocks (a norm and torchtitan's MoE). Prints the bytes
that each block leaves after its forward, under TorchTitan's save list without and with all-to-all,
and those of one tensor of routed rows: the list keeps two of these.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.models.moe.utils as permutation
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.deepseek_v3.infra.parallelize import _op_sac_save_list
from torchtitan.models.moe import MoE, MoEArgs

SEQUENCES, LENGTH, HIDDEN, INNER, EXPERTS, TOP_K = 2, 256, 128, 96, 8, 4
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        arguments = MoEArgs(
            num_experts=EXPERTS, num_shared_experts=0, top_k=TOP_K, use_grouped_mm=False,
            load_balance_coeff=None,
        )  # fmt: skip
        self.moe = MoE(arguments, dim=HIDDEN, hidden_dim=INNER)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def contexts(listed: set[Any]) -> Any:
    """TorchTitan's policy: all on the list, of products every second."""
    seen = {False: 0, True: 0}

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = function == torch.ops.aten.mm.default
        seen[context.is_recompute] += product
        keeps = function in listed and not (product and seen[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def kept_bytes(listed: set[Any], mesh: Any) -> list[int]:
    """Bytes that each block leaves after its forward."""
    torch.manual_seed(0)
    blocks = [Block().to(torch.bfloat16) for _ in range(3)]
    for block in blocks:
        parallelize_module(block.moe.experts, mesh, ExpertParallel())
    options = {"preserve_rng_state": False, "early_stop": False}
    wrapped = [
        checkpoint_wrapper(block, context_fn=partial(contexts, listed), **options)
        for block in blocks
    ]
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(*blocks, x)
    with tracker:
        totals, hidden = [], x
        for block in (None, *wrapped):
            hidden = hidden if block is None else block(hidden)
            totals.append(int(tracker.get_tracker_snapshot("current")[x.device]["Total"]))
        hidden.float().sum().backward()
    return [after - before for before, after in pairwise(totals)]


def main() -> None:
    counted, indices = torch.histc, permutation.generate_permute_indices
    # a CPU counts no integers, and has no Triton
    torch.histc = lambda x, **options: counted(x.float(), **options).to(x.dtype)
    permutation.generate_permute_indices = partial(indices, use_cpu=True)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    found = [
        kept_bytes(listed, mesh) for listed in (_op_sac_save_list - {EXCHANGE}, _op_sac_save_list)
    ]
    if dist.get_rank() == 0:
        print("without", found[0], "with", found[1])
        print("one tensor of routed rows", SEQUENCES * LENGTH * TOP_K * HIDDEN * 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
