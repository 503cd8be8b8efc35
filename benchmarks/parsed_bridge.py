"""Checks that a checkout of Megatron-Bridge takes what we export to its release.

    python -m benchmarks.parsed_bridge BRIDGE MEGATRON --core 0.19 [--gpu h100-sxm-80gb]
        [--capability 9] [--seed 1]

Exports legal layouts of each catalogue model that has a pretraining recipe there, on 8, 64 and 512
GPUs, under every kind of CUDA graphs, optimizer and overlap that its rules allow. BRIDGE's own
run_recipe.py functions load the recipe, apply our overrides and finish and validate the whole
configuration, as its pretrain() does before it builds a model. MEGATRON is a checkout of the
Megatron-LM that BRIDGE pins (3rdparty/). Prints what is refused; exits 1 if anything is.

Recipes ask Hugging Face for a config.json: here it is one of tests/fixtures/hf_configs or of the
class in transformers, with the catalogue's sizes. What needs a GPU is a stand-in. Needs torch,
transformers 5.8 to 5.12, omegaconf, hydra-core, einops and six; deepseek_v4 needs the dev branch of
Megatron-LM and is left out, as are recipes that read more than a config.json (qwen3.5).
"""

import abc
import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import re
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.parsed_megatron import TAKEN, FusedAdam, exported, report
from planner.catalog.bridge_recipes import YOURS
from planner.specs.model import ModelSpec

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "hf_configs"
# beginning of a model's name -> the config.json of its family, or class and type in transformers
FAMILIES: Mapping[str, str] = {
    "llama": "llama3.1-8b", "qwen2": "qwen2.5-7b", "qwen3": "qwen3-8b", "gpt-oss": "gpt-oss-20b",
    "qwen3-30b": "qwen3-30b-a3b", "qwen3-235b": "qwen3-30b-a3b", "glm4.5": "glm4.5-air",
    "deepseek-v2": "deepseek-v2", "deepseek-v3": "deepseek-v3", "moonlight": "deepseek-v3",
    "qwen3-next": "Qwen3NextForCausalLM qwen3_next", "kimi-k2": "deepseek-v3",
    "glm5.2": "GlmMoeDsaForCausalLM glm_moe_dsa", "nemotron": "NemotronHForCausalLM nemotron_h",
    "step-3.5": "Step3p5ForCausalLM step3p5",
}  # fmt: skip
SIZED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "num_experts_per_tok", "moe_intermediate_size",
    "kv_lora_rank", "q_lora_rank",
)  # fmt: skip
NOT_HERE = frozenset(
    {
        "transformer_engine", "transformer_engine_torch", "mamba_ssm", "causal_conv1d", "modelopt",
        "flash_attn", "apex", "nvidia_resiliency_ext", "fla", "deep_ep", "fast_hadamard_transform",
        "flash_mla", "cudnn", "multistorageclient", "flashinfer", "timm", "open_clip", "triton",
        "qwen_vl_utils", "webdataset", "torchvision", "PIL", "diffusers", "peft", "mistral_common",
        "mlflow", "comet_ml", "wandb",
    }
)  # fmt: skip
VERSION = "2.17.0"


class Callable(abc.ABCMeta):
    """A class that stands for whatever is asked of it: decorator, base class, constant."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("__", "_abc")):
            raise AttributeError(name)
        return cls


class Absent(types.ModuleType, importlib.abc.Loader):
    """A module that is not installed here: what is asked of it is a class that does nothing."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        does = {
            "__new__": lambda cls, *_, **__: object.__new__(cls),
            "__init__": lambda *_, **__: None,
            "__call__": lambda _, given=None, *__, **___: given,
            "__class_getitem__": classmethod(lambda cls, _: cls),
        }
        setattr(self, name, Callable(name, (), does))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `Absent` modules last, where nothing of that name is installed."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in NOT_HERE or name.startswith("megatron.energon")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def version_of(name: str, real: Any = importlib.metadata.version) -> str:
    try:
        return str(real(name))
    except importlib.metadata.PackageNotFoundError:
        if name.replace("-", "_") in {*NOT_HERE, "nvidia_modelopt", "flash_attn_3"}:
            return VERSION
        raise


