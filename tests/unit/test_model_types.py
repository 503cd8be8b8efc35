"""Model types: what config.json means, held to published counts, and what is refused by name."""

import contextlib
import csv
import json
import re
from pathlib import Path

import pytest

from planner.catalog.models import is_model_name, model_entry, model_names
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.huggingface.dialects import READERS
from planner.intake.huggingface.families import SAME_NETWORK, TEXT_PARTS, family_names, family_of
from planner.intake.huggingface.missing_blocks import NAMED, NO_OPERATIONS
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.model import ModelSpec
from tests.conftest import job_values
from tests.unit.conftest import faults_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_types"
# Parameters of the network that transformers 4.57.6 builds from the file (on the meta device; tied
# tables count once) or, for types it does not ship, of the weights beside the file; the id on
# huggingface.co whose config.json it is.
ROWS = csv.DictReader((CONFIGS / "published.csv").read_text().splitlines())
PUBLISHED = {row["name"]: (int(row["parameters"]), row["hub"]) for row in ROWS}
# How far ours may be off: OLMo's norms have no weights, Persimmon's query-key norms have biases,
# xIELU two scalars a layer; of MiniMax-M2 a rounded count is published.
NOT_EXACT = {"olmo-7b": 5e-5, "persimmon-8b": 1e-6, "apertus-8b": 1e-8, "minimax-m2": 2e-3}
IN_CATALOGUE = [name for name, (_, hub) in PUBLISHED.items() if is_model_name(hub)]
# billions a token meets, as the publisher rounds them
ACTIVE = {
    "olmoe-1b-7b": (1.3, 0.05), "dbrx": (36, 0.5), "ernie-4.5-300b-a47b": (47, 1),
    "ernie-4.5-21b-a3b": (3, 0.4), "phi-3.5-moe": (6.6, 0.1), "minimax-m2": (10, 1.1),
    "hunyuan-a13b": (13, 0.5), "dots.llm1": (14, 0.5), "deepseek-moe-16b": (2.8, 0.05),
    "ling-lite": (2.75, 0.01), "granite-3.1-3b-a800m": (0.8, 0.1), "ling-mini-2.0": (1.4, 0.05),
}  # fmt: skip


def config(name: str) -> dict[str, object]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def read(keys: dict[str, object]) -> ModelSpec:
    return read_model({"architectures": ["AnyForCausalLM"], **keys})


def fault_of(keys: dict[str, object]):
    return faults_of(read, keys)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_whole_to_the_networks_parameters(name):
    model = read(config(name))
    within = pytest.approx(PUBLISHED[name][0], rel=NOT_EXACT.get(name, 0.0), abs=0)
    assert (model.total_parameters(), model.unread_keys) == (within, ())


@pytest.mark.parametrize("name", IN_CATALOGUE)
def test_the_catalogue_has_the_shapes_of_the_published_file(name):
    assert len(IN_CATALOGUE) == 30
    entry, published = load_model(PUBLISHED[name][1]), read_model(str(CONFIGS / f"{name}.json"))
    shapes = {key: value for key, value in entry if key != "name"}
    assert shapes == {key: getattr(published, key) for key in shapes}
    assert PUBLISHED[name][1] in model_entry(entry.name).source


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_publisher(name):
    billions, tolerance = ACTIVE[name]
    assert read(config(name)).active_parameters() / 1e9 == pytest.approx(billions, abs=tolerance)


