"""How many layers of a stage block-N and uniform-N recompute, what a memory budget saves, and bytes
and FLOP of each of Megatron-LM's --recompute-modules, by hand.
"""

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from planner import estimate
from planner.columns import LayoutBatch
from planner.cost.cost_inputs import distinct_rows, units_at
from planner.cost.layer.unit_costs import UnitCosts
from planner.cost.pipeline.stages import block_layers, stage_units
from planner.intake.jobs import read_job
from planner.search.variations.sensitivity import sensitivity
from planner.specs.estimate import Estimate
from planner.specs.layout import RECOMPUTE_MODULES, format_ac, parse_ac
from planner.study.pruning import at_least
from planner.trainers.registry import resolve_layout
from planner.work.checkpointing import saved_by_budget
from tests.conftest import job_values
from tests.pricing import batch_of, check_rows_and_bounds, pricer, pricer_of, rows
from tests.unit.conftest import faults_of

JOB = job_values("llama3-70b", "h100-sxm-80gb", 64, 8192, 128, trainer="megatron")
LAYOUT = {"tp": 4, "pp": 4}
PER_STAGE = 20


def of(ac: str, **more: object) -> Estimate:
    found = estimate(**JOB, layout={**LAYOUT, "ac": ac, **more})  # type: ignore[arg-type]
    assert found.valid, found.violations
    return found


def peak(ac: str, **more: object) -> float:
    return of(ac, **more).peak_allocated_bytes


def _redone(found: Estimate) -> tuple[float, float]:
    """Recomputed seconds, and recomputed flops over required ones."""
    done, required = (one.hfu * one.step_seconds for one in (found, of("none")))
    return found.time.recompute_seconds, done / required - 1.0


@pytest.mark.parametrize("count", [1, 7, 19])
def test_recomputation_takes_its_share_of_what_full_takes(count: int) -> None:
    none, full, some = (_redone(of(ac)) for ac in ("none", "full", f"block-{count}"))
    assert none == (0.0, 0.0)
    assert some == pytest.approx([share * count / PER_STAGE for share in full], rel=1e-6)


def test_each_layer_recomputed_frees_what_it_saved() -> None:
    peaks = [peak(f"block-{count}") for count in range(2, PER_STAGE)]
    freed = [before - after for before, after in pairwise(peaks)]
    assert max(freed) == pytest.approx(min(freed), rel=0.15), "but for the layers at the ends"
    assert peak("none") > peaks[0]
    assert peaks[-1] > peak("full")


def test_a_batch_prices_each_layout_as_alone_and_not_below_its_bounds() -> None:
    modes = ["none", "full", "selective-attention", "uniform-5"]
    modes += [f"block-{count}" for count in (1, 3, 10, 12, 19)]
    check_rows_and_bounds(pricer_of(read_job(JOB)), batch_of_modes(*modes))


def batch_of_modes(*modes: str) -> LayoutBatch:
    return rows(*({**LAYOUT, "ac": mode} for mode in modes), trainer="megatron", num_gpus=64)


def test_uneven_stages_recompute_their_own_first_layers() -> None:
    model = read_job(JOB).model
    units = stage_units((19, 21, 21, 19), model, 5)
    assert units.shape == (4, 4)
    assert units[:, 0].tolist() == [14, 16, 16, 14]
    assert units[:, 1].tolist() == [5, 5, 5, 5]
    split = of("block-5", layers_per_stage=[19, 21, 21, 19])
    assert _redone(split) > (0.0, 0.0)
    assert block_layers(batch_of_modes("none", "full")) is None


def test_uniform_saves_one_input_for_several_layers() -> None:
    assert _redone(of("uniform-2")) == _redone(of("full"))
    layer_input = 8192 * 8192 * 2 / 4  # tokens x hidden x 2 bytes over TP
    in_flight = 4  # of 1F1B's first stage
    tensors = (peak("block-1") - peak("block-2")) / in_flight + layer_input
    for count in (2, 5):
        fewer_inputs = in_flight * PER_STAGE * (1 - 1 / count) * layer_input
        freed = peak("full") - peak(f"uniform-{count}")
        assert freed == pytest.approx(fewer_inputs - (count - 1) * tensors, rel=0.01)


def test_blocks_of_all_layers_of_a_stage_are_full_recomputation_and_megatrons() -> None:
    """NVIDIA's recipe of Llama 3.1 405B in NVFP4: block-1 with one layer in each chunk."""
    assert [of(ac).time for ac in ("block-20", "block-21")] == [of("full").time] * 2
    assert peak("block-20") == peak("full")
    training = {**JOB["training"], "trainer": "torchtitan"}  # type: ignore[dict-item]
    found = estimate(**{**JOB, "training": training}, layout={**LAYOUT, "ac": "block-19"})  # type: ignore
    assert any("has no activation checkpointing block" in one.rule for one in found.violations)