def prepare(bridge: Path, megatron: Path, capability: int) -> typing.Callable[[str], Any]:
    """BRIDGE's loader of recipes, on a GPU of this compute capability that is not there."""
    import torch

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    setattr(typing, "override", lambda method: method)  # noqa: B010  of Python 3.12
    setattr(importlib.metadata, "version", version_of)  # noqa: B010
    sys.meta_path.append(Finder())
    gpu = types.SimpleNamespace(
        major=capability, minor=0, total_memory=80 << 30, multi_processor_count=132,
        name="NVIDIA B200" if capability == 10 else "NVIDIA H100",
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.get_device_capability = lambda *_: (capability, 0)
    torch.cuda.current_device, torch.cuda.device_count = lambda: 0, lambda: 8
    torch.cuda.is_available = lambda: True
    importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam = FusedAdam
    sys.path[:0] = [str(bridge / "scripts" / name) for name in ("training", "common")]
    sys.path.insert(0, str(megatron))
    package = importlib.import_module("megatron")
    package.__path__.append(str(bridge / "src" / "megatron"))
    try:
        return importlib.import_module("recipe_runner").load_recipe
    except ModuleNotFoundError:  # before 0.6
        recipes = importlib.import_module("megatron.bridge.recipes")
        return lambda name: getattr(recipes, name)()


def hugging_face(model: ModelSpec, folder: Path) -> Path | None:
    """A folder whose config.json describes the model; None for a family that is left out."""
    family = max((name for name in FAMILIES if model.name.startswith(name)), key=len, default="")
    if not family or model.name.startswith("qwen3.5"):
        return None
    architecture, _, model_type = FAMILIES[family].partition(" ")
    known: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    if not model_type:
        known = json.loads((CONFIGS / f"{architecture}.json").read_text(encoding="utf-8"))
    for name in SIZED:
        if getattr(model, name) and (model_type or name in known):
            known[name] = getattr(model, name)
    for name in {"n_routed_experts", "num_experts", "num_local_experts"} & known.keys():
        known[name] = model.num_experts
    if "tie_word_embeddings" in known:
        known["tie_word_embeddings"] = model.tie_word_embeddings
    known.pop("layer_types", None)
    if model_type == "nemotron_h":
        del known["num_hidden_layers"]
        kinds = {"mamba2": "mamba", "attention": "attention"}
        known["layers_block_type"] = [kinds.get(mixer, "moe") for mixer in model.mixers]
    if model_type == "qwen3_next":
        known["full_attention_interval"] = 4
    if model.indexed:
        known["indexer_rope_interleave"] = True
    path = folder / model.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(known), encoding="utf-8")
    return path


def judge(
    load: typing.Callable[[str], Any], recipe: str, overrides: tuple[str, ...], ranks: int
) -> str:
    """What the checkout refuses; empty where it takes the configuration."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    update = importlib.import_module("megatron.bridge.training.config").runtime_config_update
    spelled = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    try:
        update(spelled.process_config_with_overrides(load(recipe), cli_overrides=[*overrides]))
    except (Exception, SystemExit) as error:  # whatever it raises is its refusal
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bridge", type=Path)
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--core", required=True, help="megatron-core of the release")
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--capability", type=int, default=9, help="10 for Blackwell")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    load = prepare(asked.bridge, asked.megatron, asked.capability)
    bridge = importlib.import_module("megatron.bridge").AutoBridge
    configs = importlib.import_module("transformers").AutoConfig
    said = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = exported("megatron-bridge", asked.core, asked.gpu, 1, asked.seed)
        for model, name, made, ranks in chosen:
            path = hugging_face(model, Path(folder))
            recipe = re.search(r"--recipe (\w+)", made.files["launch.sh"])
            if path is None or recipe is None or recipe[1] == YOURS:
                continue
            bridge.from_hf_pretrained = classmethod(
                lambda cls, *_, path=path, **__: cls.from_hf_config(configs.from_pretrained(path))
            )
            said.append((judge(load, recipe[1], made.arguments, ranks) or TAKEN, name))
    return report(said)


if __name__ == "__main__":
    sys.exit(main())