@pytest.mark.parametrize(("name", "expected"), [
    ("command-r-plus",
        {"parallel_residual": True, "norms_per_layer": 1, "norm_bias": False, "qk_norm": "full"}),
    ("command-a-111b", {"sliding_window": 4096, "sliding_layers": 48}),
    ("falcon-7b", {"norms_per_layer": 1, "parallel_residual": True}),
    ("falcon-40b",
        {"num_key_value_heads": 8, "norms_per_layer": 2, "parallel_residual": True, "mlp": "gelu"}),
    ("falcon-rw-1b", {"num_key_value_heads": 32, "position_embedding": "none",
        "parallel_residual": False, "attention_bias": True}),
    ("ernie-4.5-300b-a47b",
        {"first_k_dense_replace": 3, "num_moe_layers": 51, "router_correction_bias": True}),
    ("minimax-m2", {"qk_norm": "full", "router_correction_bias": True}),
    ("gpt-neo-2.7b", {"sliding_layers": 16, "sliding_window": 256, "position_embedding": "learned",
        "attention_bias": False}),
    ("exaone4-32b", {"sliding_layers": 48, "qk_norm": "head"}),
    ("baichuan2-13b", {"position_embedding": "none"}),
    ("baichuan2-7b", {"position_embedding": "rope"}),
    ("afm-4.5b", {"mlp": "squared-relu", "norm": "rmsnorm"}),
    ("stablelm-2-12b", {"parallel_residual": True, "norms_per_layer": 1, "qk_norm": "full"}),
    ("command-a-111b", {"logits_multiplier": 0.25, "rope_mask": (True, True, True, False) * 16}),
    ("exaone4-32b", {"post_norm": True, "rope_mask": (True, True, True, False) * 16}),
    ("falcon-40b", {"rope_theta": 10_000.0, "alibi": False}),
    ("falcon-rw-1b", {"alibi": True, "rope_theta": None}),
    ("gpt-j-6b", {"partial_rotary_factor": 0.25}),
    ("minimax-m2", {"partial_rotary_factor": 0.5, "scoring_func": "sigmoid"}),
    ("dbrx", {"clip_qkv": 8.0, "scoring_func": "softmax", "norm_topk_prob": True}),
    ("gpt-neo-2.7b", {"attention_multiplier": 1.0}),
    ("phi-3.5-moe", {"scoring_func": "sparsemixer"}),
    ("hunyuan-a13b", {"qk_norm_after_rope": True}),
    ("apertus-8b", {"hidden_act": "xielu"}),
    ("granite-3.1-3b-a800m", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
    ("ling-mini-2.0", {"scoring_func": "sigmoid", "n_group": 8, "topk_group": 4}),
])  # fmt: skip
def test_what_the_switches_of_a_family_mean(name, expected):
    model = read(config(name))
    assert {key: getattr(model, key) for key in expected} == expected


def test_experts_between_two_layers_and_in_every_second():
    keys = {**config("ernie-4.5-21b-a3b"), "num_hidden_layers": 8}
    keys |= {"moe_layer_start_index": 2, "moe_layer_end_index": 6}
    assert [kind.moe for kind in read(keys).layer_kinds()] == [i in range(2, 7) for i in range(8)]
    keys |= {"moe_layer_interval": 2}
    assert [i for i, kind in enumerate(read(keys).layer_kinds()) if kind.moe] == [3, 5]


DENSE = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
GRIFFIN = {"model_type": "recurrent_gemma", "num_hidden_layers": 48, "full_attention_interval": 4}
PLAMO = {"model_type": "plamo2", "num_hidden_layers": 52, "hybrid_override_pattern": "MM*M" * 13}
LIGHTNING = {"model_type": "bailing_moe_linear", "num_hidden_layers": 80}
LIGHTNING["attn_type_list"] = ([0] * 7 + [1]) * 10


@pytest.mark.parametrize(("keys", "words"), [
    (GRIFFIN, "RG-LRU (recurrent) layers in 36 of 48 layers"),
    ({**GRIFFIN, "full_attention_interval": None,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}, "36 of 48"),
    (PLAMO, "Mamba-2 (state space) layers in 39 of 52 layers"),
    (LIGHTNING, "lightning (linear) attention in 70 of 80 layers"),
    ({**LIGHTNING, "model_type": "minimax_m2"}, "lightning (linear) attention in 70 of 80 layers"),
    ({"model_type": "zamba2"}, "transformer blocks that several layers share"),
    ({"model_type": "dory"}, "layers that run several times"),
    ({"model_type": "laguna", "num_attention_heads_per_layer": [48, 64]}, "differ in width"),
    ({"model_type": "zamba"}, "Mamba"),
    ({"model_type": "rwkv"}, "RWKV time mixing"),
    ({"model_type": "arctic"}, "dense MLP beside the mixture of experts"),
    ({"model_type": "gemma3n"}, "per-layer embeddings"),
    ({"model_type": "dots3_note", "num_hidden_layers": 4, "per_layer_config": {2: 0, 3: 1}}, "two"),
    ({"model_type": "t5"}, "encoder and a decoder"),
    ({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}},
        "cross-attention layers on images"),
    (config("opt-350m"), "projections into and out of the hidden size"),
    ({**config("hunyuan-a13b"), "use_cla": True}, "cross-layer attention"),
    ({**config("hunyuan-a13b"), "moe_topk": [8] * 31 + [4]}, "layers that differ in width"),
    ({**config("ernie-4.5-21b-a3b"), "moe_num_experts": [64, 64]}, "experts of two kinds"),
    ({**config("falcon-7b"), "is_encoder_decoder": True}, "an encoder and a decoder"),
    ({"model_type": "llama", "index_topk": 2048}, "sparse attention with an indexer"),
])  # fmt: skip
def test_a_block_we_lack_is_refused_by_name(keys, words):
    fault = fault_of(keys)
    assert words in fault.rule
    assert "our operations have no such block" in fault.rule
    assert "inline" in fault.remedy


