"""A whole step under FSDP2 on an emulated rank: the peak that torch's tracker sees, within 2% of
ours.

Every kind of memory competes in these: sizes are drawn so that now the loss, now a layer, now the
    reduction or the embedding is worst.
"""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from planner.columns import LayoutBatch
from planner.cost.memory.peak import PeakMemory
from planner.trainers.registry import resolve_layout
from tests.torch_memory.modules import Model, Sizes, cross_entropy
from tests.torch_memory.tracking import DTYPES, pricer, selective_op

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workspace")]

CPU = torch.device("cpu")


def drawn(number: int) -> Sizes:
    rng = random.Random(number)
    head_dim, heads = rng.choice((16, 32, 64)), rng.choice((2, 4, 8))
    hidden = head_dim * heads
    batch = rng.choice((1, 2))
    seq = max(64, rng.choice((hidden // 2, hidden, 256))) // batch
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=rng.choice((1, 2, 3)) * hidden,
        seq=seq,
        batch=batch,
        vocab=rng.choice((64, 256, 1024, 2048)),
        layers=rng.randint(3, 4),
        mlp=rng.choice(("swiglu", "gelu")),
        norm=rng.choice(("rms", "layer")),
    )


def checkpointed(layer: nn.Module, ac: str, index: int) -> nn.Module:
    if ac == "none" or (ac.startswith("selective-layer-") and index % int(ac.rsplit("-", 1)[1])):
        return layer
    context = {"context_fn": selective_op} if ac == "selective-op" else {}
    wrapped: nn.Module = checkpoint_wrapper(layer, preserve_rng_state=False, **context)
    return wrapped


def sharded(sizes: Sizes, mesh: Any, ac: str, layout: dict[str, Any]) -> Model:
    """As torchtitan shards: embedding, every layer, head, the rest; stage 2 gathers once."""
    model = Model(sizes)
    for index, layer in enumerate(model.layers, start=1):
        model.layers[index - 1] = checkpointed(layer, ac, index)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout["param_dtype"]], reduce_dtype=DTYPES[layout["reduce_dtype"]]
    )
    again = layout["zero_stage"] == 3
    for module in (model.embedding, *model.layers):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model.head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def run_step(model: Model, ids: Any, microbatches: int = 1) -> None:
    for _ in range(microbatches):
        logits = model(ids)
        loss = cross_entropy(logits, ids)
        del logits
        loss.backward()


def torch_peak(sizes: Sizes, ac: str, microbatches: int, layout: dict[str, Any]) -> int:
    """Bytes at the peak of a step after the first one, without the rotary table and the token
    ids.
    """
    mesh = init_device_mesh("cpu", (8,))
    model = sharded(sizes, mesh, ac, layout)
    ids = torch.zeros(sizes.batch, sizes.seq, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    run_step(model, ids)
    optimizer.step()
    optimizer.zero_grad()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        run_step(model, ids, microbatches)
    seen = {
        getattr(kind, "value", kind): size
        for kind, size in tracker.get_tracker_snapshot("peak")[CPU].items()
    }
    return int(seen["Total"] - seen["Buffer"] - seen["Inputs"])


def our_peak(sizes: Sizes, world: int, ac: str, microbatches: int, layout: dict[str, Any]) -> float:
    p = pricer(sizes, world, global_batch_size=sizes.batch * world * microbatches)
    given = {"micro_batch_size": sizes.batch, "ac": ac, **layout}
    batch = LayoutBatch.from_layouts([resolve_layout(given, trainer="torchtitan", num_gpus=world)])
    memory: PeakMemory = p.price(batch, every_rank=True).memory
    return float(memory.allocated[0, 0] - memory.workspace[0, 0])


@pytest.mark.parametrize("ac", ["none", "full", "selective-op", "selective-layer-2"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("number", range(6))
def test_peak(world: int, ac: str, stage: int, number: int) -> None:
    sizes = drawn(100 * number + 10 * stage + len(ac))
    reduce_dtype = ("float32", "bfloat16")[number % 2]
    layout = {"zero_stage": stage, "param_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
    seen = torch_peak(sizes, ac, 1, layout)
    assert our_peak(sizes, world, ac, 1, layout) == pytest.approx(seen, rel=0.02), sizes


@pytest.mark.parametrize(
    ("ac", "stage"), [("none", 3), ("full", 3), ("full", 2), ("selective-op", 3)]
)
def test_peak_of_an_accumulating_step(world: int, ac: str, stage: int) -> None:
    """The second microbatch runs beside the first one's shards of gradients."""
    sizes, layout = (
        drawn(1000 + stage + len(ac)),
        {"zero_stage": stage, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    )
    seen = torch_peak(sizes, ac, 2, layout)
    assert our_peak(sizes, world, ac, 2, layout) == pytest.approx(seen, rel=0.02), sizes


@pytest.mark.parametrize("ac", ["none", "full"])
def test_peak_in_single_precision(world: int, ac: str) -> None:
    sizes, layout = (
        drawn(2000 + len(ac)),
        {"zero_stage": 3, "param_dtype": "float32", "reduce_dtype": "float32"},
    )
    seen = torch_peak(sizes, ac, 1, layout)
    assert our_peak(sizes, world, ac, 1, layout) == pytest.approx(seen, rel=0.02), sizes
