"""Layers that differ in heads, windows or keys: shapes, work, rules, exports, what is read."""

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.export import export
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.rules import Context
from planner.specs.job import Job
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import release_of
from planner.work.heads import TP_DIMS, WINDOWED, head_sizes
from planner.work.pieces import PLAIN, Code
from tests.conftest import job_values
from tests.pricing import H100, named_ops

STEP, GEMMA, M3, EXAONE = "step-3.5-flash", "gemma4-26b-a4b", "minimax-m3", "k-exaone-2"
TE = Code(own_mixers=True)
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_layer_freq": [0, 1, 1, 1],
}  # fmt: skip


def job(model: object, trainer: str = "megatron-bridge", gpus: int = 64, **layout: object) -> Job:
    return read_job(job_values(model, H100, gpus, 4096, 256, layout=layout, trainer=trainer))


def test_a_layer_counts_the_heads_that_it_has() -> None:
    alike, other = read_model(TINY), read_model({**TINY, "num_sliding_attention_heads": 8})
    more = 2 * (2 * 64 * 4 * 32)  # four more heads in queries and output of two layers
    assert other.total_parameters() - alike.total_parameters() == more
    assert (other.at(0) is other, alike.at(16) is alike) == (True, True)
    assert other.at(16).num_attention_heads == 8
    attention, matrices = 12 * 32 * 4096 * (2 * 4 + 2 * 8), other.matmul_parameters_per_token()
    assert other.torchtitan_flops_per_token(4096) == attention + 6 * matrices


def ops_of(model: ModelSpec, window: int, *code: Code) -> dict[str, Any]:
    return named_ops(model, LayerKind(moe=True, window=window), *code)


def test_windowed_layers_have_dimensions_of_their_own() -> None:
    model = load_model(STEP)
    windowed, full = (ops_of(model, window) for window in (512, 0))
    assert windowed["wq"].cols == ("windowed_heads", "windowed_qk_dim")
    assert full["wq"].cols == ("heads", "qk_dim")
    core = windowed["attention"]
    assert (core.heads, core.window) == ("windowed_heads", 512)
    sizes = {name: float(size[0]) for name, size in head_sizes(model, np.full(1, 8.0)).items()}
    assert (sizes["heads"], sizes["windowed_heads"], sizes["windowed_kv_heads"]) == (8, 12, 1)
    assert set(sizes) == {*WINDOWED, *WINDOWED.values()}
    assert {"heads", "kv_heads", "windowed_heads", "windowed_kv_heads"} == TP_DIMS


def test_one_projection_for_keys_and_values() -> None:
    model, hidden = load_model(GEMMA), 2816
    windowed, full = (ops_of(model, window).keys() for window in (1024, 0))
    assert windowed - full == {"wv"}
    assert full >= {"value_norm", "router_norm", "experts_norm", "shared_norm", "moe_norm"}
    shapes = {kind.window: model.parameters.mixer(kind) for kind, _ in model.distinct_layers()}
    assert shapes[0] == hidden * 16 * 512 * 2 + hidden * 2 * 512
    assert shapes[1024] == hidden * 16 * 256 * 2 + 2 * hidden * 8 * 256


@pytest.mark.parametrize(("name", "most"), [(STEP, 8), (GEMMA, 2)])
def test_tp_divides_the_heads_of_all_layers(name: str, most: int) -> None:
    asked = job(name, ep=8)
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    heads = math.gcd(64, 96) if name == STEP else 16
    assert (context.num_kv_heads, context.num_heads) == (most, heads)
    broken = estimate_job(job(name, "megatron-bridge", 96, tp=48, ep=1)).violations
    assert [one for one in broken if "attention heads" in one.rule]


def test_a_rank_of_a_windowed_layer_computes_its_own_heads() -> None:
    """More heads in windowed layers cost time and memory; as many as before cost none."""
    plain = {**TINY, "hidden_size": 2048, "head_dim": 128, "num_attention_heads": 16}
    plain |= {"num_key_value_heads": 4, "intermediate_size": 4096, "sliding_window": 1024}
    heads = ({"num_sliding_attention_heads": count} for count in (16, 32))
    base, same, more = (estimate_job(job({**plain, **own}, "fsdp", 8)) for own in ({}, *heads))
    assert same.step_seconds == base.step_seconds
    assert more.step_seconds > base.step_seconds
    assert more.peak_allocated_bytes > base.peak_allocated_bytes


