"""Exports read by the installed TorchTitan itself: its ConfigManager, its model classes, its
pipeline split.

Runs where torchtitan is installed, as `make test` installs it (titan-requirements.txt).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from export_cases import cluster, layout, model, to_titan, training
from real_torchtitan import (
    INSTALLED,
    LINE,
    LOOK_AT_ALL,
    needs_torchtitan,
    only_02,
    only_03,
    run_python,
    written,
)

from planner.export.base import Export
from planner.precision import PRECISIONS, bf16_tail, stays_16_bit
from planner.specs.layout import Layout
from planner.trainers.registry import TRAINERS
from planner.trainers.titan_models import FLAVORS, even_split, module_names, shape_of
from planner.trainers.titan_networks import rope_numbers

pytestmark = needs_torchtitan
# argv[1]: a JSON list of [name, folder, arguments]. Prints name -> its config; "converters": those
# that 0.2 knows.
PARSE = """
import dataclasses, importlib, json, os, sys
from torchtitan.config import ConfigManager
answers = {}
for name, folder, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.path.insert(0, folder)
    for own in ("planner_model", "planner_job", "planner_config"):
        sys.modules.pop(own, None)
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(arguments)
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "model_spec"}
    plain = {n: dataclasses.asdict(s) for n, s in sections.items() if dataclasses.is_dataclass(s)}
    plain["activation_checkpoint_class"] = type(sections["activation_checkpoint"]).__qualname__
    answers[name] = plain
    sys.path.remove(folder)
if sys.argv[2] == "0.2":
    import torchtitan.components.quantization.float8, torchtitan.components.quantization.mx
    from torchtitan.protocols import model_converter
    answers["converters"] = list(model_converter._registry_model_converter_cls)
print(json.dumps(answers, default=str))
"""  # noqa: E501
LAYOUTS: list[dict] = [
    {"tp": 8, "ac": "full", "compile": True, "async_tp": True, "micro_batch_size": 2},
    {"dp_replicate": 2, "tp": 4, "cp": 2, "ac": "selective-op", "cpu_offload": True,
        "param_dtype": "float32", "master_dtype": "bfloat16"},
    {"tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "ac": "none",
        "zero_stage": 3},
    {"tp": 8, "pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4,
        "ac": "memory-budget-0.25", "compile": True},
    {"tp": 8, "pp": 4, "layers_per_stage": (18, 21, 21, 20), "ac": "full",
        "reduce_dtype": "bfloat16"},
]  # fmt: skip
JOB = {"max_grad_norm": None, "checkpoint": {"interval_steps": 50}}
LOW = ("float8-tensorwise", "float8-rowwise", "float8-rowwise-gw-hp", "mxfp8")
CONVERTED = [(name, precision) for name in ("llama3-70b", "qwen3-30b-a3b") for precision in LOW]


def of(chosen: Layout, name: str = "llama3.1-70b") -> Export:
    return to_titan(chosen, model(name), cluster(chosen.num_gpus), training(**JOB), INSTALLED)


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the real ConfigManager reads of each export; one process for all."""
    root = tmp_path_factory.mktemp("parsed")
    exports = {str(index): of(layout(256, **values)) for index, values in enumerate(LAYOUTS)}
    if LINE == "0.2":
        for name, precision in CONVERTED:
            exports[f"{name} {precision}"] = of(layout(256, precision=precision, ep=1), name)
        exports["deepep"] = of(layout(256, ep=8, moe_dispatcher="deepep"), "deepseek-v3")
    folders = {name: root / str(index) for index, name in enumerate(exports)}
    commands = {name: written(made, folders[name]).arguments for name, made in exports.items()}
    cases = [(name, str(folders[name]), arguments) for name, arguments in commands.items()]
    answers: Any = run_python(PARSE, root, json.dumps(cases), LINE)
    return dict(answers)


