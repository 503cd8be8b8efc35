"""A published config.json, exported, as the real TorchTitan reads it: every number is the config's
own.

The expectations are computed here from the published file alone, by the formulas of transformers.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from export_cases import cluster, layout, to_titan, training
from real_torchtitan import (
    INSTALLED,
    LINE,
    LOOK_AT_ALL,
    counts_of,
    needs_torchtitan,
    run_python,
    written,
)

from planner.intake.models import read_model
from planner.specs.model import ModelSpec
from planner.trainers.titan_models import find_flavor

pytestmark = needs_torchtitan
CONFIGS = Path(__file__).parent.parent / "fixtures" / "hf_configs"
# for the others, a word of the reason that the export gives
ONLY_02 = {"llama4-maverick": "layers without RoPE", "llama4-scout": "layers without RoPE",
    "mixtral-8x7b": "head width"}  # fmt: skip
REFUSED = {
    "bloom-176b": "ALiBi", "gemma2-9b": "soft cap", "gemma3-4b": "other norms",
    "glm4.5-air": "RoPE on 50%", "gpt-neox-20b": "RoPE on 25%", "gpt2": "learned positions",
    "mpt-7b": "ALiBi", "nemotron4-340b": "squared-relu MLP", "olmo2-7b": "norms after",
    "phi-2": "parallel residual", "qwen1.5-moe-a2.7b": "biases", "qwen2.5-7b": "biases",
    "starcoder2-15b": "gelu MLP", **(ONLY_02 if LINE == "0.3" else {}),
}  # fmt: skip
# families that TorchTitan's classes can be told whole, in the line that is installed
TRAINED = (
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "kimi-k2", "llama3.1-8b",
    "llama3.2-1b", "phi3-mini", "mistral-7b", "qwen3-30b-a3b", "qwen3-8b",
    *(() if LINE == "0.3" else ONLY_02),
)  # fmt: skip
# models of the catalogue whose config.json is not here
SHIPPED = (
    "llama3-8b", "llama3-70b", "qwen3-0.6b", "qwen3-32b", "llama2-7b",
    *(("llama3.1-405b", "qwen3-4b") if LINE == "0.3" else ("mistral-nemo-12b", "qwen3-235b-a22b")),
)  # fmt: skip
SEQ_LEN = 8192


def published(name: str) -> dict[str, Any]:
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def spec_of(name: str) -> ModelSpec:
    return read_model(name if name in SHIPPED else str(CONFIGS / f"{name}.json"))


def exported(name: str) -> Any:
    job = training(seq_len=SEQ_LEN, global_batch_size=8)
    return to_titan(layout(8), spec_of(name), cluster(8), job, INSTALLED or "0.2.2")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The real package's answer to every export, in one process: its import takes longest."""
    root = tmp_path_factory.mktemp("exports")
    made = {name: written(exported(name), root / name) for name in (*TRAINED, *SHIPPED)}
    assert [name for name, one in made.items() if one.blockers] == []
    cases = [(name, str(root / name), one.arguments) for name, one in made.items()]
    answers = run_python(LOOK_AT_ALL, root, json.dumps(cases))
    assert isinstance(answers, dict)
    return answers


def test_every_published_config_is_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*TRAINED, *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_class_has_is_named(name: str) -> None:
    assert REFUSED[name] in " ".join(fault.rule for fault in exported(name).blockers)


@pytest.mark.parametrize("name", TRAINED)
def test_shapes(name: str, read: dict[str, Any]) -> None:
    said, config = read[name], published(name)
    names = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers")
    ours = (said["dim"], said["n_heads"], said["vocab_size"], said["layers"])
    assert ours == tuple(config[key] for key in names)


@pytest.mark.parametrize("name", [*TRAINED, *SHIPPED])
def test_parameters(name: str, read: dict[str, Any]) -> None:
    spec, said = spec_of(name), read[name]
    assert said["parameters"] in counts_of(spec)
    ours = (spec.num_hidden_layers, spec.rope_theta, {spec.norm_eps})
    assert (said["layers"], said["rope_theta"], set(said["eps"]) - {None}) == ours


