"""Our table of TorchTitan's defaults, and an edited file, against the installed package."""

import json
import math
from pathlib import Path
from typing import Any

from current_cases import EXAMPLES, exported
from export_cases import layout
from real_torchtitan import LINE, needs_torchtitan, only_02, only_03, run_python

from planner.intake.current import read
from planner.intake.trainer_files.edit_toml import edit_toml
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.titan_registry import read_registry
from planner.specs.job import CurrentSpec
from planner.trainers.titan_settings import DEFAULTS, KEYS, configs_03, unknown

pytestmark = needs_torchtitan
FLAT = """
import dataclasses, json, sys
def flat(value, prefix=""):
    if not dataclasses.is_dataclass(value):
        return {prefix[:-1]: value}
    found = {}
    for f in dataclasses.fields(value):
        if f.name != "model_spec":
            found.update(flat(getattr(value, f.name), f"{prefix}{f.name}."))
    return found
"""


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs)
    return ours == theirs


@only_02
def test_defaults_of_0_2(tmp_path: Path) -> None:
    shown = "print(json.dumps(flat(JobConfig()), default=str))"
    code = f"{FLAT}from torchtitan.config import JobConfig\n{shown}"
    stated: Any = run_python(code, tmp_path)
    found = {key: stated.get(key) for key in DEFAULTS["0.2"]}
    assert {key: one for key, one in found.items() if not same(DEFAULTS["0.2"][key], one)} == {}


@only_03
def test_defaults_and_configs_of_0_3(tmp_path: Path) -> None:
    code = FLAT + (
        "from torchtitan.config import ConfigManager\nfrom torchtitan.trainer import Trainer\n"
        "answers = {'': flat(Trainer.Config())}\n"
        "for name, module in json.loads(sys.argv[1]).items():\n"
        "    try:\n"
        "        config, _ = ConfigManager()._load_config(['--module', module, '--config', name])\n"
        "    except (ImportError, ValueError):  # its precision needs a torchao or a GPU\n"
        "        continue\n"
        "    kind = type(config.activation_checkpoint).__qualname__.partition('AC')[0]\n"
        "    answers[name] = {**flat(config), 'kind': kind, 'flavor': config.model_spec.flavor}\n"
        "print(json.dumps(answers, default=str))"
    )
    names = {name: config.module for name, config in configs_03().items()}
    stated: Any = run_python(code, tmp_path, json.dumps(names))
    # a class of its own; of each group of parameters
    elsewhere = ("activation_checkpoint.", "optimizer.name")
    base = {key: value for key, value in DEFAULTS["0.3"].items() if not key.startswith(elsewhere)}
    found = {key: stated[""].get(key) for key in base}
    assert {key: one for key, one in found.items() if not same(base[key], one)} == {}
    kinds = {"selective": "Selective", "full": "Full"}
    for name, (_, flavor, _, sets, _) in configs_03().items():
        own = {key: value for key, value in sets.items() if not key.startswith(elsewhere)}
        wanted = {**base, **own}
        found = stated.get(name)
        if found is None:
            assert configs_03()[name].precision != "bf16"
            continue
        other = {key: one for key, one in wanted.items() if not same(one, found.get(key))}
        assert other == {}, name
        kind = kinds[str(sets["activation_checkpoint.mode"])]
        assert (found["kind"], found["flavor"]) == (kind, flavor), name


@only_02
def test_an_edited_file_is_read_as_it_was_meant(tmp_path: Path) -> None:
    text = (EXAMPLES / "train.toml").read_text(encoding="utf-8")
    values = {
        "tp": 2, "pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4,
        "ac": "memory-budget-0.4", "compile": True,
    }  # fmt: skip
    float8 = {"precision": "float8-tensorwise", "float8_all_gather": True, "async_tp": True}
    winner = layout(64, **values, **float8)
    made = exported(winner, "llama3-8b", "torchtitan", "0.2.2", 64)
    changes, _ = titan_changes(read(CurrentSpec(name="train.toml", text=text)), winner, made)
    (tmp_path / "train.toml").write_text(edit_toml(text, changes), encoding="utf-8")
    code = FLAT + (
        "from torchtitan.config import ConfigManager\n"
        "config = ConfigManager().parse_args(['--job.config_file', 'train.toml'])\n"
        "print(json.dumps(flat(config), default=str))"
    )
    parsed: Any = run_python(code, tmp_path)
    for key, value in changes.items():
        assert same(value, parsed[key]) or (value is None and parsed[key] is None), key
    assert parsed["metrics.enable_tensorboard"], "what we do not know stays"
    assert LINE == "0.2"


@only_02
def test_its_settings_are_the_ones_we_know(tmp_path: Path) -> None:
    shown = "print(json.dumps(list(flat(JobConfig()))))"
    code = f"{FLAT}from torchtitan.config import JobConfig\n{shown}"
    theirs: Any = run_python(code, tmp_path)
    assert set(theirs) - KEYS["0.2"] == set()
    gone = {"parallelism.enable_compiled_autograd", "training.debug_moe_force_load_balance",
            "training.deterministic", "training.seed"}  # fmt: skip
    assert KEYS["0.2"] - set(theirs) == gone, "which 0.2.0 and 0.2.1 have"


@only_02
def test_it_refuses_what_we_refuse(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[training]\nbatchsize = 4\n", encoding="utf-8")
    code = (
        "import json\nfrom torchtitan.config import ConfigManager\nsaid = []\n"
        "for words in (['--job.config_file', 'bad.toml'], ['--training.batchsize=4']):\n"
        "    try:\n        ConfigManager().parse_args(words)\n        said.append('')\n"
        "    except BaseException as error:\n        said.append(type(error).__name__)\n"
        "print(json.dumps(said))"
    )
    assert run_python(code, tmp_path) == ["ValueError", "SystemExit"]


@only_03
def test_its_settings_and_registries_are_read(tmp_path: Path) -> None:
    code = FLAT + (
        "from torchtitan.trainer import Trainer\nimport pathlib, torchtitan\n"
        "root = pathlib.Path(torchtitan.__file__).parent / 'models'\n"
        "files = {m: root / m / 'config_registry.py' for m in json.loads(sys.argv[1])}\n"
        "texts = {m: file.read_text() for m, file in files.items()}\n"
        "print(json.dumps({'keys': list(flat(Trainer.Config())), 'texts': texts}))"
    )
    modules = sorted({config.module for config in configs_03().values()})
    theirs: Any = run_python(code, tmp_path, json.dumps(modules))
    assert unknown(theirs["keys"], "0.3") == []
    for name, (module, _, _, sets, _) in configs_03().items():
        ours = {**DEFAULTS["0.3"], **read_registry(theirs["texts"][module], name)}
        assert {key: ours.get(key) for key in sets} == dict(sets), name
