"""Megatron-LM's --recompute-modules: bytes and FLOP of each module against closed forms by hand."""

import itertools
from typing import Any

import numpy as np
import pytest

from planner import estimate
from planner.columns import LayoutBatch
from planner.cost.cost_inputs import units_at
from planner.cost.cost_rows import distinct_rows
from planner.cost.layer.unit_costs import UnitCosts
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.search.variations.sensitivity import sensitivity
from planner.specs.layout import RECOMPUTE_MODULES, Layout, format_ac, parse_ac
from planner.study.pruning import at_least
from planner.trainers.registry import resolve_layout

S, B = 512, 2  # sequence and microbatch
T = S * B  # tokens of a microbatch
H, F, E, K, W = 256, 1024, 8, 2, 384  # hidden, dense and expert width, experts, top-k, shared width
HEADS, KV, D = 8, 2, 32
WIDE = 128  # of one expert
GROUPED: dict[str, Any] = {
    "name": "small-moe", "hidden_size": H, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "intermediate_size": F, "vocab_size": 1024,
    "mlp": "swiglu", "norm": "rmsnorm", "num_experts": E, "num_experts_per_tok": K,
    "moe_intermediate_size": WIDE, "shared_expert_intermediate_size": W, "n_shared_experts": 3,
    "first_k_dense_replace": 1,
}  # fmt: skip
Q_RANK, KV_RANK, NOPE, ROPE, V = 64, 48, 32, 16, 32
LATENT: dict[str, Any] = {
    **{key: value for key, value in GROUPED.items() if key not in ("head_dim",)},
    "name": "small-mla", "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V,
}  # fmt: skip
DENSE, MOE = 0, 1  # the model's distinct layers
ROUTED = T * K


def pricer(model: Any, **training: Any) -> Pricer:
    values = {"seq_len": S, "global_batch_size": 64, "trainer": "megatron", "moe_imbalance": 1.0}
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": 8})
    return Pricer.build(read_model(model), cluster, read_training({**values, **training}))


def costs(model: Any, *modes: str, **training: Any) -> UnitCosts:
    """Costs of units (K + 2, U), a column for each mode, on a GPU that holds all experts."""
    job = pricer(model, **training)
    rows = LayoutBatch.from_layouts([
        resolve_layout(
            {"ac": mode, "micro_batch_size": B}, trainer="megatron", num_gpus=8
        )
        for mode in modes
    ])  # fmt: skip
    distinct, at = distinct_rows(job, rows)
    found = units_at(job, distinct).costs
    assert at.tolist() == list(range(len(modes)))
    return found


def freed(model: Any, mode: str, layer: int, **training: Any) -> float:
    saved = costs(model, "none", mode, **training).saved_bytes[layer]
    return float(saved[0] - saved[1])


def repeated(model: Any, mode: str, layer: int) -> float:
    return float(costs(model, mode).recompute_flops[layer, 0])


ATTENTION = 2 * 2 * T * S * HEADS * D / 2  # scores and values, causal
UP = 2 * T * HEADS * (Q_RANK * (NOPE + ROPE) + KV_RANK * (NOPE + V))
MLP = 3 * 2 * T * H * F
SHARED = 3 * 2 * T * H * W
ROUTER, EXPERTS = 2 * T * H * E, 3 * 2 * ROUTED * H * WIDE
LSE, RSTD = 4 * T * HEADS, 4 * T
# mlp: inputs of both projections and of the last, both outputs of the first, the norm's deviation;
# its input h is the checkpoint's
MLP_BYTES = 2 * T * (H + 3 * F) + RSTD
SHARED_BYTES = 2 * T * 3 * W  # its input is the router's too
ACTIVATION = 2 * ROUTED * WIDE
NORM = 2 * T * H + RSTD
# scores (fp32) and three tables of indices (int64), expert inputs and three activations
MOE_BYTES = 4 * T * E + 3 * 8 * ROUTED + 2 * ROUTED * (H + 3 * WIDE) + SHARED_BYTES
QKV = 2 * T * HEADS * (2 * (NOPE + ROPE) + NOPE + V)  # the value is a view of the projection
NARROW = 2 * T * (Q_RANK + KV_RANK) + 2 * 4 * T  # normed latents and deviations