def test_a_budget_saves_the_dearest_first_and_a_share_of_the_last() -> None:
    """Of 10 and 20 bytes, 20 bytes of room hold the first and half of the second."""
    sizes, again = np.array([[10.0], [20.0]]), np.array([[[3.0]], [[8.0]]])
    found = saved_by_budget(sizes, again, np.array([0.0]), np.array([20.0]))
    assert found.tolist() == [[3.0 + 8.0 / 2]]


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


def costs(model: Any, *modes: str, **training: Any) -> UnitCosts:
    """Costs of units (K + 2, U), a column for each mode, on a GPU that holds all experts."""
    given = {"seq_len": S, "trainer": "megatron", "moe_imbalance": 1.0, **training}
    p = pricer(model, **given)
    layouts = batch_of(p, *({"ac": mode, "micro_batch_size": B} for mode in modes))
    distinct, at = distinct_rows(p, layouts)
    assert at.tolist() == list(range(len(modes)))
    return units_at(p, distinct)


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


@pytest.mark.parametrize(("module", "layer", "training", "num_bytes"), [
    # until scores moved into the experts, their outputs were saved too
    ("moe", MOE, {"trainer_version": "0.12"}, MOE_BYTES + 2 * ROUTED * H),
    # without flash attention: 16-bit softmax and probabilities, and a byte of dropout mask
    ("core_attn", DENSE, {"attention_kernel": "unfused"}, 5 * B * HEADS * S * S),
])  # fmt: skip
def test_more_is_freed_where_more_was_saved(
    module: str, layer: int, training: dict[str, str], num_bytes: float
) -> None:
    found = freed(GROUPED, f"modules-{module}", layer, **training)
    assert found == pytest.approx(num_bytes, rel=1e-9)


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
    by_hand = QKV + 2 * T * KV_RANK + RSTD
    assert freed(model, "modules-mla_up_proj", DENSE) == pytest.approx(by_hand, rel=1e-9)


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
    sizes = range(1, len(RECOMPUTE_MODULES) + 1)
    every = (itertools.combinations(RECOMPUTE_MODULES, size) for size in sizes)
    sets = [set(names) for names in itertools.chain(*every)]
    found = costs(LATENT, *(f"modules-{'+'.join(names)}" for names in sets))
    saved, flops = found.saved_bytes.T, found.recompute_flops.T
    for (i, fewer), (j, more) in itertools.permutations(enumerate(sets), 2):
        if fewer < more:
            assert (saved[j] <= saved[i] * (1 + 1e-12)).all()
            assert (flops[j] >= flops[i] * (1 - 1e-12)).all()


def test_a_set_of_modules_has_one_spelling() -> None:
    assert format_ac(*parse_ac("modules-moe_act+layernorm+moe_act")) == "modules-layernorm+moe_act"
    assert format_ac(*parse_ac("modules-core_attn")) == "selective-attention"
    for bits in range(2, 2 ** len(RECOMPUTE_MODULES)):
        spelled = format_ac("modules", bits)
        assert parse_ac(spelled) == ("modules", bits)
        assert rows({"ac": spelled}, trainer="megatron").row(0).ac == spelled


@pytest.mark.parametrize(("ac", "words"), [
    ("modules-moe_acts", "'moe_acts', which is no module that Megatron-LM recomputes"),
    ("modules-", "'', which is no module"),
    ("modules-core_attn,mlp", "did you mean core_attn"),
])  # fmt: skip
def test_an_unknown_module_is_one_error(ac: str, words: str) -> None:
    (fault,) = faults_of(resolve_layout, {"ac": ac}, trainer="megatron", num_gpus=8)
    assert fault.field == "layout.ac"
    assert words in f"{fault.rule}; {fault.remedy}"


def test_memory_and_time_of_a_whole_job_lie_between_none_and_full() -> None:
    p = pricer("qwen3-30b-a3b", 16, trainer="megatron", global_batch_size=512)
    modes = ("none", "modules-moe_act+layernorm", "modules-moe+layernorm", "full")
    found = p.price(batch_of(p, *({"ep": 16, "ac": ac} for ac in modes)))
    peaks, steps = found.peak_allocated_bytes.tolist(), found.step_seconds.tolist()
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert steps[1] < 1.02 * steps[0]
    # 48 layers, 2,048 wide, 8 of 128 experts 768 wide
    by_hand = 48 * 2 * 4096 * (2048 + 8 * 768)
    assert peaks[0] - peaks[1] == pytest.approx(by_hand, rel=0.03)


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
    p = pricer("qwen3-30b-a3b", seq_len=S, trainer="megatron", moe_imbalance=1.0)
    chosen = batch_of(p, ac="modules-moe_act", ep=8).row(0)
    steps = {one.new for one in sensitivity(p, chosen) if one.field == "ac"}
    assert steps == {"selective-attention", "full"}


def test_sets_of_modules_are_not_ordered_by_their_number() -> None:
    modes = ("modules-mlp", "modules-layernorm", "none", "full")
    batch = rows(*({"ac": mode} for mode in modes), trainer="megatron")
    assert at_least(batch, 0, 64).mask.tolist() == [True, False, True, False]
