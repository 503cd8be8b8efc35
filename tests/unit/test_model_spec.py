"""ModelSpec: what a person may write, what it means, and what is refused with which words."""

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from planner.catalog.models import model_entry, model_names
from planner.errors import SpecError, UnknownNameError
from planner.intake.models import load_model, read_model
from planner.specs.model import ModelSpec

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs"
DENSE = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 2816,
    "vocab_size": 32000,
}  # fmt: skip
MOE = {**DENSE, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def faults_of(value, **kwargs):
    with pytest.raises(SpecError) as caught:
        read_model(value, **kwargs)
    return {fault.field: fault for fault in caught.value.faults}


def without_name(model):
    return model.model_dump(exclude={"name", "left_out"})


class TestCatalogue:
    @pytest.mark.parametrize(("asked", "name"), [
        ("llama3-70b", "llama3-70b"), ("LLAMA3-70B", "llama3-70b"), (" llama3-70b ", "llama3-70b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("META-LLAMA/meta-llama-3-70b", "llama3-70b"), ("deepseek-r1", "deepseek-v3"),
        ("llama3.3-70b", "llama3.1-70b"), ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ])  # fmt: skip
    def test_names_and_aliases_whatever_their_case(self, asked, name):
        assert read_model(asked) == load_model(name)
        assert load_model(name).name == name

    def test_no_alias_means_two_models_and_every_entry_names_its_source(self):
        names = [one for name in model_names() for one in (name, *model_entry(name).aliases)]
        aliases = [name.lower() for name in names]
        assert len(aliases) == len(set(aliases))
        assert all(model_entry(name).source for name in model_names())

    def test_unknown_name_suggests_the_closest(self):
        with pytest.raises(UnknownNameError, match=r"llama3-70b") as caught:
            read_model("lama3-70b", field="job.model")
        assert caught.value.faults[0].field == "job.model"

    def test_round_trip_through_json(self):
        for name in model_names():
            one = load_model(name)
            assert ModelSpec.model_validate_json(one.model_dump_json()) == one


class TestConfigFiles:
    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
    def test_published_config_means_the_catalogue_entry(self, path):
        assert without_name(read_model(str(path))) == without_name(load_model(path.stem))

    def test_folder_gives_the_name(self, tmp_path):
        folder = tmp_path / "My-Model"
        folder.mkdir()
        (folder / "config.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
        assert read_model(str(folder)).name == "My-Model"
        (folder / "my-14b.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
        assert read_model(str(folder / "my-14b.json")).name == "my-14b"

    def write(self, tmp_path, text):
        path = tmp_path / "config.json"
        path.write_text(text)
        return str(path)

    @pytest.mark.parametrize(("text", "words"), [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "no JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
        ('{"hidden_size": 64}', "model_type is missing"),
        ('{"model_type": "t5", "hidden_size": 64}', "'t5' is not supported"),
        ('{"model_type": "blip", "text_config": {"hidden_size": 64}}',
            "'blip' with a text_config is not supported"),
    ])  # fmt: skip
    def test_bad_file_is_one_clear_fault(self, tmp_path, text, words):
        faults = faults_of(self.write(tmp_path, text))
        assert len(faults) == 1
        assert words in next(iter(faults.values())).rule

    def test_missing_keys_are_all_named(self, tmp_path):
        text = '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}'
        faults = faults_of(self.write(tmp_path, text))
        rules = {field: fault.rule for field, fault in faults.items()}
        names = ("model.num_attention_heads", "model.vocab_size")
        assert rules == dict.fromkeys(names, "is required")

    @pytest.mark.parametrize(("name", "content", "words"), [
        ("none.json", None, "no such file"), ("", None, "no config.json"),
        ("huge.json", b" " * 10_000_001, "over 10 MB"), ("odd.json", b"\xff\xfe\x00", "not text"),
    ])  # fmt: skip
    def test_what_is_no_file_of_text_is_said(self, tmp_path, name, content, words):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert words in faults_of(str(tmp_path / name))["model"].rule

    @pytest.mark.parametrize("path", [str(CONFIGS / "gpt2.json"), "/etc/passwd"])
    def test_files_are_refused_where_the_caller_says_so(self, path):
        assert "not read here" in faults_of(path, allow_files=False)["model"].rule

    def test_layer_types_must_fit(self, tmp_path):
        config = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
        short = self.write(tmp_path, json.dumps({**config, "layer_types": ["full_attention"]}))
        assert "each of 24 layers" in faults_of(short)["model.layer_types"].rule
        odd = self.write(tmp_path, json.dumps({**config, "layer_types": ["linear_attention"] * 24}))
        assert faults_of(odd)["model.layer_types"].value == "linear_attention"


class TestInline:
    def test_defaults_follow_hugging_face(self):
        model = read_model({k: v for k, v in DENSE.items() if k != "num_key_value_heads"})
        shapes = (model.head_dim, model.num_key_value_heads, model.mlp, model.norm)
        assert shapes == (64, 16, "swiglu", "rmsnorm")
        switches = ("tie_word_embeddings", "attention_bias", "mlp_bias", "is_moe", "uses_mla")
        assert not any(getattr(model, name) for name in switches)

    def test_gelu_is_as_gpt(self):
        model = read_model({**DENSE, "mlp": "gelu"})
        biases = ("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias")
        assert all(getattr(model, name) for name in biases)
        assert (model.norm, model.position_embedding) == ("layernorm", "rope")
        bare = read_model({**DENSE, "mlp": "gelu", "attention_bias": False, "mlp_bias": False})
        assert bare.attention_output_bias is False

    @pytest.mark.parametrize(("keys", "mlp"), [
        ({"hidden_act": "silu"}, "swiglu"), ({"hidden_act": "gelu_new"}, "gelu"),
        ({"hidden_act": "gelu"}, "gelu"), ({"hidden_act": "relu2"}, "squared-relu"),
        ({"hidden_act": "relu"}, "gelu"),
        ({"hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2"}, "swiglu"),  # a gated family
    ])  # fmt: skip
    def test_mlp_from_the_activation(self, keys, mlp):
        assert read_model({**DENSE, **keys}).mlp == mlp

    def test_base_is_overridden_key_by_key(self):
        model = read_model({"base": "llama3-70b", "num_hidden_layers": 12, "name": "short"})
        whole = without_name(load_model("llama3-70b"))
        assert without_name(model) == {**whole, "num_hidden_layers": 12}
        assert model.name == "short"
        assert read_model(model) is model
        with pytest.raises(UnknownNameError, match="llama3-70b") as caught:
            read_model({"base": "llama3-71b"})
        assert caught.value.faults[0].field == "model.base"

    @pytest.mark.parametrize(("keys", "found"), [
        ({"base": "mistral-7b", "sliding_window": None}, {"sliding_layers": 0}),
        ({"base": "gpt2", "n_layer": 3}, {"num_hidden_layers": 3}),
        ({"base": "gpt2", "num_hidden_layers": 3}, {"num_hidden_layers": 3}),
        ({"base": "deepseek-v2", "q_lora_rank": None}, {"q_lora_rank": 0}),
        ({"base": "qwen2.5-7b", "use_sliding_window": True, "sliding_window": 64,
            "max_window_layers": 20}, {"sliding_layers": 8}),
    ])  # fmt: skip
    def test_a_key_over_a_base_means_what_it_means_in_a_file(self, keys, found):
        model = read_model(keys)
        assert {name: getattr(model, name) for name in found} == found

    def test_keys_without_bearing_may_travel_along(self):
        more = {"pretraining_tp": 1, "torch_dtype": "bfloat16"}
        assert read_model({**DENSE, **more}) == read_model(DENSE)


class TestRefusals:
    @pytest.mark.parametrize(
        "value", [-1, 0, 1.5, math.nan, math.inf, "4096", True, 10**12, [4096], {"a": 1}, 1e12]
    )
    def test_bad_sizes(self, value):
        fault = faults_of({**DENSE, "hidden_size": value})["model.hidden_size"]
        assert fault.rule
        assert "give 1 to" in fault.remedy

    def test_every_fault_is_reported_under_the_name_it_was_given_by(self):
        wrong = {"n_head": "many", "vocab_size": -5, "tie_word_embeddings": "yes", "mlp": "tanh"}
        wrong["hiden_size"] = 3
        keys = {k: v for k, v in {**DENSE, **wrong}.items() if k != "num_attention_heads"}
        faults = faults_of(keys, field="job.model")
        assert faults.keys() == {f"job.model.{key}" for key in wrong}
        assert "hidden_size" in faults["job.model.hiden_size"].remedy

    @pytest.mark.parametrize(("keys", "field", "words"), [
        ({**DENSE, "num_key_value_heads": 5}, "num_key_value_heads", "does not divide 16"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok", "more than the 8 experts"),
        ({**DENSE, "num_experts_per_tok": 2}, "num_experts_per_tok", "without a number of experts"),
        ({k: v for k, v in MOE.items() if k != "num_experts_per_tok"}, "num_experts_per_tok",
            "needed by a MoE"),
        ({**MOE, "first_k_dense_replace": 4}, "first_k_dense_replace", "no MoE layer"),
        ({k: v for k, v in DENSE.items() if k != "intermediate_size"}, "intermediate_size",
            "needed by dense layers"),
        ({**DENSE, "hidden_size": 1000}, "num_attention_heads", "do not divide hidden_size 1000"),
        ({**DENSE, "kv_lora_rank": 512}, "kv_lora_rank", "needs its head widths"),
        ({**DENSE, "position_embedding": "learned"}, "max_position_embeddings", "needs its rows"),
        ({**DENSE, "n_embd": 512}, "n_embd", "another name of hidden_size"),
        ({**DENSE, "model_type": "bert"}, "model_type", "not a supported model type"),
        ({**DENSE, "model_type": "mixtral"}, "num_experts", "is required"),
        ({**DENSE, "mlp_only_layers": "all"}, "mlp_only_layers", "list of layer numbers"),
        ({}, "vocab_size", "is required"),
    ])  # fmt: skip
    def test_contradictions(self, keys, field, words):
        assert words in faults_of(keys)[f"model.{field}"].rule

    @pytest.mark.parametrize("value", [None, 3, 2.5, [], True, "", "  "])
    def test_neither_name_nor_mapping(self, value):
        assert "neither a name" in faults_of(value)["model"].rule

    @pytest.mark.parametrize(("value", "field"), [
        ({**DENSE, 5: 1}, "model.5"), ("a\0b", "model"), ("x" * 100_000, "model"),
    ])  # fmt: skip
    def test_odd_keys_and_paths(self, value, field):
        assert field in faults_of(value)

    def test_direct_construction_is_checked_too(self):
        with pytest.raises(ValidationError, match="does not divide"):
            ModelSpec(**{**load_model("llama3-8b").model_dump(), "num_key_value_heads": 3})
        with pytest.raises(ValidationError, match="frozen"):
            load_model("llama3-8b").hidden_size = 1


class TestLayers:
    def test_llama4_alternates_dense_first(self):
        kinds = load_model("llama4-maverick").layer_kinds()[:4]
        found = [(kind.moe, kind.window) for kind in kinds]
        assert found == [(False, 8192), (True, 8192), (False, 8192), (True, 0)]

    def test_sliding_layers(self):
        names = {"gemma2-9b": 21, "gemma3-27b": 52, "mistral-7b": 32, "qwen2.5-7b": 0}
        assert {name: load_model(name).sliding_layers for name in names} == names
        assert load_model("gemma3-27b").layer_windows()[:7] == (*[1024] * 5, 0, 1024)
        short = read_model({"base": "gpt-oss-20b", "num_hidden_layers": 5})
        assert short.layer_windows() == (128, 0, 128, 0, 128)

    @pytest.mark.parametrize(("keys", "moe"), [
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
        ({"moe_layer_freq": 2}, [True, False, True, False]),
    ])  # fmt: skip
    def test_sparse_step_and_listed_dense_layers(self, keys, moe):
        assert [kind.moe for kind in read_model({**MOE, **keys}).layer_kinds()] == moe