@pytest.mark.parametrize(("model", "module", "layer", "num_bytes", "flops"), [
    (GROUPED, "core_attn", MOE, LSE, ATTENTION),
    (GROUPED, "mlp", DENSE, MLP_BYTES, MLP),
    (GROUPED, "mlp", MOE, 0, 0),
    (GROUPED, "layernorm", MOE, NORM, 0),
    (GROUPED, "layernorm", DENSE, 0, 0),  # fused into the first linear layer
    (LATENT, "layernorm", DENSE, NORM, 0),
    (LATENT, "layernorm", MOE, 2 * NORM, 0),
    (GROUPED, "moe_act", MOE, ACTIVATION, 0),
    (GROUPED, "moe_act", DENSE, 0, 0),
    (GROUPED, "moe", MOE, MOE_BYTES, ROUTER + EXPERTS + SHARED),
    (GROUPED, "moe", DENSE, 0, 0),
    (LATENT, "mla_up_proj", DENSE, QKV + NARROW, UP),
    (GROUPED, "shared_experts", MOE, SHARED_BYTES, SHARED),
])  # fmt: skip
def test_a_module_frees_and_repeats_what_is_counted_by_hand(
    model: Any, module: str, layer: int, num_bytes: float, flops: float
) -> None:
    assert freed(model, f"modules-{module}", layer) == pytest.approx(num_bytes, rel=1e-9)
    assert repeated(model, f"modules-{module}", layer) == pytest.approx(flops, rel=1e-9)


def test_until_scores_moved_into_the_experts_their_outputs_were_saved_too() -> None:
    found = freed(GROUPED, "modules-moe", MOE, trainer_version="0.12")
    assert found == pytest.approx(MOE_BYTES + 2 * ROUTED * H, rel=1e-9)


def test_without_flash_attention_the_scores_are_freed() -> None:
    """16-bit softmax and probabilities, and a byte of dropout mask."""
    found = freed(GROUPED, "modules-core_attn", DENSE, attention_kernel="unfused")
    assert found == pytest.approx(5 * B * HEADS * S * S, rel=1e-9)


@pytest.mark.parametrize(("modules", "num_bytes"), [
    ("moe_act+layernorm", ACTIVATION + 2 * NORM),
    ("moe+layernorm", MOE_BYTES + 2 * NORM),  # the experts' input is discarded too
    ("moe+moe_act+shared_experts", MOE_BYTES),  # parts of the experts
    ("mla_up_proj+core_attn", QKV + NARROW + LSE),  # inputs of the one are outputs of the other
])  # fmt: skip
def test_modules_together(modules: str, num_bytes: float) -> None:
    assert freed(LATENT, f"modules-{modules}", MOE) == pytest.approx(num_bytes, rel=1e-9)


def test_without_a_query_rank_the_query_projection_is_repeated_too() -> None:
    """Its input is the other projection's as well, so that it stays."""
    model = {**LATENT, "q_lora_rank": None}
    found = repeated(model, "modules-mla_up_proj", DENSE)
    up = 2 * T * HEADS * (H * (NOPE + ROPE) + KV_RANK * (NOPE + V))
    assert found == pytest.approx(up, rel=1e-9)
    assert freed(model, "modules-mla_up_proj", DENSE) == pytest.approx(
        QKV + 2 * T * KV_RANK + RSTD, rel=1e-9
    )


def test_each_row_of_a_batch_has_its_own_modules() -> None:
    modes = ["none", "full", *(f"modules-{one}" for one in RECOMPUTE_MODULES)]
    modes += [f"modules-{a}+{b}" for a, b in itertools.combinations(RECOMPUTE_MODULES, 2)]
    modes = list(dict.fromkeys(format_ac(*parse_ac(mode)) for mode in modes))
    together = costs(LATENT, *modes)
    for place, mode in enumerate(modes):
        alone = costs(LATENT, mode)
        for name in ("saved_bytes", "transient_bytes", "recompute_seconds", "recompute_flops"):
            assert np.array_equal(getattr(together, name)[:, [place]], getattr(alone, name))