def test_windows_of_several_lengths_are_priced_each() -> None:
    shapes = {key: value for key, value in TINY.items() if key != "layer_types"}
    eight = {"sliding_windows": [0, 4096, 128, 128] * 2, "num_hidden_layers": 8}
    model = read_model({**shapes, **eight})
    assert model.layer_windows() == (0, 4096, 128, 128) * 2
    assert (model.sliding_window, sum(model.sliding_mask)) == (4096, 6)
    counts = {kind.window: count for kind, count in model.distinct_layers()}
    assert counts == {0: 2, 4096: 2, 128: 4}
    alike = read_model({**shapes, "num_hidden_layers": 2, "sliding_windows": [0, 128]})
    assert (alike.sliding_windows, alike.sliding_window) == ((), 128)
    with pytest.raises(ValidationError, match="contradicts"):
        model.model_validate({**model.model_dump(), "sliding_window": 128})


def test_heads_wider_than_fused_kernels_run_unfused_under_transformer_engine() -> None:
    model = load_model(GEMMA)
    for window, code, fused in ((0, PLAIN, True), (1024, TE, True), (0, TE, False)):
        assert ("softmax_dropout" in ops_of(model, window, code)) != fused
    cut, own = (estimate_job(job(GEMMA, name, cp=2)) for name in ("megatron-bridge", "fsdp"))
    wide = [any("wider than 256" in one.rule for one in found.violations) for found in (cut, own)]
    assert wide == [True, False]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match="leaves 3 KV heads for 4 heads"):
        read_model({**TINY, "num_sliding_key_value_heads": 3})


def test_block_sparse_attention_is_full_under_megatron() -> None:
    model = load_model(M3)
    kind = next(kind for kind in model.layer_kinds() if kind.mixer == "msa")
    masked, full = (named_ops(model, kind, code).keys() for code in (PLAIN, TE))
    assert masked - full == {"indexer", "index_mask"}


@pytest.mark.parametrize(("name", "core", "block"), [
    (STEP, "0.18", "heads that differ by layer"),
    (GEMMA, "0.18", "one projection for keys and values"),
    (M3, "0.20", "sparse attention to blocks of tokens (MSA)"),
    (EXAONE, "0.20", "clamped SwiGLU in some layers"),
])  # fmt: skip
def test_megatron_bridge_builds_what_no_argument_says(name: str, core: str, block: str) -> None:
    model = load_model(name)
    bridges = {f"0.{number + 13}": f"0.{number}" for number in range(3, 8)}
    for number, version in bridges.items():
        words = lacking(model, release_of("megatron-bridge", version))
        assert (words == []) == (float(number) >= float(core)), (number, words)
    assert block in lacking(model, release_of("megatron", "0.20"))


@pytest.mark.parametrize("name", [STEP, GEMMA, M3])
def test_an_export_for_the_bridge_has_no_blocker(name: str) -> None:
    asked = job(name, ep=8, tp=1)
    run, training = (asked.layout, asked.model, asked.cluster), asked.training
    written = export(*run, training, to="megatron-bridge", version="0.7")
    assert [one for one in written.blockers if one.field.startswith("model")] == []
    assert ("attends to all keys" in " ".join(written.notes)) == (name == M3)
    alone = export(*run, training.model_copy(update={"trainer": "megatron"}), to="megatron")
    assert [one for one in alone.blockers if one.field == "model"]


def test_lists_of_step_go_on_to_its_layers_of_mtp() -> None:
    own = {**TINY, "num_nextn_predict_layers": 1, "moe_num_experts": 8, "moe_top_k": 2}
    own |= {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]}
    own |= {"rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6], "partial_rotary_factors": [0.5, 1, 1, 1, 0.5]}
    own |= {"swiglu_limits": [0, 0, 0, 7.0, None], "moe_layers_enum": "1,2"}
    own |= {"moe_intermediate_size": 32, "share_expert_dims": 32}
    own |= {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}}
    model = read_model({"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", **own})
    assert model.at(1).num_attention_heads == 6
    assert model.num_sliding_key_value_heads == 0
    assert (model.rope_theta, model.rope_local_base_freq) == (5e6, 1e4)
    assert (model.partial_rotary_factor, model.swiglu_limits) == (0.5, (0, 0, 0, 7))
    assert [kind.moe for kind in model.layer_kinds()] == [False, True, True, False]
    assert model.unread_keys == ()


