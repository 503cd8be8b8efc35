"""Split backwards: what stays until W, what W does again, against torch's own."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.layer.weight_grads import parameter_groups
from planner.cost.price import Prices
from planner.cost.refine import play
from planner.intake.models import read_model
from planner.schedules import SCHEDULES
from planner.specs.layout import Layout
from planner.trainers.registry import resolve_layout
from planner.work.blocks import layer_ops
from tests import pricing
from tests.conftest import needed

LLAMA = read_model("llama3-8b")
H, KV, F = 4096, 1024, 14336  # widths of its layers: hidden, keys and values, feed-forward


def layout(name: str, trainer: str = "torchtitan", **values: Any) -> Layout:
    """Of a schedule in four stages."""
    values = {"pp": 4, "dp_shard": 2, "ac": "none", "pp_schedule": name, **values}
    return resolve_layout(values, trainer=trainer, num_gpus=8)


build = partial(pricing.pricer, global_batch_size=32)


def priced(*layouts: Layout, trainer: str = "torchtitan") -> Prices:
    return build(trainer=trainer).price(LayoutBatch.from_layouts(layouts), every_rank=True)


def held(prices: Prices, field: str, row: int = 0) -> float:
    seconds = prices.stage_seconds
    return float(getattr(seconds.costs, field)[0, seconds.at[row]])


def test_torch_keeps_the_graph_and_the_incoming_gradients() -> None:
    """q k v o, w1 w2 w3 and two norms receive h + 2 kv + h + 2 f + h + 2 h elements a token."""
    prices = priced(layout("ZBVZeroBubble"))
    incoming = 4096 * 2 * (H + 2 * KV + H + 2 * F + H + 2 * H)
    assert held(prices, "held_bytes") == pytest.approx(held(prices, "saved_bytes") + incoming)


def test_the_zero_bubble_fork_keeps_inputs_and_incoming_gradients() -> None:
    prices = priced(layout("ZB-1p", "megatron"), trainer="megatron")
    inputs, incoming = H + H + H + F, H + 2 * KV + H + 2 * F + H
    assert held(prices, "held_bytes") == pytest.approx(4096 * 2 * (inputs + incoming))
    assert held(prices, "redone_seconds") == 0.0


def test_recomputation_is_repeated_for_every_group_of_parameters() -> None:
    prices = priced(layout("ZBVZeroBubble", ac="full"), layout("ZBVZeroBubble"))
    redone = 9 * held(prices, "recompute_seconds")
    assert held(prices, "redone_seconds") == pytest.approx(redone, rel=1e-6)
    assert held(prices, "redone_seconds", 1) == 0.0


@pytest.mark.parametrize(("ac", "better"), [("none", True), ("full", False)])
def test_split_backwards_and_checkpointing_cost_more_than_whole_ones(ac: str, better: bool) -> None:
    """ZBV's saving is nothing against nine more forwards a layer; else it wins."""
    whole = layout("Interleaved1F1B", virtual_stages=2, ac=ac)
    prices = priced(layout("ZBVZeroBubble", ac=ac), whole)
    assert bool(prices.step_seconds[0] < prices.step_seconds[1]) is better
    assert prices.parts["recompute"][0] >= prices.parts["recompute"][1]


ZERO = "InterleavedZeroBubble"
SPLIT = [(ZERO, 2), (ZERO, 4), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
FORWARDS_FIRST = ("GPipe", "LoopedBFS")  # of 16 microbatches
BF16, FP32 = 2.0, 4.0
LLAMA_LAYER, LLAMA_TABLE = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2.0), 128256 * 4096.0
WHOLE = [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)]


