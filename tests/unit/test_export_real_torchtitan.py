"""Exports read by the installed TorchTitan itself: its ConfigManager, its model classes, its pipeline split.

Runs where torchtitan is installed (pip install torch==2.13.0, torchtitan==0.2.2 or 0.3.0, and triton, which it imports).
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from export_cases import cluster, layout, model, training

from planner.export.base import Export
from planner.export.torchtitan import export
from planner.specs.layout import PRECISIONS, Layout
from planner.specs.titan_models import FLAVORS, even_split, module_names, shape_of
from planner.specs.trainers import TRAINERS
from planner.work.precision import bf16_tail, recipes_for, stays_16_bit

try:
    INSTALLED = version("torchtitan") if importlib.util.find_spec("torchtitan") else ""
except PackageNotFoundError:
    INSTALLED = ""
LINE = INSTALLED.rpartition(".")[0]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(LINE not in ("0.2", "0.3"), reason=f"needs torchtitan 0.2.x or 0.3.x, found {INSTALLED or 'none'}"),
]
only_02 = pytest.mark.skipif(LINE != "0.2", reason="about torchtitan 0.2.x")
only_03 = pytest.mark.skipif(LINE != "0.3", reason="about torchtitan 0.3.x")


def run_python(code: str, folder: Path, *arguments: str) -> object:
    """The JSON that the last line of a program prints; the program runs where torchtitan's own trainer would."""
    # no GPU is wanted: what is read here is what every rank reads before it looks for one
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def written(exported: Export, folder: Path) -> Export:
    for name, text in exported.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return exported