def test_minimax_m3_is_read_from_its_nested_config() -> None:
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 64}
    sparse |= {"sparse_topk_blocks": 4, "sparse_attention_freq": [0, 1, 1, 1]}
    text = {**TINY, **EXPERTS, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
    text |= {"sparse_attention_config": sparse, "rotary_dim": 16, "intermediate_size": 32}
    del text["layer_types"], text["sliding_window"]
    model = read_model({"model_type": "minimax_m3_vl", "architectures": [], "text_config": text})
    assert model.mixers == ("attention", "msa", "msa", "msa")
    assert (model.index_topk, model.index_block_size, model.index_n_heads) == (256, 64, 2)
    assert (model.intermediate_size, model.moe_intermediate_size) == (96, 32)
    assert (model.dense_layers, model.partial_rotary_factor) == ((0,), 0.5)


def test_values_may_be_narrower_and_sinks_in_windowed_layers_alone() -> None:
    own = {"model_type": "mimo_v2_flash", "v_head_dim": 16, "hybrid_layer_pattern": [0, 1, 1, 0]}
    model = read_model({**TINY, **EXPERTS, **own, "architectures": [], "layer_types": None})
    windowed = model.at(1)
    assert (windowed.num_key_value_heads, windowed.attention_sinks) == (4, True)
    assert (model.num_key_value_heads, model.attention_sinks) == (2, False)
    assert model.parameters.attention() == 64 * (4 * 32 + 2 * (32 + 16) + 4 * 16)
    assert windowed.parameters.attention() == 64 * (4 * 32 + 4 * (32 + 16) + 4 * 16) + 4
    assert (model.layer_windows(), model.dense_layers) == ((0, 16, 16, 0), (0,))
    assert read_model(inline_keys(model)) == model
    assert lacking(model, release_of("megatron-bridge", "0.5")) == []
    assert "heads that differ by layer" in lacking(model, release_of("megatron", "0.20"))


def test_dots3_has_latents_by_layer_and_hy4_indexers_in_every_fourth() -> None:
    latent = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 32}
    own = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "head_dim": 48}
    keys = {**TINY, **EXPERTS, **latent, "qk_rope_head_dim": 16, "index_n_heads": 2}
    keys |= {"architectures": [], "model_type": "dots3_note", "index_head_dim": 16, "index_topk": 8}
    published = {**keys, **{f"swa_{name}": size for name, size in {**latent, **own}.items()}}
    kinds = {"layer_types": ["indexed_attention", "sliding_attention"] * 2}
    model = read_model({**keys, **kinds, "per_layer_config": {"1": own, "3": own}})
    assert read_model(published) == model == read_model(inline_keys(model))
    assert (model.mixers, model.dense_layers) == (("dsa", "attention") * 2, (0,))
    windowed = model.at(16)
    assert (windowed.kv_lora_rank, windowed.num_attention_heads, windowed.head_dim) == (64, 2, 48)
    assert ops_of(model, 16)["wkv_b"].depth == ("windowed_kv_lora",)
    assert "heads that differ by layer" in lacking(model, release_of("megatron-bridge", "0.7"))
    hy4 = read_model({**keys, "model_type": "hy_v4", "sliding_window": None, "moe_layer_freq": 1})
    assert (hy4.mixers[1:], hy4.num_mixes) == (("dsa", "dsa-shared", "dsa-shared"), 8)


def test_gated_norms_stand_before_attention_and_experts() -> None:
    plain, gated = (read_model({"base": "deepseek-v3.2", "gated_norm_rank": n}) for n in (0, 16))
    assert gated.total_parameters() - plain.total_parameters() == 2 * 7168 * 16 * (61 + 58)
    for moe in (False, True):
        ops = named_ops(gated, LayerKind(moe=moe, window=0, mixer="dsa"))
        gates = {name for name in ops if name.endswith("_norm_gate")}
        assert gates == {"attention_norm_gate", *["mlp_norm_gate"] * moe}
        assert ops["attention_in"].reads[0].name == "attention_norm_gated"


def test_gemma4_without_experts_is_dense() -> None:
    keys = {**TINY, "num_hidden_layers": 6, "attention_k_eq_v": True, "global_head_dim": 64}
    del keys["layer_types"]
    model = read_model({"model_type": "gemma4_text", "architectures": [], **keys})
    assert (model.is_moe, model.intermediate_size, model.head_dim) == (False, 96, 64)
    assert model.at(1).head_dim == 32
    assert model.layer_windows() == (16,) * 5 + (0,)
