"""DeepSeek V4: streams, layers, rules, exports, what is read, and rows that NVIDIA published."""

import itertools
import math

import pytest

from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.export import export
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.job import Job
from planner.specs.layout import parse_ac
from planner.specs.model import LayerKind
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import TRAINERS, release_of
from planner.work import blocks
from planner.work.hyper_connections import STREAMS
from planner.work.liveness import saved_tensors
from planner.work.ops import Ops
from planner.work.pieces import PLAIN, Code
from planner.work.recompute_modules import layer_input, recomputed
from tests.conftest import job_values
from tests.pricing import H100, named_ops

FLASH, PRO = "deepseek-v4-flash", "deepseek-v4-pro"
KIND = LayerKind(moe=True, window=128, mixer="csa")
DENSE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32768,
}  # fmt: skip


def job(model: object, trainer: str = "megatron-bridge", gpus: int = 64, **layout: object) -> Job:
    return read_job(job_values(model, H100, gpus, 4096, 1024, layout=layout, trainer=trainer))


@pytest.mark.parametrize("name", [FLASH, PRO])
def test_layers_differ_in_how_they_attend_and_choose(name: str) -> None:
    model = load_model(name)
    assert model.unread_keys == ()
    assert (model.rope_theta, model.rope_local_base_freq) == (160_000, 10_000)
    first = {FLASH: ("shared-kv", "shared-kv", "csa"), PRO: ("hca", "hca", "csa")}[name]
    assert (*model.mixers[:3], model.mixers[-1]) == (*first, "csa")
    assert [kind.hashed for kind in model.layer_kinds()[:4]] == [True] * 3 + [False]


def test_a_config_that_is_no_deepseek_v4_is_refused() -> None:
    keys = {"architectures": [], "model_type": "deepseek_v4", **DENSE, "n_routed_experts": 8}
    keys |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "q_lora_rank": 64}
    keys |= {"o_groups": 4, "o_lora_rank": 32, "sliding_window": 16, "index_n_heads": 2}
    keys |= {"index_head_dim": 32, "index_topk": 8}
    assert read_model(keys).mixers[:4] == ("hca", "hca", "hca", "csa")  # the class's default
    for change, word in (
        ({"layer_types": ["full_attention"] * 8}, "attention of the kind 'full_attention'"),
        ({"compress_ratios": [0, 3] * 4}, "attention of the kind '3'"),
        ({"mlp_layer_types": ["moe", "hash_moe"] * 4}, "an MLP of the kind 'hash_moe'"),
        ({"o_groups": 3}, "does not divide 16 heads"),
        ({"o_lora_rank": 0}, "is needed by hca layers"),
        ({"hc_mult": 1}, "is one stream"),
        ({"parallel_residual": True}, "is for each branch by itself"),
    ):
        with pytest.raises(SpecError, match=word):
            read_model({**keys, **change})


def test_streams_are_as_many_times_as_wide_between_layers_and_stages() -> None:
    """In any model: of stages, a stage's saved inputs under full recomputation, and its sends."""
    wide = read_model({**DENSE, "hc_mult": 4})
    ops = blocks.layer_ops(wide, LayerKind(moe=False, window=0), True)
    assert layer_input(ops).dims == STREAMS
    both = [estimate_job(job({**DENSE, **own}, pp=4, ac="full")) for own in ({}, {"hc_mult": 4})]
    one, four = (found.time.exposed_communication_seconds["pp"] for found in both)
    assert 2 < four / one < 4.5  # not four times, since messages have a latency
    plain, streams = (found.memory.stages[0].activations_bytes for found in both)
    assert streams > 1.9 * plain
    more = 8 * 2 * (24 * (4 * 1024 + 1) + 3) + 4 * (4 * 1024 + 1) + 1
    assert wide.total_parameters() - read_model(DENSE).total_parameters() == more
    still = read_model({**DENSE, "hc_mult": 4, "hc_sinkhorn_iters": 0}).total_parameters()
    assert wide.total_parameters() - still == 8 * 2 * (16 * (4 * 1024 + 1) + 1)


def test_compiled_streams_save_no_copies_in_fp32() -> None:
    saves = saved_tensors(blocks.layer_ops(load_model(FLASH), KIND, True))
    copies = {name for name, one in saves.items() if one.dims == STREAMS and one.width == "fp32"}
    ends = itertools.product(("attention", "mlp"), ("upcast", "normed"))
    assert copies == {f"{end}_mix_{one}" for end, one in ends}
    assert all(saves[name].eager_only for name in copies)
    assert not {name for name in ("x", "h") if saves[name].eager_only}