PARSE = """
import dataclasses, json, sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(sys.argv[1:])
sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "model_spec"}
plain = {n: dataclasses.asdict(s) for n, s in sections.items() if dataclasses.is_dataclass(s)}
plain["activation_checkpoint_class"] = type(sections["activation_checkpoint"]).__qualname__
print(json.dumps(plain, default=str))
"""
LAYOUTS: list[dict] = [
    {"tp": 8, "ac": "full", "compile": True, "async_tp": True, "micro_batch_size": 2},
    {"dp_replicate": 2, "tp": 4, "cp": 2, "ac": "selective-op", "cpu_offload": True, "param_dtype": "float32", "master_dtype": "bfloat16"},
    {"tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "ac": "none", "zero_stage": 3},
    {"tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4, "ac": "memory-budget-0.25", "compile": True},
    {"tp": 8, "pp": 4, "layers_per_stage": (18, 21, 21, 20), "ac": "full", "reduce_dtype": "bfloat16"},
]


@pytest.mark.parametrize("values", LAYOUTS)
def test_its_config_manager_reads_what_we_meant(values: dict, tmp_path: Path) -> None:
    chosen = layout(256, **values)
    job = training(max_grad_norm=None, checkpoint={"interval_steps": 50})
    exported = written(export(chosen, model(), cluster(256), job, INSTALLED), tmp_path)
    assert exported.blockers == ()
    said = run_python(PARSE, tmp_path, *exported.arguments)
    assert isinstance(said, dict)
    check_common(said, chosen)
    activation = said.get("activation_checkpoint") or {}
    if LINE == "0.2":
        assert said["parallelism"]["enable_async_tensor_parallel"] is chosen.async_tp
        assert activation["mode"] == chosen.ac.partition("-")[0].replace("memory", "memory_budget")
        assert (said["model"]["name"], said["model"]["flavor"]) == ("llama3", "70B")
    else:
        assert said["compile"]["enable_async_tensor_parallel"] is chosen.async_tp
        kinds = {"none": "NoneType", "full": "FullAC.Config", "selective-op": "SelectiveAC.Config"}
        assert said["activation_checkpoint_class"] == kinds.get(chosen.ac, "MemoryBudgetAC.Config")
    if chosen.ac.startswith("memory-budget"):
        assert activation["memory_budget"] == 0.25


def check_common(said: dict, chosen: Layout) -> None:
    parallel, train = said["parallelism"], said["training"]
    axes = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    degrees = [parallel[f"{axis}_degree"] for axis in axes]
    assert degrees == [chosen.dp_replicate, chosen.dp_shard, chosen.cp, chosen.tp]
    assert parallel["pipeline_parallel_degree"] == chosen.pp
    assert parallel["pipeline_parallel_schedule"] == chosen.pp_schedule
    assert train["local_batch_size"] * chosen.dp_degree in (512, chosen.micro_batch_size * chosen.dp_degree)
    assert train["global_batch_size"] == 512
    assert train["mixed_precision_param"] == chosen.param_dtype
    assert train["mixed_precision_reduce"] == chosen.reduce_dtype
    assert train["dtype"] == chosen.master_dtype
    assert train["enable_cpu_offload"] is chosen.cpu_offload
    assert str(train["max_norm"]) == "inf"
    assert said["compile"]["enable"] is chosen.compile
    assert (said["checkpoint"]["enable"], said["checkpoint"]["interval"]) == (True, 50)
    if chosen.layers_per_stage:
        head = {"0.2": "output", "0.3": "lm_head"}[LINE]
        assert parallel["module_fqns_per_model_part"] == module_names(chosen.layers_per_stage, head)


@only_02
@pytest.mark.parametrize("name", ["llama3-70b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("precision", ["float8-tensorwise", "float8-rowwise", "mxfp8"])
def test_converters_are_known_to_it(name: str, precision: str, tmp_path: Path) -> None:
    exported = written(export(layout(256, precision=precision, ep=1), model(name), cluster(256), training(), INSTALLED), tmp_path)
    said = run_python(PARSE, tmp_path, *exported.arguments)
    assert isinstance(said, dict)
    known = run_python(
        "import json, torchtitan.components.quantization.float8, torchtitan.components.quantization.mx\n"
        "from torchtitan.protocols import model_converter\nprint(json.dumps(list(model_converter._registry_model_converter_cls)))",
        tmp_path,
    )
    assert isinstance(known, list)
    assert said["model"]["converters"]
    assert set(said["model"]["converters"]) <= set(known)


COUNT_02 = """
import json, sys, importlib, torch
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
config = ConfigManager().parse_args(sys.argv[1:])
if config.experimental.custom_import:
    importlib.import_module(config.experimental.custom_import)
spec = get_train_spec(config.model.name)
args = spec.model_args[config.model.flavor]
args.update_from_config(config)
with torch.device("meta"):
    model = spec.model_cls(args)
print(json.dumps([sum({id(p): p.numel() for p in model.parameters()}.values()), args.n_layers, spec.pipelining_fn is not None]))
"""
CUSTOM = ("llama2-7b", "llama3.2-1b", "mistral-nemo-12b", "mixtral-8x7b", "kimi-k2")
SHIPPED = ("llama3-8b", "llama3-70b", "qwen3-0.6b", "qwen3-32b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b")


@only_02
@pytest.mark.parametrize("name", [*SHIPPED, "llama4-scout", "llama4-maverick", "qwen3-235b-a22b", *CUSTOM])
def test_its_model_has_our_number_of_parameters(name: str, tmp_path: Path) -> None:
    spec = model(name)
    exported = written(export(layout(8), spec, cluster(8), training(seq_len=4096, global_batch_size=8), INSTALLED), tmp_path)
    assert exported.blockers == ()
    said = run_python(COUNT_02, tmp_path, *exported.arguments)
    buffers = spec.num_moe_layers * spec.num_experts * spec.router_correction_bias  # counted with the weights when published
    tied = 0 if not spec.tie_word_embeddings else spec.embedding_parameters()  # TorchTitan ties them after it has built both
    assert isinstance(said, list)
    assert said[1] == spec.num_hidden_layers
    assert said[0] in (spec.total_parameters() - buffers, spec.total_parameters() - buffers + tied)


@only_02
def test_cp_replaces_its_flex_attention(tmp_path: Path) -> None:
    exported = written(export(layout(16, cp=2), model("deepseek-v3"), cluster(16), training(), INSTALLED), tmp_path)
    assert run_python(COUNT_02, tmp_path, *exported.arguments)


COUNT_03 = """
import json, sys, torch
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(sys.argv[1:])
with torch.device("meta"):
    model = config.model_spec.model.build()
print(json.dumps([sum({id(p): p.numel() for p in model.parameters()}.values()), len(config.model_spec.model.layers), True]))
"""


@only_03
@pytest.mark.parametrize("name", [*SHIPPED, "llama3.1-405b", "qwen3-4b", "llama2-7b", "kimi-k2", "llama3.2-1b"])
def test_its_new_model_has_our_number_of_parameters(name: str, tmp_path: Path) -> None:
    spec = model(name)
    exported = written(export(layout(8), spec, cluster(8), training(seq_len=4096, global_batch_size=8), INSTALLED), tmp_path)
    assert exported.blockers == ()
    said = run_python(COUNT_03, tmp_path, *exported.arguments)
    assert isinstance(said, list)
    buffers = spec.num_moe_layers * spec.num_experts * spec.router_correction_bias
    tied = spec.embedding_parameters() if spec.tie_word_embeddings else 0
    assert said[1] == spec.num_hidden_layers
    assert said[0] in (spec.total_parameters() - buffers, spec.total_parameters() - buffers + tied)


CONVERT_03 = """
import json, sys
from torchtitan.components.quantization import float8, mx, nvfp4
for module in (float8, mx, nvfp4):
    module.has_cuda_capability = lambda *wanted: True  # the converters refuse to be built without a GPU of the right kind
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(sys.argv[1:])
kinds = {}
from torchtitan.protocols.module import Module
for fqn, found, _, _ in config.model_spec.model.traverse(Module.Config, recurse=True):
    kinds.setdefault(type(found).__qualname__, []).append(fqn)
print(json.dumps(kinds))
"""


@only_03
@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
@pytest.mark.parametrize(
    ("name", "precision", "converted", "count"),
    [
        ("llama3-70b", "float8-rowwise", "Float8Linear", 80 * 5), ("qwen3-30b-a3b", "float8-rowwise", "Float8Linear", 48 * 2),
        ("llama3-70b", "mxfp8", "MXFP8Linear", 80 * 5), ("llama3-70b", "nvfp4", "NVFP4Linear", (80 - 12) * 5),
    ],
)  # fmt: skip
def test_its_converters_take_our_configs(name: str, precision: str, converted: str, count: int, tmp_path: Path) -> None:
    chosen = layout(256, precision=precision, compile=True, reduce_dtype="bfloat16")
    exported = written(export(chosen, model(name), cluster(256), training(), INSTALLED), tmp_path)
    kinds = run_python(CONVERT_03, tmp_path, *exported.arguments)
    assert isinstance(kinds, dict)
    assert sum(len(layers) for kind, layers in kinds.items() if kind.startswith(converted)) == count


FILTER = """
import json, sys, torch
from torchao.float8 import _auto_filter_for_recipe
kept = []
for recipe in ("tensorwise", "rowwise"):
    taken = _auto_filter_for_recipe(recipe, ["output"])
    for k, n in json.loads(sys.argv[1]):
        with torch.device("meta"):
            kept.append(not taken(torch.nn.Linear(k, n), "layers.0.attention.wk"))
print(json.dumps(kept))
"""


@only_02
@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
def test_its_filter_leaves_our_layers_in_16_bits(tmp_path: Path) -> None:
    sides = (16, 1000, 1024, 1040, 2048, 2064, 4096, 4112, 8192)
    shapes = [(k, n) for k in sides for n in sides]
    table = recipes_for(TRAINERS["torchtitan"], INSTALLED)
    recipes = [table[PRECISIONS.index(name)] for name in ("float8-tensorwise", "float8-rowwise")]
    ours = [stays_16_bit(recipe, k, n) for recipe in recipes for k, n in shapes]
    assert run_python(FILTER, tmp_path, json.dumps(shapes)) == ours
    assert 0 < sum(ours) < len(ours)


@only_03
def test_its_nvfp4_leaves_our_last_layers_in_16_bits(tmp_path: Path) -> None:
    recipe = recipes_for(TRAINERS["torchtitan"], INSTALLED)[PRECISIONS.index("nvfp4")]
    said = run_python(
        "import json\nfrom torchtitan.components.quantization.nvfp4 import nvfp4_bf16_tail_fqns as taken\n"
        f"print(json.dumps([n - len(taken(n, {recipe.bf16_layers})) for n in range(2, 130)]))",
        tmp_path,
    )
    assert said == [bf16_tail(recipe, layers) for layers in range(2, 130)]


def test_its_pipeline_split_is_ours(tmp_path: Path) -> None:
    name = "generate_llm_fqn_per_model_part" if LINE == "0.2" else "_generate_llm_fqn_per_model_part"
    cases = [(32, 4), (80, 16), (126, 16), (7, 3), (6, 8), (61, 32), (28, 8)]
    said = run_python(
        f"import json\nfrom torchtitan.distributed.pipeline_parallel import {name} as split\n"
        f"print(json.dumps([split(stages, layers) for layers, stages in {cases!r}]))",
        tmp_path,
    )
    head = {"0.2": "output", "0.3": "lm_head"}[LINE]
    splits = [even_split(layers, stages) for layers, stages in cases]
    assert said == [module_names(split, head) for split in splits if split is not None]


@only_02
def test_its_pipeline_knows_which_models_it_can_split(tmp_path: Path) -> None:
    from planner.specs.titan_models import WITH_PIPELINE

    modules = sorted({flavor.module for flavor in FLAVORS.values()})
    code = f"""
import importlib, json
print(json.dumps([m for m in {modules!r} if importlib.import_module("torchtitan.models." + m).get_train_spec().pipelining_fn]))
"""
    assert set(run_python(code, tmp_path)) == WITH_PIPELINE["0.2"]  # type: ignore[call-overload]


@only_02
def test_every_flavor_in_our_table_is_its(tmp_path: Path) -> None:
    assert shape_of(model("llama3-8b")) in FLAVORS
    code = """
import importlib, json
from torchtitan.models import _supported_models
shipped = [m for m in sorted(_supported_models) if m != "flux"]
print(json.dumps({m: list(importlib.import_module("torchtitan.models." + m).get_train_spec().model_args) for m in shipped}))
"""
    shipped = run_python(code, tmp_path)
    assert isinstance(shipped, dict)
    for flavor in FLAVORS.values():
        if "0.2" in flavor.versions:
            assert {flavor.flavor, flavor.long_context or flavor.flavor} <= set(shipped[flavor.module])
