"""Tensor-parallel communication hides by a mechanism of the trainer's release, or not at all."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.layer.context import CostContext
from planner.cost.layer.tp_hidden import Cover, covers, hidden_seconds, hidden_shares
from planner.cost.layer.trainer_kernels import trainer_code
from planner.cost.price import Pricer
from planner.intake.models import read_model
from planner.trainers.registry import TRAINERS
from planner.trainers.tp_overlap import MECHANISMS
from planner.work.blocks import head_ops, layer_ops
from planner.work.ops import Collective
from planner.work.pieces import Code
from tests import pricing
from tests.pricing import H100, batch_of

MODEL = read_model("llama3-8b")
SHARE = {"tp_hidden": 0.5, "async_tp_hidden": 0.75}
WIRE = 12.0
COVER = Cover(forward=np.array([8.0]), input_grad=np.array([4.0]), weight_grad=np.array([6.0]))
NOTHING = [0.0, 0.0, 0.0, 0.0]
NEMO = "NeMo 25.02"
OURS = {"tp": 4, "sequence_parallel": True}


def pricer(trainer: str, version: str | None, gpu: str = H100, **more: Any) -> Pricer:
    given = {"trainer": trainer, "trainer_version": version, "global_batch_size": 16, **more}
    found = pricing.pricer("llama3-8b", 16, gpu, **given)
    profile = replace(found.profile, **SHARE)
    return replace(found, profile=profile, device=replace(found.device, profile=profile))


def context_of(p: Pricer, **layout: Any) -> CostContext:
    context = p.context(batch_of(p, **layout))
    return replace(context, tp_hidden=hidden_shares(context))


def site(place: str, *code: Code) -> Collective:
    ops = layer_ops(MODEL, MODEL.distinct_layers()[0][0], True, *code)
    return next(op for op in ops if isinstance(op, Collective) and op.site == place)


def hidden(p: Pricer, *, linear: bool = True, wire: float = WIRE, **layout: Any) -> list[float]:
    """Of 12 seconds each: into and out of the linear layers, forward, then backward."""
    context, code, found = context_of(p, **layout), trainer_code(p.training, p.rules), []
    for backward, place in itertools.product((False, True), ("tp_enter", "tp_exit")):
        op = replace(site(place, code), linear=linear)
        sent = np.array([wire])
        found.append(float(hidden_seconds(context, op, COVER, sent, backward=backward)[0]))
    return found


USER_BUFFERS = [0.5 * 6.0, 0.5 * 6.0, 0.5 * 6.0, 0.5 * 3.0]
SYMMETRIC_MEMORY = [0.75 * 6.0, 0.75 * 6.0, 0.75 * 3.0, 0.75 * 3.0]
DEFERRED = [0.0, 0.0, 0.5 * 6.0, 0.0]
ASKED = {**OURS, "async_tp": True}


# chunks: 3 of 4 run under 3/4 of the GEMM; the reduction of input gradients under weight gradients


@pytest.mark.parametrize(("trainer", "version", "layout", "more", "expected"), [
    ("megatron", NEMO, OURS, {}, USER_BUFFERS),
    ("megatron", NEMO, {"tp": 4, "sequence_parallel": False}, {}, DEFERRED),
    ("megatron", NEMO, {"tp": 16, "sequence_parallel": True}, {}, DEFERRED),  # leaves NVLink
    ("megatron", "0.14", OURS, {}, DEFERRED),
    ("megatron", "0.14", ASKED, {}, USER_BUFFERS),
    ("megatron", "0.4", ASKED, {}, DEFERRED),
    ("megatron", "2.4", OURS, {}, NOTHING),
    ("torchtitan", "0.2.2", OURS, {}, NOTHING),
    ("torchtitan", "0.2.2", {**ASKED, "compile": True}, {}, SYMMETRIC_MEMORY),
    ("internevo", None, OURS, {}, DEFERRED),
    ("megatron-deepspeed", None, {**OURS, "sequence_parallel": False}, {}, NOTHING),
    ("fsdp", None, OURS, {}, NOTHING),
    # a run that switched it off
    ("megatron", NEMO, OURS, {"overlap": {"tp": False}}, NOTHING),
    ("megatron", "0.14", OURS, {"overlap": {"tp": False}}, NOTHING),
    # GPUs without peer copies hide nothing in user buffers
    ("megatron", NEMO, OURS, {"gpu": "l40s"}, DEFERRED),
    ("megatron", NEMO, OURS, {"gpu": "mi300x-192gb"}, DEFERRED),
])  # fmt: skip
def test_a_mechanism_hides_what_it_can(
    trainer: str, version: str | None, layout: Any, more: dict[str, Any], expected: list[float]
) -> None:
    assert hidden(pricer(trainer, version, **more), **layout) == pytest.approx(expected)


def test_latent_attention_has_no_user_buffers() -> None:
    for version, asked in ((NEMO, False), ("0.14", True)):
        p = pricer("megatron", version)
        context = context_of(p, **OURS, async_tp=asked)
        latent = {**context.sizes, "kv_lora": np.array([512.0])}
        (row,) = hidden_shares(replace(context, tp_hidden=(), sizes=latent))
        assert row[0] == "deferred"
        assert context.tp_hidden[0][0] == "user-buffers"


def test_the_vocabulary_only_defers_and_no_more_hides_than_there_is() -> None:
    p = pricer("megatron", NEMO)
    assert hidden(p, linear=False, **OURS) == pytest.approx(DEFERRED)
    assert hidden(p, wire=1.0, **OURS) == pytest.approx([0.5] * 4)


def test_a_collective_is_covered_by_the_products_beside_it() -> None:
    ops = (*layer_ops(MODEL, MODEL.distinct_layers()[0][0], True), *head_ops(MODEL))
    names = [op.name for op in ops if type(op).__name__ == "Gemm"]
    powers = {name: 2.0**at for at, name in enumerate(names)}

    class One:
        def __init__(self, seconds: float) -> None:
            self.forward = self.input_grad = self.weight_grad = np.array([seconds])

    found = covers(ops, {name: One(x) for name, x in powers.items()}, 1)  # type: ignore[misc]
    expected = {
        "attention_in": ("wq", "wk", "wv"), "attention_sum": ("wo",),
        "mlp_in": ("mlp_w1", "mlp_w3"), "mlp_sum": ("mlp_w2",), "head_in": ("head",),
    }  # fmt: skip
    assert set(names) == {name for beside in expected.values() for name in beside}
    for name, beside in expected.items():
        assert found[name].forward[0] == sum(powers[x] for x in beside), name


def test_every_row_has_a_known_mechanism_and_a_source() -> None:
    rows = [row for trainer in TRAINERS.values() for row in trainer.tp_overlaps]
    assert {row.mechanism for row in rows} == set(MECHANISMS)
    assert all(row.source for row in rows)