def test_each_stream_is_projected_for_multi_token_prediction() -> None:
    model = read_model({"base": FLASH, "mtp_num_layers": 1})
    kind, _ = model.distinct_layers()[-1]
    assert (kind.mtp, kind.mixer, kind.hashed) == (True, "shared-kv", False)
    ops = named_ops(model, kind)
    rows = [ops[f"mtp_{name}_proj"].rows for name in ("state", "embedded")]
    assert rows == [("tokens_sp", "streams"), ("tokens_sp",)]
    assert {"attention_mix", "mlp_mix", "head_mix", "head"} <= ops.keys()
    plain = model.parameters.layer(LayerKind(moe=True, window=128, mixer="shared-kv"))
    joined = 2 * 4096**2 + 3 * 4096 + 4 * (4 * 4096 + 1) + 1
    assert model.parameters.layer(kind) == plain + joined


def test_a_kernel_reads_the_chosen_where_eager_code_masks_all() -> None:
    codes = (PLAIN, Code(own_mixers=True))
    eager, sparse = (named_ops(load_model(FLASH), KIND, code) for code in codes)
    core = sparse["attention"]
    assert (core.window, core.compressed, core.chosen) == (128, 4, 512)
    assert eager.keys() - sparse.keys() == {"softmax_dropout"}
    indices, rows = {"indices_window_keys", "indices_chosen"}, {"attention_out", "log_sum_exp"}
    assert {one.name for one in core.saves} == {"q", "k", "k_entries", *indices, *rows}
    slow, fast = (estimate_job(job(FLASH, name, ac="full", ep=8)) for name in ("fsdp", "megatron"))
    assert slow.step_seconds > fast.step_seconds


def test_its_queries_and_keys_are_made_again_as_those_of_latent_attention() -> None:
    """deepseek_v4_hybrid_attention.py (qkv_up_proj_and_rope_apply) discards queries and keys."""
    ops = blocks.layer_ops(load_model(FLASH), KIND, True, Code(own_mixers=True))
    found = recomputed(Ops(ops), int(parse_ac("modules-mla_up_proj")[1]))
    again = {op.name for op, repeats in zip(ops, found.repeats, strict=True) if repeats}
    assert again == {"wq_b", "wkv", "wkv_norm", "rotary"}
    names = {one.name for one in found.saves}
    assert names.isdisjoint({"q", "k"})
    assert names >= {"k_entries", "attention_out", "wq_a_out", "attention_in"}


def test_entries_are_chosen_once_there_are_more() -> None:
    """MFU counts a window and the entries that a query chooses, or all of them."""
    model = load_model(FLASH)
    per_key = 12 * 64 * 512
    of_parameters = 6 * model.matmul_parameters_per_token()
    for seq, csa, hca in ((1024, 256, 8), (4096, 512, 32)):
        keys = 2 * 128 + 21 * (128 + csa) + 20 * (128 + hca)
        assert model.torchtitan_flops_per_token(seq) == of_parameters + per_key * keys
    assert math.isclose(model.active_parameters(), 13.8e9, rel_tol=0.01)


def test_no_release_of_megatron_has_it_and_the_bridge_says_what_it_needs() -> None:
    model = load_model(FLASH)
    for version in ("0.19", "0.20"):
        streams = lacking(read_model({**DENSE, "hc_mult": 4}), release_of("megatron", version))
        assert streams == ["hyper-connections (several residual streams)"]
    words = "compressed sparse attention (CSA)"
    for trainer in ("megatron", "torchtitan", "megatron-deepspeed", "internevo"):
        assert words in TRAINERS[trainer].lacks(model, release_of(trainer, None))
    assert words in lacking(model, release_of("megatron-bridge", "0.4"))
    assert lacking(model, release_of("megatron-bridge", "0.5")) == []
    asked = job(FLASH, pp=4, ep=16)
    run = (asked.layout, asked.model, asked.cluster, asked.training)
    written = export(*run, to="megatron-bridge", version="0.6")
    assert not [one for one in written.blockers if one.field.startswith("model")]
    assert "needs Megatron-LM's dev branch" in " ".join(written.notes)
    assert "deepseek_v4_flash_pretrain_config" in written.files["launch.sh"]
    layers = str([0, 0, *[4, 128] * 20, 4]).replace(" ", "")
    split = 'model.pipeline_model_parallel_layout="Et*11|t*11|t*11|t*10L"'
    assert {split, f"model.csa_compress_ratios={layers}"} <= {*written.arguments}
