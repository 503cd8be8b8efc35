"""A whole step under FSDP2 on an emulated rank: the peak that torch's tracker sees, within 2% of
ours.

Every kind of memory competes in these: sizes are drawn so that now the loss, now a layer, now the
    reduction or the embedding is worst.
"""

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from planner.probes.reference.memory import Tracker
from planner.work.pieces import LOSS_CHUNKS
from tests.conftest import one_fast, slow
from tests.pricing import batch_of, price, shards_of
from tests.torch_memory.modules import HeadlessModel, Model, Sizes, chunked_loss, cross_entropy
from tests.torch_memory.tracking import DTYPES, pricer, selective_op

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workspace")]

CPU = torch.device("cpu")
Given = dict[str, Any]
# computes nothing: quicker where a CPU takes long to multiply, and the same bytes
SHAPES_ALONE = partial(FakeTensorMode, allow_non_fake_inputs=True)


def drawn(number: int) -> Sizes:
    rng = random.Random(number)
    head_dim, heads = rng.choice((16, 32, 64)), rng.choice((2, 4, 8))
    hidden = head_dim * heads
    batch = rng.choice((1, 2))
    seq = max(64, rng.choice((hidden // 2, hidden, 256))) // batch
    return Sizes(
        hidden=hidden, heads=heads, kv_heads=heads, head_dim=head_dim,
        ffn=rng.choice((1, 2, 3)) * hidden, seq=seq, batch=batch,
        vocab=rng.choice((64, 256, 1024, 2048)), layers=rng.randint(3, 4),
        mlp=rng.choice(("swiglu", "gelu")), norm=rng.choice(("rms", "layer")),
    )  # fmt: skip


def checkpointed(layer: nn.Module, ac: str, index: int) -> nn.Module:
    kind, _, count = ac.rpartition("-")
    if (
        ac == "none"
        or (kind == "selective-layer" and index % int(count))
        or (kind == "block" and index > int(count))
    ):
        return layer
    context = {"context_fn": selective_op} if ac == "selective-op" else {}
    options = {"preserve_rng_state": False, "early_stop": False, **context}
    wrapped: nn.Module = checkpoint_wrapper(layer, **options)
    return wrapped


def sharded(model: Model, mesh: Any, ac: str, layout: Given, ends_in_root: bool = False) -> Model:
    """As torchtitan shards: embedding, every layer, head, the rest; stage 2 gathers once.

    ends_in_root: only layers, then the rest.
    """
    for index, layer in enumerate(model.layers, start=1):
        model.layers[index - 1] = checkpointed(layer, ac, index)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout["param_dtype"]], reduce_dtype=DTYPES[layout["reduce_dtype"]]
    )
    again = layout["zero_stage"] == 3
    for module in (*(() if ends_in_root else (model.embedding,)), *model.layers):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    if not ends_in_root:
        head = model.head.output if isinstance(model, HeadlessModel) else model.head
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def run_step(model: Model, ids: Any, microbatches: int = 1) -> None:
    for _ in range(microbatches):
        out = model(ids)
        if isinstance(model, HeadlessModel):
            loss = chunked_loss(out, ids, model.head.output, LOSS_CHUNKS)
        else:
            loss = cross_entropy(out, ids)
        del out
        loss.backward()


def peak_of_storages(sizes: Sizes, ac: str, layout: Given) -> int:
    """Peak bytes of a module that runs several times in a step, which FSDP's tracker refuses."""
    mesh = init_device_mesh("cpu", (8,))
    with SHAPES_ALONE():
        model = sharded(HeadlessModel(sizes), mesh, ac, layout)
        ids = torch.zeros(sizes.batch, sizes.seq, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters())
        with Tracker() as tracker:
            tracker.adopt(model.parameters())
            run_step(model, ids)
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset()
            run_step(model, ids)
    return tracker.peak


def torch_peak(sizes: Sizes, ac: str, layout: Given, microbatches: int, ends_in_root: bool) -> int:
    """Peak bytes of a step after the first one, without the rotary table and the token ids."""
    mesh = init_device_mesh("cpu", (8,))
    with SHAPES_ALONE() if "master_dtype" in layout else nullcontext():
        model = Model(sizes)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[layout.get("master_dtype", "float32")])
        model = sharded(model, mesh, ac, layout, ends_in_root)
        ids = torch.zeros(sizes.batch, sizes.seq, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters())
        run_step(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            run_step(model, ids, microbatches)
    snapshot = tracker.get_tracker_snapshot("peak")[CPU]
    seen = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}
    return int(seen["Total"] - seen["Buffer"] - seen["Inputs"])


def our_peak(sizes: Sizes, ac: str, layout: Given, microbatches: int, **training: Any) -> float:
    p = pricer(sizes, 8, global_batch_size=sizes.batch * 8 * microbatches, **training)
    memory = price(p, micro_batch_size=sizes.batch, ac=ac, **layout).memory
    return float(memory.allocated[0, 0] - memory.workspace_bytes)


