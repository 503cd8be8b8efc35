"""What a pipeline stage of the real megatron-core saves of its input, and keeps of its output.

    PYTHONPATH=.venv/megatron python benchmarks/megatron_stage.py

A stage of LAYERS layers without embedding and head takes a tensor, as it arrives from the stage
before. Prints, without and with recomputation of whole layers, how many tensors of the input's size
autograd saves, and whether the input is one of them; then the elements left of an output that was
sent. On a CPU: what asks for a GPU's random numbers is a stand-in.
"""

import contextlib
import sys
import types
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, SEQUENCE, BATCH, HIDDEN = 2, 32, 2, 64
RECOMPUTED = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def prepare() -> None:
    """One rank without a GPU."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    torch.cuda.current_device = lambda: 0
    parallel_state.initialize_model_parallel()
    for module in list(sys.modules.values()):
        if module.__name__.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_: tracker
    random._get_all_rng_states = lambda: ()
    empty = torch.empty
    torch.empty = lambda *size, device=None, **more: empty(*size, **more)


def saved(more: dict[str, Any]) -> tuple[int, bool]:
    """(tensors of the input's size that autograd saves, whether the input is one)."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0, **more,
    )  # fmt: skip
    stage = TransformerBlock(
        config, get_gpt_layer_local_spec(), pre_process=False, post_process=False
    )
    received = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    stage.set_input_tensor(received)
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mask = torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
        sent = stage(hidden_states=None, attention_mask=mask)
    own = {weight.untyped_storage().data_ptr() for weight in stage.parameters()}
    size, place = received.untyped_storage().nbytes(), received.untyped_storage().data_ptr()
    assert sent.shape == received.shape
    count = sum(1 for at, num_bytes in found.items() if num_bytes == size and at not in own)
    return count, place in found


def main() -> None:
    prepare()
    for name, more in (("none", {}), ("full", RECOMPUTED)):
        count, own = saved(more)
        print(f"{name}: {count} tensors of the input's size, the input {'' if own else 'not '}one")
    output = torch.ones(SEQUENCE, BATCH, HIDDEN)
    deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
    print(f"sent: {output.numel()} element")


if __name__ == "__main__":
    main()