@only_02
def test_it_reads_our_dispatcher(parsed: dict[str, Any]) -> None:
    assert parsed["deepep"]["parallelism"]["expert_parallel_comm_backend"] == "deepep"


@pytest.mark.parametrize("place", range(len(LAYOUTS)))
def test_its_config_manager_reads_what_we_meant(place: int, parsed: dict[str, Any]) -> None:
    chosen, said = layout(256, **LAYOUTS[place]), parsed[str(place)]
    assert of(chosen).blockers == ()
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
    degrees = [parallel[f"{axis}_degree"] for axis in (*axes, "pipeline_parallel")]
    assert degrees == [chosen.dp_replicate, chosen.dp_shard, chosen.cp, chosen.tp, chosen.pp]
    assert parallel["pipeline_parallel_schedule"] == chosen.pp_schedule
    batch = train["local_batch_size"] * chosen.dp_degree
    assert batch in (512, chosen.micro_batch_size * chosen.dp_degree)
    dtypes = [train[name] for name in ("mixed_precision_param", "mixed_precision_reduce", "dtype")]
    assert dtypes == [chosen.param_dtype, chosen.reduce_dtype, chosen.master_dtype]
    assert train["enable_cpu_offload"] is chosen.cpu_offload
    assert (train["global_batch_size"], str(train["max_norm"])) == (512, "inf")
    assert said["compile"]["enable"] is chosen.compile
    assert (said["checkpoint"]["enable"], said["checkpoint"]["interval"]) == (True, 50)
    if chosen.layers_per_stage:
        head = {"0.2": "output", "0.3": "lm_head"}[LINE]
        assert parallel["module_fqns_per_model_part"] == module_names(chosen.layers_per_stage, head)


@only_02
@pytest.mark.parametrize(("name", "precision"), CONVERTED)
def test_converters_are_known_to_it(name: str, precision: str, parsed: dict[str, Any]) -> None:
    converters = parsed[f"{name} {precision}"]["model"]["converters"]
    assert converters
    assert set(converters) <= set(parsed["converters"])


@only_02
def test_cp_replaces_its_flex_attention(tmp_path: Path) -> None:
    made = of(layout(16, cp=2), "deepseek-v3")
    case = ("it", str(tmp_path), written(made, tmp_path).arguments)
    said: Any = run_python(LOOK_AT_ALL, tmp_path, json.dumps([case]))
    assert said["it"]["layers"] == 61


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
"""  # noqa: E501


@only_03
@pytest.mark.parametrize(("name", "precision", "converted", "count"), [
    ("llama3-70b", "float8-rowwise", "Float8Linear", 80 * 5),
    ("qwen3-30b-a3b", "float8-rowwise", "Float8Linear", 48 * 2),
    ("llama3-70b", "mxfp8", "MXFP8Linear", 80 * 5),
    ("llama3-70b", "nvfp4", "NVFP4Linear", (80 - 12) * 5),
])  # fmt: skip
def test_its_converters_take_our_configs(
    name: str, precision: str, converted: str, count: int, tmp_path: Path
) -> None:
    chosen = layout(256, precision=precision, compile=True, reduce_dtype="bfloat16")
    exported = written(of(chosen, name), tmp_path)
    kinds: Any = run_python(CONVERT_03, tmp_path, *exported.arguments)
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
def test_its_filter_leaves_our_layers_in_16_bits(tmp_path: Path) -> None:
    sides = (16, 1000, 1024, 1040, 2048, 2064, 4096, 4112, 8192)
    shapes = [(k, n) for k in sides for n in sides]
    table = TRAINERS["torchtitan"].recipes(INSTALLED)
    names = ("float8-tensorwise", "float8-rowwise")
    recipes = [table[PRECISIONS.names.index(name)] for name in names]
    ours = [stays_16_bit(recipe, k, n) for recipe in recipes for k, n in shapes]
    assert run_python(FILTER, tmp_path, json.dumps(shapes)) == ours
    assert 0 < sum(ours) < len(ours)


@only_03
def test_its_nvfp4_leaves_our_last_layers_in_16_bits(tmp_path: Path) -> None:
    recipe = TRAINERS["torchtitan"].recipes(INSTALLED)[PRECISIONS.names.index("nvfp4")]
    said = run_python(
        "import json\nfrom torchtitan.components.quantization.nvfp4 import "
        "nvfp4_bf16_tail_fqns as taken\n"
        f"print(json.dumps([n - len(taken(n, {recipe.bf16_layers})) for n in range(2, 130)]))",
        tmp_path,
    )
    assert said == [bf16_tail(recipe, layers) for layers in range(2, 130)]


def test_its_pipeline_split_is_ours(tmp_path: Path) -> None:
    name = "generate_llm_fqn_per_model_part"
    name = name if LINE == "0.2" else f"_{name}"
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
    from planner.trainers.titan_models import WITH_PIPELINE

    modules = sorted({flavor.module for flavor in FLAVORS.values()})
    code = f"""
