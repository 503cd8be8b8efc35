"""ModelSpec: what a person may write, what it means, and what is refused with which words."""

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from planner.catalog.models import model_entry, model_names
from planner.errors import SpecError, UnknownNameError
from planner.intake.models import load_model, read_model
from planner.specs.model import LayerKind, ModelSpec

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
    @pytest.mark.parametrize("name", [
        "llama3-70b", "LLAMA3-70B", " llama3-70b ", "meta-llama/Meta-Llama-3-70B",
        "META-LLAMA/meta-llama-3-70b",
    ])  # fmt: skip
    def test_names_and_aliases_whatever_their_case(self, name):
        assert read_model(name) == load_model("llama3-70b")

    def test_no_alias_means_two_models(self):
        names = [one for name in model_names() for one in (name, *model_entry(name).aliases)]
        aliases = [name.lower() for name in names]
        assert len(aliases) == len(set(aliases))

    def test_every_entry_names_its_source(self):
        assert all(model_entry(name).source for name in model_names())

    def test_unknown_name_suggests_the_closest(self):
        with pytest.raises(UnknownNameError, match=r"llama3-70b") as caught:
            read_model("lama3-70b", field="job.model")
        assert caught.value.faults[0].field == "job.model"

    @pytest.mark.parametrize(("alias", "name"), [
        ("deepseek-r1", "deepseek-v3"),
        ("llama3.3-70b", "llama3.1-70b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ])  # fmt: skip
    def test_models_of_the_same_shapes_are_aliases(self, alias, name):
        assert load_model(alias).name == name

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
        faults = faults_of(
            self.write(
                tmp_path, '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}'
            )
        )
        assert set(faults) == {"model.num_attention_heads", "model.vocab_size"}
        assert all(fault.rule == "is required" for fault in faults.values())

    def test_missing_file_folder_without_config_and_huge_file(self, tmp_path):
        assert "no such file" in faults_of(str(tmp_path / "none.json"))["model"].rule
        assert "no config.json" in faults_of(str(tmp_path))["model"].rule
        (tmp_path / "huge.json").write_text(" " * 10_000_001)
        assert "over 10 MB" in faults_of(str(tmp_path / "huge.json"))["model"].rule
        (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
        assert "not text" in faults_of(str(tmp_path / "binary.json"))["model"].rule

    def test_files_are_refused_where_the_caller_says_so(self):
        faults = faults_of(str(CONFIGS / "gpt2.json"), allow_files=False)
        assert "not read here" in faults["model"].rule
        assert "not read here" in faults_of("/etc/passwd", allow_files=False)["model"].rule

    def test_layer_types_must_fit(self, tmp_path):
        config = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
        short = self.write(tmp_path, json.dumps({**config, "layer_types": ["full_attention"]}))
        assert "each of 24 layers" in faults_of(short)["model.layer_types"].rule
        odd = self.write(tmp_path, json.dumps({**config, "layer_types": ["linear_attention"] * 24}))
        assert faults_of(odd)["model.layer_types"].value == "linear_attention"


class TestInline:
    def test_defaults_follow_hugging_face(self):
        keys = {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}
        model = read_model(keys)
        assert (model.head_dim, model.num_key_value_heads) == (64, 16)
        assert (model.mlp, model.norm) == ("swiglu", "rmsnorm")
        assert not any(
            (
                model.tie_word_embeddings,
                model.attention_bias,
                model.mlp_bias,
                model.is_moe,
                model.uses_mla,
            )
        )

    def test_gelu_is_as_gpt(self):
        model = read_model({**DENSE, "mlp": "gelu"})
        assert (
            model.norm,
            model.norm_bias,
            model.attention_bias,
            model.attention_output_bias,
            model.mlp_bias,
        ) == ("layernorm", *[True] * 4)
        assert model.position_embedding == "rope"
        assert (
            read_model(
                {**DENSE, "mlp": "gelu", "attention_bias": False, "mlp_bias": False}
            ).attention_output_bias
            is False
        )

    def test_gpt_parameters_by_hand(self):
        h, layers, vocab, positions = 64, 3, 1000, 128
        keys = {
            "n_embd": h,
            "n_layer": layers,
            "n_head": 4,
            "vocab_size": vocab,
            "n_positions": positions,
            "mlp": "gelu",
        }
        model = read_model({**keys, "position_embedding": "learned", "tie_word_embeddings": True})
        own = layers * (12 * h * h + 13 * h) + 2 * h
        assert model.total_parameters() == own + (vocab + positions) * h

    @pytest.mark.parametrize(("activation", "mlp"), [
        ("silu", "swiglu"),
        ("gelu_new", "gelu"),
        ("gelu", "gelu"),
        ("relu2", "squared-relu"),
        ("relu", "gelu"),
    ])  # fmt: skip
    def test_mlp_from_the_activation(self, activation, mlp):
        assert read_model({**DENSE, "hidden_act": activation}).mlp == mlp

    def test_gated_family_whatever_its_activation(self):
        gated = {**DENSE, "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2"}
        assert read_model(gated).mlp == "swiglu"

    def test_base_is_overridden_key_by_key(self):
        model = read_model({"base": "llama3-70b", "num_hidden_layers": 12, "name": "short"})
        whole = without_name(load_model("llama3-70b"))
        assert without_name(model) == {**whole, "num_hidden_layers": 12}
        assert model.name == "short"
        assert read_model({"base": "mistral-7b", "sliding_window": None}).sliding_layers == 0
        assert read_model({"base": "gpt2", "n_layer": 3}).num_hidden_layers == 3
        assert read_model({"base": "gpt2", "num_hidden_layers": 3}).num_hidden_layers == 3
        assert read_model({"base": "deepseek-v2", "q_lora_rank": None}).q_lora_rank == 0

    def test_layers_of_a_base_keep_their_pattern(self):
        short = read_model({"base": "gpt-oss-20b", "num_hidden_layers": 5})
        assert short.layer_windows() == (128, 0, 128, 0, 128)

    def test_base_loader_of_the_caller(self):
        mine = {"base": "mine", "vocab_size": 5}
        assert read_model(mine, base_loader=lambda name: DENSE).vocab_size == 5

    def test_a_spec_passes_through(self):
        model = load_model("gpt2")
        assert read_model(model) is model

    def test_unknown_base(self):
        with pytest.raises(UnknownNameError, match="llama3-70b") as caught:
            read_model({"base": "llama3-71b"})
        assert caught.value.faults[0].field == "model.base"

    def test_keys_without_bearing_may_travel_along(self):
        more = {"pretraining_tp": 1, "torch_dtype": "bfloat16"}
        assert read_model({**DENSE, **more}) == read_model(DENSE)

    @pytest.mark.parametrize(("keys", "billions"), [
        ({"hidden_size": 12288, "intermediate_size": 49152, "mlp": "gelu",
            "num_attention_heads": 96, "num_hidden_layers": 96}, 174.6),
        ({"hidden_size": 13312, "intermediate_size": 53248, "mlp": "gelu",
            "num_attention_heads": 104, "num_hidden_layers": 82}, 175.1),
        ({"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 0,
            "first_k_dense_replace": 0}, 30.0),
    ])  # fmt: skip
    def test_rows_as_published_measurements_write_them(self, keys, billions):
        more = {"vocab_size": 51200, "tie_word_embeddings": True, "name": "row"}
        model = read_model({**keys, **more})
        assert model.total_parameters() / 1e9 == pytest.approx(billions, abs=0.05)


class TestRefusals:
    @pytest.mark.parametrize(
        "value", [-1, 0, 1.5, math.nan, math.inf, "4096", True, 10**12, [4096], {"a": 1}, 1e12]
    )
    def test_bad_sizes(self, value):
        fault = faults_of({**DENSE, "hidden_size": value})["model.hidden_size"]
        assert fault.rule
        assert "give 1 to" in fault.remedy

    def test_every_fault_is_reported_under_the_name_it_was_given_by(self):
        keys = {
            **DENSE,
            "n_head": "many",
            "vocab_size": -5,
            "tie_word_embeddings": "yes",
            "hiden_size": 3,
            "mlp": "tanh",
        }
        del keys["num_attention_heads"]
        faults = faults_of(keys, field="job.model")
        assert set(faults) == {
            f"job.model.{key}"
            for key in ("n_head", "vocab_size", "tie_word_embeddings", "hiden_size", "mlp")
        }
        assert "hidden_size" in faults["job.model.hiden_size"].remedy

    @pytest.mark.parametrize(("keys", "field", "words"), [
        ({**DENSE, "num_key_value_heads": 5}, "num_key_value_heads", "does not divide 16"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok", "more than the 8 experts"),
        ({**DENSE, "num_experts_per_tok": 2}, "num_experts_per_tok", "without a number of experts"),
        (
            {k: v for k, v in MOE.items() if k != "num_experts_per_tok"},
            "num_experts_per_tok",
            "needed by a MoE",
        ),
        ({**MOE, "first_k_dense_replace": 4}, "first_k_dense_replace", "no MoE layer"),
        (
            {k: v for k, v in DENSE.items() if k != "intermediate_size"},
            "intermediate_size",
            "needed by dense layers",
        ),
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

    def test_odd_keys_and_paths(self):
        assert "model.5" in faults_of({**DENSE, 5: 1})
        assert "model" in faults_of("a\0b")
        with pytest.raises(SpecError):
            read_model("x" * 100_000)

    def test_direct_construction_is_checked_too(self):
        with pytest.raises(ValidationError, match="does not divide"):
            ModelSpec(**{**load_model("llama3-8b").model_dump(), "num_key_value_heads": 3})
        with pytest.raises(ValidationError, match="frozen"):
            load_model("llama3-8b").hidden_size = 1


class TestLayers:
    def test_leading_dense_layers(self):
        model = load_model("deepseek-v3")
        dense, sparse = LayerKind(moe=False, window=0), LayerKind(moe=True, window=0)
        assert model.distinct_layers() == ((dense, 3), (sparse, 58))

    def test_llama4_alternates_dense_first(self):
        kinds = load_model("llama4-maverick").layer_kinds()
        assert [kind.moe for kind in kinds[:4]] == [False, True, False, True]
        assert [kind.window for kind in kinds[:4]] == [8192, 8192, 8192, 0]

    def test_sliding_layers(self):
        assert load_model("gemma2-9b").sliding_layers == 21
        assert load_model("gemma3-27b").sliding_layers == 52
        assert load_model("gemma3-27b").layer_windows()[:7] == (*[1024] * 5, 0, 1024)
        assert load_model("mistral-7b").sliding_layers == 32
        assert load_model("qwen2.5-7b").sliding_layers == 0
        assert (
            read_model(
                {
                    "base": "qwen2.5-7b",
                    "use_sliding_window": True,
                    "sliding_window": 64,
                    "max_window_layers": 20,
                }
            ).sliding_layers
            == 8
        )

    def test_sparse_step_and_listed_dense_layers(self):
        model = read_model({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
        assert [kind.moe for kind in model.layer_kinds()] == [False, True, False, False]
        model = read_model({**MOE, "moe_layer_freq": 2})
        assert [kind.moe for kind in model.layer_kinds()] == [True, False, True, False]

    def test_widths_of_moe(self):
        model = load_model("mixtral-8x7b")
        widths = (model.intermediate_size, model.moe_intermediate_size)
        assert (*widths, model.parameters.dense_mlp()) == (0, 14336, 0)
        shared = load_model("deepseek-v2")
        assert shared.shared_expert_intermediate_size == 2 * 1536
        assert (
            shared.parameters.moe()
            == 160 * shared.parameters.expert() + shared.parameters.shared_expert() + 160 * 5120
        )

    def test_mla_widths(self):
        model = load_model("deepseek-v3")
        assert (model.qk_head_dim, model.v_dim, model.head_dim) == (192, 128, 192)
        # DeepSeek-V3: q 1536 + 512 latents, 128 heads
        assert model.parameters.attention() == 187_105_280