def test_an_unknown_type_names_the_nearest_and_what_to_do():
    fault = fault_of({"model_type": "olmo4", "hidden_size": 64})
    assert "'olmo4' is not supported" in fault.rule
    assert "the nearest type we read is olmo" in fault.remedy
    assert "inline without model_type" in fault.remedy
    wrapped = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}
    assert {fault.field, fault_of(wrapped).field} == {"model.model_type"}
    with pytest.raises(SpecError, match="RG-LRU"):
        read_model({**DENSE, "model_type": "recurrent_gemma"})


def test_every_type_is_either_read_or_refused():
    parts = (family_names(), NO_OPERATIONS, SAME_NETWORK)
    assert len({name for part in parts for name in part}) == sum(map(len, parts))
    assert {*SAME_NETWORK.values(), *TEXT_PARTS.values()} <= family_names()
    assert {family_of(name).prepare for name in family_names()} - {""} <= READERS.keys()


GRANITE_MICRO = {
    "model_type": "granitemoehybrid", "hidden_size": 2560, "intermediate_size": 8192,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    "vocab_size": 100352, "tie_word_embeddings": True, "layer_types": ["attention"] * 40,
    "mamba_d_state": 256, "mamba_n_heads": 128, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 8192, "position_embedding_type": "rope",
    "normalization_function": "rmsnorm",
}  # fmt: skip


def test_granite_4_without_mamba_and_experts_is_dense():
    """Granite 4 writes all its models with one type; those without Mamba are transformers."""
    model = read(GRANITE_MICRO)
    assert (model.is_moe, model.intermediate_size) == (False, 8192)
    assert model.total_parameters() == pytest.approx(3.4e9, abs=0.05e9)


