"""Tensor-parallel communication hides by a mechanism of the trainer's release, or not at all."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.columns import LayoutBatch
from planner.cost.layer.context import CostContext
from planner.cost.layer.tp_hidden import Cover, covers, hidden_seconds, hidden_shares
from planner.cost.layer.trainer_kernels import trainer_code
from planner.cost.price import Pricer
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.specs.layout import Layout
from planner.trainers.registry import TRAINERS, resolve_layout
from planner.trainers.tp_overlap import MECHANISMS
from planner.work.blocks import head_ops, layer_ops
from planner.work.ops import Collective

MODEL = read_model("llama3-8b")
SHARE = {"tp_hidden": 0.5, "async_tp_hidden": 0.75}
WIRE = 12.0
COVER = Cover(forward=np.array([8.0]), input_grad=np.array([4.0]), weight_grad=np.array([6.0]))
NOTHING = (0.0, 0.0, 0.0, 0.0)
NEMO = "NeMo 25.02"
OURS = {"tp": 4, "sequence_parallel": True}


def pricer(trainer: str, version: str | None, gpu: str = "h100-sxm-80gb", **more: Any) -> Pricer:
    spec = {"seq_len": 4096, "global_batch_size": 16, "trainer": trainer, **more}
    training = read_training(spec if version is None else {**spec, "trainer_version": version})
    found = Pricer.build(MODEL, read_cluster({"gpu": gpu, "num_gpus": 16}), training)
    profile = replace(found.profile, **SHARE)
    return replace(found, profile=profile, device=replace(found.device, profile=profile))


def layout_of(p: Pricer, **layout: Any) -> Layout:
    return resolve_layout(layout, trainer=p.training.trainer, num_gpus=16)


def context_of(p: Pricer, **layout: Any) -> CostContext:
    context = p.context(LayoutBatch.from_layouts([layout_of(p, **layout)]))
    return replace(context, tp_hidden=hidden_shares(context))


def hidden(p: Pricer, *, site: str = "", linear: bool = True, **layout: Any) -> tuple[float, ...]:
    """Of 12 seconds each: into and out of the linear layers, forward, then backward."""
    context = context_of(p, **layout)
    ops = layer_ops(MODEL, MODEL.distinct_layers()[0][0], True, trainer_code(p.training, p.rules))
    first = {
        place: replace(
            next(op for op in ops if isinstance(op, Collective) and op.site == place), linear=linear
        )
        for place in ("tp_enter", "tp_exit")
    }
    return tuple(
        float(hidden_seconds(context, first[place], COVER, np.array([WIRE]), backward=backward)[0])
        for backward in (False, True)
        for place in ("tp_enter", "tp_exit")
    )


# chunks: 3 of 4 run under 3/4 of the GEMM; the reduction of input gradients under weight gradients
USER_BUFFERS = (0.5 * 6.0, 0.5 * 6.0, 0.5 * 6.0, 0.5 * 3.0)
SYMMETRIC_MEMORY = (0.75 * 6.0, 0.75 * 6.0, 0.75 * 3.0, 0.75 * 3.0)
DEFERRED = (0.0, 0.0, 0.5 * 6.0, 0.0)


@pytest.mark.parametrize(
    ("trainer", "version", "layout", "expected"),
    [
        ("megatron", NEMO, OURS, USER_BUFFERS),
        ("megatron", NEMO, {"tp": 4, "sequence_parallel": False}, DEFERRED),
        ("megatron", NEMO, {"tp": 16, "sequence_parallel": True}, DEFERRED),  # leaves NVLink
        ("megatron", "0.14", OURS, DEFERRED),
        ("megatron", "0.14", {**OURS, "async_tp": True}, USER_BUFFERS),
        ("megatron", "0.4", {**OURS, "async_tp": True}, DEFERRED),
        ("megatron", "2.4", OURS, NOTHING),
        ("torchtitan", "0.2.2", OURS, NOTHING),
        ("torchtitan", "0.2.2", {**OURS, "compile": True, "async_tp": True}, SYMMETRIC_MEMORY),
        ("internevo", None, OURS, DEFERRED),
        ("megatron-deepspeed", None, {**OURS, "sequence_parallel": False}, NOTHING),
        ("fsdp", None, OURS, NOTHING),
    ],
)
def test_a_mechanism_hides_what_it_can(
    trainer: str, version: str | None, layout: dict[str, Any], expected: tuple[float, ...]
) -> None:
    assert hidden(pricer(trainer, version), **layout) == pytest.approx(expected)


def test_latent_attention_has_no_user_buffers() -> None:
    for version, asked in ((NEMO, False), ("0.14", True)):
        p = pricer("megatron", version)
        context = context_of(p, **OURS, async_tp=asked)
        latent = {**context.sizes, "kv_lora": np.array([512.0])}
        (row,) = hidden_shares(replace(context, tp_hidden=(), sizes=latent))
        assert row[0] == "deferred"
        assert context.tp_hidden[0][0] == "user-buffers"


def test_a_run_that_switched_it_off_hides_nothing() -> None:
    for version in (NEMO, "0.14"):
        off = pricer("megatron", version, overlap={"tp": False})
        assert hidden(off, **OURS) == NOTHING


def test_gpus_without_peer_copies_hide_nothing_in_user_buffers() -> None:
    assert hidden(pricer("megatron", NEMO, "l40s"), **OURS) == pytest.approx(DEFERRED)
    assert hidden(pricer("megatron", NEMO, "mi300x-192gb"), **OURS) == pytest.approx(DEFERRED)


def test_the_vocabulary_only_defers() -> None:
    assert hidden(pricer("megatron", NEMO), linear=False, **OURS) == pytest.approx(DEFERRED)


def test_no_more_hides_than_there_is() -> None:
    p = pricer("megatron", NEMO)
    context = context_of(p, **OURS)
    entry = next(
        op
        for op in layer_ops(MODEL, MODEL.distinct_layers()[0][0], True)
        if isinstance(op, Collective) and op.site == "tp_enter"
    )
    for backward in (False, True):
        found = hidden_seconds(context, entry, COVER, np.array([1.0]), backward=backward)
        assert found == pytest.approx(0.5)


def test_a_collective_is_covered_by_the_products_beside_it() -> None:
    ops = (*layer_ops(MODEL, MODEL.distinct_layers()[0][0], True), *head_ops(MODEL))
    names = [op.name for op in ops if type(op).__name__ == "Gemm"]
    powers = {name: 2.0**at for at, name in enumerate(names)}

    class One:
        def __init__(self, seconds: float) -> None:
            self.forward = self.input_grad = self.weight_grad = np.array([seconds])

    found = covers(ops, {name: One(x) for name, x in powers.items()}, 1)  # type: ignore[misc]
    expected = {
        "attention_in": ("wq", "wk", "wv"),
        "attention_sum": ("wo",),
        "mlp_in": ("mlp_w1", "mlp_w3"),
        "mlp_sum": ("mlp_w2",),
        "head_in": ("head",),
    }
    assert set(names) == {name for beside in expected.values() for name in beside}
    for name, beside in expected.items():
        assert found[name].forward[0] == sum(powers[x] for x in beside), name


def test_every_row_has_a_known_mechanism_and_a_source() -> None:
    rows = [row for trainer in TRAINERS.values() for row in trainer.tp_overlaps]
    assert {row.mechanism for row in rows} == set(MECHANISMS)
    assert all(row.source for row in rows)