@pytest.mark.parametrize(("name", "virtual"), [*SPLIT, *WHOLE])
@pytest.mark.parametrize("ac", ["none", "full"])
def test_priced_activations_are_the_simulated_peak(name: str, virtual: int, ac: str) -> None:
    """Rank by rank, but for the layer that runs backward: 1 %; where the head makes one stage hold
    more than its rank's others, 20 %.

    Where all forwards come first, memory is fullest before there is a gradient, or with all
    gradients beside one microbatch less. The head's rank then holds 15 losses that wait, each a
    log-softmax in fp32 and logits in bf16, which the simulation does not know.
    """
    split = [32 // (4 * virtual)] * 4 * virtual
    one = layout(name, virtual_stages=virtual, ac=ac, layers_per_stage=split)
    pricer, batch = build(), LayoutBatch.from_layouts([one])
    prices = pricer.price(batch, every_rank=True)
    played = play(pricer, batch, prices, np.zeros(1, dtype=np.int64))
    recomputed = prices.stage_seconds.costs.transient_bytes[:, prices.stage_seconds.at[0]].max()
    priced_R, played_R = prices.memory.parts()["activations"][:, 0], played.peak_saved_bytes_CR[0]
    has_head = SCHEDULES[name].stage_rank(4 * virtual - 1, 4, virtual) == np.arange(4)
    if name in FORWARDS_FIRST:
        parameters = 8.0 * LLAMA_LAYER + LLAMA_TABLE * np.array([1.0, 0.0, 0.0, 1.0])
        played_R = np.where(FP32 * parameters > played_R / 16, played_R * 15 / 16, played_R)
        priced_R = priced_R - has_head * 15 * 4096 * 128256 * (FP32 + BF16)
    room = np.where(has_head, 1.2, 1.01)
    assert np.all(played_R <= priced_R * room)
    assert np.all(priced_R <= (played_R + recomputed) * room)


@pytest.mark.torch
@pytest.mark.parametrize("ac", [False, True])
def test_torchs_split_backward_does_so(ac: bool) -> None:
    """A Llama block under torch's split backward: groups, forwards, bytes that autograd keeps."""
    torch = needed("torch")
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    from torch.utils.checkpoint import checkpoint

    d, f, tokens = 32, 48, 16
    forwards: list[int] = []

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            sizes = dict.fromkeys("qkvo", (d, d)) | {"w1": (d, f), "w2": (f, d), "w3": (d, f)}
            for name, (rows, cols) in sizes.items():
                setattr(self, name, torch.nn.Linear(rows, cols, bias=False))
            self.n1, self.n2 = torch.nn.RMSNorm(d), torch.nn.RMSNorm(d)

        def forward(self, x: Any) -> Any:
            forwards.append(1)
            y = self.n1(x)
            heads = [getattr(self, name)(y).view(1, tokens, 4, d // 4) for name in "qkv"]
            heads = [head.transpose(1, 2) for head in heads]
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).reshape(1, tokens, d))
            y = self.n2(x)
            return x + self.w2(torch.nn.functional.silu(self.w1(y)) * self.w3(y))

    block, x = Block(), torch.randn(1, tokens, d, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False) if ac else block(x)
    _, groups = stage_backward_input([out], [torch.randn_like(out)], [x], block.parameters())
    given = [grad for group in groups for grads in group["grads"] for grad in grads]
    incoming = sum(grad.numel() for grad in given if grad is not None)
    before = len(forwards)
    stage_backward_weight(block.parameters(), groups)
    ops = layer_ops(LLAMA, LLAMA.distinct_layers()[0][0], True)
    assert len(groups) == len(parameter_groups(ops)) == 9
    assert incoming == tokens * (4 * d + 2 * f + d + 2 * d)
    assert (before, len(forwards) - before) == ((2, 9) if ac else (1, 0))


@pytest.mark.torch
def test_torch_refuses_selective_checkpointing_of_a_split_backward() -> None:
    torch = needed("torch")
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    from torch.utils import checkpoint as module

    policy = module.CheckpointPolicy
    saved = itertools.cycle([policy.MUST_SAVE, policy.PREFER_RECOMPUTE])
    context = partial(module.create_selective_checkpoint_contexts, lambda *_, **__: next(saved))
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    out = module.checkpoint(layer, x, use_reentrant=False, context_fn=context)
    _, groups = stage_backward_input([out], [torch.randn_like(out)], [x], layer.parameters())
    with pytest.raises(RuntimeError, match="backward an extra time"):
        stage_backward_weight(layer.parameters(), groups)