def check(sizes: Sizes, ac: str, layout: Given, microbatches: int = 1, **training: Any) -> None:
    if "chunked_loss" in training:
        seen = peak_of_storages(sizes, ac, layout)
    else:
        seen = torch_peak(sizes, ac, layout, microbatches, training.get("trainer") == "fsdp")
    ours = our_peak(sizes, ac, layout, microbatches, **training)
    assert ours == pytest.approx(seen, rel=0.02), sizes


def layout_of(stage: int = 3, reduce_16: bool = False, **dtypes: str) -> Given:
    reduce_dtype = "bfloat16" if reduce_16 else "float32"
    given = {"zero_stage": stage, "param_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
    return given | dtypes


pytestmark += [pytest.mark.usefixtures("world")]


@pytest.mark.parametrize("ac", ["none", "full", "selective-op", "selective-layer-2"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("number", [2, 3, *slow(0, 1, 4, 5)])
def test_peak(ac: str, stage: int, number: int) -> None:
    sizes = drawn(100 * number + 10 * stage + len(ac))
    check(sizes, ac, layout_of(stage, reduce_16=number % 2 == 1))


@pytest.mark.parametrize("ac", ["block-1", "block-2"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("number", one_fast(4, 0, 1, 2, 3))
def test_peak_of_a_stage_that_recomputes_some(ac: str, stage: int, number: int) -> None:
    check(drawn(5000 + 10 * number + stage), ac, layout_of(stage))


@pytest.mark.parametrize(
    ("ac", "stage"), [("none", 3), ("full", 3), ("full", 2), ("selective-op", 3)]
)
def test_peak_of_an_accumulating_step(ac: str, stage: int) -> None:
    """The second microbatch runs beside the first one's shards of gradients."""
    check(drawn(1000 + stage + len(ac)), ac, layout_of(stage), 2)


@pytest.mark.parametrize("ac", one_fast("full", "selective-op"))
@pytest.mark.parametrize("number", [0, 3, *slow(1, 2)])
def test_peak_of_a_chunked_loss(ac: str, number: int) -> None:
    shapes = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 256}
    shapes |= {"ffn": (512, 1536)[number // 2], "vocab": (1024, 4096)[number % 2]}
    sizes = replace(drawn(3000 + 10 * number + len(ac)), **shapes)
    check(sizes, ac, layout_of(reduce_16=number >= 2), chunked_loss=True)


@pytest.mark.parametrize("ac", one_fast("selective-op", "none", "full"))
@pytest.mark.parametrize("microbatches", one_fast(2, 1))
def test_peak_of_16_bit_states(ac: str, microbatches: int) -> None:
    """Parameters, gradients and both moments in bfloat16: 8 bytes a parameter."""
    layout = layout_of(reduce_16=True, master_dtype="bfloat16")
    check(drawn(4000 + 10 * microbatches + len(ac)), ac, layout, microbatches)


@pytest.mark.parametrize("ac", ["none", "full", "selective-op"])
@pytest.mark.parametrize("number", [0, 1, *slow(2, 3)])
def test_peak_with_embedding_and_head_in_the_root_unit(ac: str, number: int) -> None:
    """A generic user of FSDP shards the layers, then the model."""
    sizes = drawn(5000 + 10 * number + len(ac))
    check(sizes, ac, layout_of(reduce_16=number % 2 == 1), trainer="fsdp")


@pytest.mark.parametrize("ac", ["none", "full"])
def test_peak_in_single_precision(ac: str) -> None:
    check(drawn(2000 + len(ac)), ac, layout_of(param_dtype="float32"))


class BufferCopies(TorchDispatchMode):
    """Bytes that FSDP reads and writes between its units' tensors and its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == torch.ops.fsdp.split_with_sizes_copy.default:
            self.gathered += 2 * args[0].nbytes
        elif function == torch.ops.fsdp.chunk_cat.default:
            self.reduced += sum(grad.nbytes for grad in args[0]) + kwargs["out"].nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_copies_out_of_and_into_buffers_are_fsdps(world: int, reduce_dtype: str) -> None:
    sizes, layout = drawn(7), layout_of(2, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(Model(sizes), mesh, "none", layout)
    ids = torch.zeros(sizes.batch, sizes.seq, dtype=torch.int64)
    run_step(model, ids)
    with BufferCopies() as seen:
        run_step(model, ids)
    p = pricer(sizes, world, global_batch_size=sizes.batch * world)
    shards = shards_of(p, batch_of(p, micro_batch_size=sizes.batch, **layout))
    counts = np.array([*(count for _, count in p.model.distinct_layers()), 1, 1])
    columns = (shards.gather_copy_seconds, shards.scatter_copy_seconds)
    ours = [(counts * seconds[:, 0]).sum() * p.device.memory_rate for seconds in columns]
    assert ours == pytest.approx([seen.gathered, seen.reduced], rel=0.02)