import importlib, json
print(json.dumps([m for m in {modules!r} if importlib.import_module("torchtitan.models." + m).get_train_spec().pipelining_fn]))
"""  # noqa: E501
    assert set(run_python(code, tmp_path)) == WITH_PIPELINE["0.2"]  # type: ignore[call-overload]


@only_02
def test_every_flavor_in_our_table_is_its(tmp_path: Path) -> None:
    assert shape_of(model("llama3-8b")) in FLAVORS
    code = """
import importlib, json
from torchtitan.models import _supported_models
shipped = [m for m in sorted(_supported_models) if m != "flux"]
print(json.dumps({m: list(importlib.import_module("torchtitan.models." + m).get_train_spec().model_args) for m in shipped}))
"""  # noqa: E501
    shipped: Any = run_python(code, tmp_path)
    for flavor in FLAVORS.values():
        if "0.2" in flavor.versions:
            named = {flavor.flavor, flavor.long_context or flavor.flavor}
            assert named <= set(shipped[flavor.module])


LLAMA_ROPE = (
    "scaling_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
FACTS_02 = """
import dataclasses, importlib, json
TABLES = {"llama3": "llama3_args", "qwen3": "qwen3_args", "deepseek_v3": "deepseekv3_args", "llama4": "llama4_args"}
TABLES["gpt_oss"] = "gptoss_configs"
print(json.dumps({f"{module} {flavor}": dataclasses.asdict(args) for module, table in TABLES.items()
    for flavor, args in getattr(importlib.import_module("torchtitan.models." + module), table).items()}, default=str))