class TestWrappers:
    """The language model of a vision-language config."""

    def test_what_the_class_would_have_filled_in(self):
        text = {"model_type": "llama", "vocab_size": 32064}
        llava = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 1024}}
        model = read_model(llava)
        widths = (model.hidden_size, model.intermediate_size)
        assert (*widths, model.num_hidden_layers, model.vocab_size) == (4096, 11008, 32, 32064)
        pixtral = {
            "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40,
            "model_type": "mistral", "vocab_size": 131072, "sliding_window": None,
        }  # fmt: skip
        model = read_model({"model_type": "llava", "text_config": pixtral})
        heads = (model.num_key_value_heads, model.num_attention_heads)
        assert (*heads, model.sliding_layers) == (8, 32, 0)
        # Mistral NeMo, Pixtral's language model
        assert model.total_parameters() == pytest.approx(12.2e9, abs=0.1e9)

    def test_what_is_left_out_is_said_where_the_numbers_are(self):
        text = {**DENSE, "model_type": "llama", "odd_switch": 3}
        wrapped = {"model_type": "llava", "text_config": text, "vision_config": {"depth": 3}}
        job = job_values(wrapped, "h100", 8, 1024, 8, layout={"dp_shard": 8})
        first, again = (read_job(one) for one in (job, read_job(job).request))
        assert first.model == again.model
        said = " ".join(estimate_job(first).warnings)
        assert "vision_config" in said
        assert "odd_switch" in said
        assert estimate_job(read_job({**job, "model": DENSE})).warnings == []

    def test_a_flat_one_and_a_text_type_of_its_own(self):
        qwen = {
            "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "vocab_size": 152064, "tie_word_embeddings": False, "vision_config": {"depth": 32},
        }  # fmt: skip
        assert read(qwen).total_parameters() == 7_615_616_512  # Qwen2.5-7B
        text = {
            "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "head_dim": 128, "num_attention_heads": 32,
            "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        }  # fmt: skip
        config = {"model_type": "qwen3_vl_moe", "text_config": text, "tie_word_embeddings": False}
        assert read_model(config).total_parameters() == 30_532_122_624  # Qwen3-30B-A3B


JUNK = (None, True, -1, 0, 3.5, 10**12, "x", "", [], [1, 2], [[1]], [["global"], "x"], {}, {"a": 1})


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_junk_in_any_key_is_a_fault_or_read_never_a_crash(name):
    keys = config(name)
    for key in keys:
        for junk in JUNK:
            with contextlib.suppress(SpecError):
                assert read({**keys, key: junk}).total_parameters() > 0


def test_a_family_can_be_named_inline_and_as_a_base(monkeypatch):
    unsaid = ("architectures", "transformers_version", "torch_dtype")
    keys = {key: value for key, value in config("falcon-40b").items() if key not in unsaid}
    counted = read_model({**keys, "name": "f"}).total_parameters()
    assert counted == PUBLISHED["falcon-40b"][0]
    monkeypatch.setattr("planner.intake.models.model_keys", lambda name: keys)
    short = read_model({"base": "mine", "num_hidden_layers": 2})
    assert (short.num_key_value_heads, short.num_hidden_layers, short.norms_per_layer) == (8, 2, 2)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_known_model_is_refused_by_its_block(name):
    with pytest.raises(SpecError, match=re.escape(NAMED[name])):
        read_model(name.upper())
    assert name not in model_names()


# Names and ids on the Hub of the models that Megatron-Bridge verifies (cards of 2026-08-22).
CARDS = """
deepseek-v3 deepseek-ai/DeepSeek-V3 deepseek-v4-flash deepseek-ai/DeepSeek-V4-Flash
gemma-3-4b-it google/gemma-3-4b-it gemma-4-26b-a4b-it google/gemma-4-26B-A4B-it glm5-2
zai-org/GLM-5.2 glm5 zai-org/GLM-5 gpt-oss-120b openai/gpt-oss-120b gpt-oss-20b
openai/gpt-oss-20b k-exaone-2 LGAI-EXAONE/K-EXAONE-2.0-750B-A37B kimi-k3 moonshotai/Kimi-K3
minimax-m3 MiniMaxAI/MiniMax-M3 moonlight-16b-a3b moonshotai/Moonlight-16B-A3B
nemotron-3-nano-30b-a3b nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 nemotron-3-nano-4b
nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16 nemotron-3-nano-omni-30b-a3b-reasoning
nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16 nemotron-3-super-120b-a12b
nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 nemotron-3.5-lightning
nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16 qwen3-235b-a22b Qwen/Qwen3-235B-A22B
qwen3-30b-a3b Qwen/Qwen3-30B-A3B qwen3-8b Qwen/Qwen3-8B qwen3.6-35b-a3b Qwen/Qwen3.6-35B-A3B
qwen3.8-27b Qwen/Qwen3.8-27B step35-flash stepfun-ai/Step-3.5-Flash
"""


def test_all_but_one_of_nvidias_cards_are_models_here():
    cards = set(CARDS.split())
    assert len(cards) == 2 * 23
    refused = {name for name in cards if name.lower() in NAMED}
    assert refused == {"kimi-k3", "moonshotai/Kimi-K3"}
    assert all(read_model(name).total_parameters() > 3e9 for name in cards - refused)