def test_more_modules_never_save_more_nor_repeat_less() -> None:
    sets = [[name for bit, name in enumerate(RECOMPUTE_MODULES) if bits >> bit & 1]
            for bits in range(2, 2 ** len(RECOMPUTE_MODULES))]  # fmt: skip
    found = costs(LATENT, *(f"modules-{'+'.join(names)}" for names in sets))
    saved = {frozenset(names): found.saved_bytes[:, i] for i, names in enumerate(sets)}
    flops = {frozenset(names): found.recompute_flops[:, i] for i, names in enumerate(sets)}
    for names in saved:
        for more in saved:
            if names < more:
                assert (saved[more] <= saved[names] * (1 + 1e-12)).all()
                assert (flops[more] >= flops[names] * (1 - 1e-12)).all()


def test_a_set_of_modules_has_one_spelling() -> None:
    assert format_ac(*parse_ac("modules-moe_act+layernorm+moe_act")) == "modules-layernorm+moe_act"
    assert format_ac(*parse_ac("modules-core_attn")) == "selective-attention"
    for bits in range(2, 2 ** len(RECOMPUTE_MODULES)):
        assert parse_ac(format_ac("modules", bits)) == ("modules", bits)
        row = LayoutBatch.from_layouts([
            resolve_layout({"ac": format_ac("modules", bits)}, trainer="megatron", num_gpus=8)
        ])  # fmt: skip
        assert row.row(0).ac == format_ac("modules", bits)


@pytest.mark.parametrize(("ac", "words"), [
    ("modules-moe_acts", "'moe_acts', which is no module that Megatron-LM recomputes"),
    ("modules-", "'', which is no module"),
    ("modules-core_attn,mlp", "did you mean core_attn"),
])  # fmt: skip
def test_an_unknown_module_is_one_error(ac: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve_layout({"ac": ac}, trainer="megatron", num_gpus=8)
    (fault,) = error.value.faults
    assert fault.field == "layout.ac"
    assert words in f"{fault.rule}; {fault.remedy}"


def test_memory_and_time_of_a_whole_job_lie_between_none_and_full() -> None:
    job: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"seq_len": 4096, "global_batch_size": 512, "trainer": "megatron"},
    }  # fmt: skip
    modes = ("none", "modules-moe_act+layernorm", "modules-moe+layernorm", "full")
    found = [estimate(**job, layout={"ep": 16, "ac": ac}) for ac in modes]
    peaks = [one.peak_allocated_bytes or 0.0 for one in found]
    steps = [one.step_seconds or 0.0 for one in found]
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert steps[1] < 1.02 * steps[0]
    # 48 layers, 2,048 wide, 8 of 128 experts 768 wide
    by_hand = 48 * 2 * 4096 * (2048 + 8 * 768)
    assert peaks[0] - peaks[1] == pytest.approx(by_hand, rel=0.03)


def test_a_layout_keeps_its_modules() -> None:
    layout = resolve_layout({"ac": "modules-moe+moe_act"}, trainer="megatron", num_gpus=8)
    assert Layout.model_validate_json(layout.model_dump_json()) == layout
    assert "ac modules-moe_act+moe" in layout.short()


def test_what_is_alive_in_backward() -> None:
    """All of a layer, as without recomputation; whole experts hold rows as full recomputation."""
    modes = ("none", "full", "modules-moe_act+layernorm", "modules-moe", "selective-attention")
    found = costs(GROUPED, *modes)
    alive = dict(zip(modes, found.saved_bytes[MOE] + found.transient_bytes[MOE], strict=True))
    assert alive["modules-moe_act+layernorm"] == pytest.approx(alive["none"], rel=1e-9)
    assert alive["selective-attention"] == pytest.approx(alive["none"], rel=1e-9)
    assert alive["modules-moe"] == pytest.approx(alive["full"], rel=1e-9)
    assert alive["modules-moe"] > alive["none"]


def test_the_neighbours_of_a_set_of_modules() -> None:
    job = pricer("qwen3-30b-a3b")
    chosen = resolve_layout({"ac": "modules-moe_act", "ep": 8}, trainer="megatron", num_gpus=8)
    steps = [one for one in sensitivity(job, chosen) if one.field == "ac"]
    assert {one.new for one in steps} == {"selective-attention", "full"}


def test_sets_of_modules_are_not_ordered_by_their_number() -> None:
    rows = LayoutBatch.from_layouts([
        resolve_layout({"ac": mode}, trainer="megatron", num_gpus=8)
        for mode in ("modules-mlp", "modules-layernorm", "none", "full")
    ])  # fmt: skip
    assert at_least(rows, 0, 64).mask.tolist() == [True, False, True, False]