@pytest.mark.parametrize("name", TRAINED)
def test_norm_epsilon(name: str, read: dict[str, Any]) -> None:
    named = any(gap.fault.field == "model.norm_eps" for gap in exported(name).gaps)
    assert set(read[name]["eps"]) == {published(name)["rms_norm_eps"], *([None] * named)}
    # 0.2's last norm of DeepSeek takes torch's own
    assert named is (LINE != "0.3" and "kv_lora_rank" in published(name))


def rotary_frequencies(config: dict[str, Any]) -> list[float]:
    """Radians a token, by transformers' modeling_rope_utils.py."""
    heads = config["hidden_size"] // config["num_attention_heads"]
    width = config.get("qk_rope_head_dim") or config.get("head_dim") or heads
    base, scaling = config["rope_theta"], config.get("rope_scaling") or {}
    plain = [base ** (-2 * pair / width) for pair in range(width // 2)]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in plain]
    if kind != "yarn":
        return plain
    before = scaling["original_max_position_embeddings"]
    low, high = (
        width * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling["beta_fast"], scaling["beta_slow"])
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    ramps = [min(max((pair - low) / (high - low), 0), 1) for pair in range(width // 2)]
    both = zip(plain, ramps, strict=True)
    return [f / scaling["factor"] * ramp + f * (1 - ramp) for f, ramp in both]


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    length, before = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if length < before / high:
        return frequency
    if length > before / low:
        return frequency / scaling["factor"]
    share = (before / length - low) / (high - low)
    return (1 - share) * frequency / scaling["factor"] + share * frequency


@pytest.mark.parametrize("name", TRAINED)
def test_rotary_frequencies(name: str, read: dict[str, Any]) -> None:
    config = published(name)
    assert read[name]["rope_theta"] == config["rope_theta"]
    assert read[name]["rope"] == pytest.approx(rotary_frequencies(config), rel=2e-5)


@pytest.mark.parametrize("name", [name for name in TRAINED if published(name).get("kv_lora_rank")])
def test_softmax_scale_of_mla(name: str, read: dict[str, Any]) -> None:
    assert read[name]["mscale"] == published(name)["rope_scaling"]["mscale_all_dim"]


# score function, scores divided by their sum, factor, groups, groups chosen: what the family's
# modeling code does with its config
ROUTERS = {
    "deepseek-v2": ("softmax", False, 16.0, 8, 3),
    "deepseek-v2-lite": ("softmax", False, 1.0, None, None),
    "deepseek-v3": ("sigmoid", True, 2.5, 8, 4), "kimi-k2": ("sigmoid", True, 2.827, None, None),
    "gpt-oss-20b": ("softmax", True, 1.0, None, None),
    "qwen3-30b-a3b": ("softmax", True, 1.0, None, None),
    "mixtral-8x7b": ("softmax", True, 1.0, None, None),
    "llama4-scout": ("sigmoid", False, 1.0, None, None),
    "llama4-maverick": ("sigmoid", False, 1.0, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ROUTERS if name in TRAINED])
def test_router(name: str, read: dict[str, Any]) -> None:
    router, config = read[name]["router"], published(name)
    order = ("score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
    assert tuple(router[key] for key in order) == ROUTERS[name]
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next(config[name] for name in names if config.get(name))
    assert (router["num_experts"], router["top_k"]) == (experts, config["num_experts_per_tok"])
    if LINE != "0.3":
        assert router["score_before_experts"] is name.startswith("llama4")


def test_a_config_that_is_not_the_shipped_one_keeps_its_own_numbers(tmp_path: Path) -> None:
    own = {"rope_theta": 123456.0, "rms_norm_eps": 3e-6, "rope_scaling": None}
    config = {**published("llama3.1-8b"), **own}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = read_model(str(tmp_path))
    assert find_flavor(spec, LINE or "0.2") is not None  # the shapes are those of TorchTitan's 8B
    one = to_titan(layout(8), spec, cluster(8), training(), INSTALLED or "0.2.2")
    made = written(one, tmp_path / "run")
    case = ("own", str(tmp_path / "run"), made.arguments)
    answers = run_python(LOOK_AT_ALL, tmp_path, json.dumps([case]))
    assert isinstance(answers, dict)
    said = answers["own"]
    assert (said["rope_theta"], said["eps"]) == (123456.0, [3e-6])
    assert said["rope"] == pytest.approx(rotary_frequencies(config), rel=2e-5)