"""  # noqa: E501


@only_02
def test_what_we_say_of_its_flavors_is_so(tmp_path: Path) -> None:
    theirs: Any = run_python(FACTS_02, tmp_path)
    for flavor in FLAVORS.values():
        if "0.2" in flavor.versions:
            ours = flavor.facts
            args = theirs[f"{flavor.module} {flavor.flavor}"]
            moe = args.get("moe_args") or {}
            names = {
                "scoring_func": "score_func", "norm_topk_prob": "route_norm",
                "routed_scaling_factor": "route_scale",
                "moe_apply_router_weight_on_input": "score_before_experts",
            }  # fmt: skip
            for field in ("rope_theta", "norm_eps"):
                assert args[field] == ours[field], (flavor, field)
            for field in names.keys() & ours.keys():
                assert moe[names[field]] == ours[field], (flavor, field)
            pairs = {"n_group": "num_expert_groups", "topk_group": "num_limited_groups"}
            for field, key in pairs.items():
                assert (moe.get(key) or 0) == ours.get(field, 0), (flavor, field)
            _check_scaling(flavor.module, args, ours["rope_scaling"])


def _check_scaling(module: str, args: dict[str, Any], ours: Any) -> None:
    numbers = rope_numbers(ours)
    if module in ("llama3", "llama4"):
        said = args["rope_scaling_args"]
        assert numbers == (() if said is None else ("llama3", *(said[key] for key in LLAMA_ROPE)))
    elif module == "qwen3":
        assert numbers == ()
    else:
        ends = ("beta_fast", "beta_slow") if module == "deepseek_v3" else ("ntk_beta", "ntk_alpha")
        stated = (args["rope_factor"], args["original_seq_len"], *(args[key] for key in ends))
        assert numbers[:5] == ("yarn", *stated)
        assert module == "gpt_oss" or ours.mscale_all_dim == args["mscale"]


FACTS_03 = """
import importlib, json
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
answers = {}
for module, flavor in json.loads(__import__("sys").argv[1]):
    config = importlib.import_module("torchtitan.models." + module).model_registry(flavor, attn_backend="flex").model
    rope = next(found for _, found, _, _ in config.traverse(RoPE.Config))
    router = next((found for _, found, _, _ in config.traverse(TokenChoiceTopKRouter.Config)), None)
    answers[f"{module} {flavor}"] = {
        "rope_theta": rope.theta, "scaling": rope.scaling, "rope": {key: getattr(rope, key) for key in (
            "scaling_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "rope_factor",
            "original_seq_len", "beta_fast", "beta_slow", "truncate")},
        "eps": list({found.eps for _, found, _, _ in config.traverse(RMSNorm.Config)}),
        "mscale": getattr(config.layers[0].attention, "mscale", None),
        "router": None if router is None else [router.score_func, router.route_norm, router.route_scale, router.num_expert_groups,
            router.num_limited_groups]}
print(json.dumps(answers))
"""  # noqa: E501


@only_03
def test_what_we_say_of_its_new_flavors_is_so(tmp_path: Path) -> None:
    ours = [flavor for flavor in FLAVORS.values() if "0.3" in flavor.versions]
    asked = [(flavor.module, flavor.flavor) for flavor in ours]
    theirs: Any = run_python(FACTS_03, tmp_path, json.dumps(asked))
    for flavor in ours:
        facts = flavor.facts
        said = theirs[f"{flavor.module} {flavor.flavor}"]
        stated = (facts["rope_theta"], [facts["norm_eps"]])
        assert (said["rope_theta"], said["eps"]) == stated, flavor
        if said["router"] is not None:
            keys = ("scoring_func", "norm_topk_prob", "routed_scaling_factor")
            keys += ("n_group", "topk_group")
            stated = [facts.get(key) or 0 for key in keys]
            assert [value or 0 for value in said["router"]] == stated, flavor
        scaling: Any = facts["rope_scaling"]
        kind = scaling and scaling.rope_type
        assert said["scaling"] == {None: "none", "llama3": "llama", "yarn": "yarn"}[kind]
        rope = said["rope"]
        if said["scaling"] == "llama":
            assert list(rope_numbers(scaling)[1:]) == [rope[key] for key in LLAMA_ROPE]
        if said["scaling"] == "yarn":
            names = ("rope_factor", "original_seq_len", "beta_fast", "beta_slow")
            assert list(rope_numbers(scaling)[1:5]) == [rope[key] for key in names]
            assert scaling.truncate is rope["truncate"]
            assert flavor.module == "gpt_oss" or said["mscale"] == scaling.mscale_all_dim


# the list of the line that is installed
SAVE_LIST = """
import json
try:
    from torchtitan.models.deepseek_v3.infra.parallelize import _op_sac_save_list as listed
except ImportError:
    from torchtitan.distributed import activation_checkpoint as here
    listed = here._get_default_save_ops()
print(json.dumps([str(one) for one in listed]))
"""


def test_selective_op_saves_what_we_count(tmp_path: Path) -> None:
    listed: Any = run_python(SAVE_LIST, tmp_path)
    for name in ("_c10d_functional.all_to_all_single", "aten._scaled_dot_product_cudnn_attention"):
        assert f"{name}.default" in listed
    assert not any("_scaled_mm_v2" in one for one in listed)  # NVFP4's product
