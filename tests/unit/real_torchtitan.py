"""The installed TorchTitan: which it is, and programs that it runs in a process of its own.

`make test` puts it into the folder `titan` of the environment (titan-requirements.txt);
TORCHTITAN_PATH names another folder. A missing one skips what needs it on a developer's machine and
fails in CI (environment variable CI).
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

from planner.export.base import Export
from planner.specs.model import ModelSpec
from tests.conftest import IN_CI

FOLDER = os.environ.get("TORCHTITAN_PATH", str(Path(sys.prefix) / "titan"))
_FOUND = next(iter(distributions(name="torchtitan", path=[FOLDER, *sys.path])), None)
INSTALLED = "" if _FOUND is None else _FOUND.version
LINE = INSTALLED.rpartition(".")[0]
MISSING = f"needs torchtitan 0.2.x or 0.3.x, found {INSTALLED or 'none'}"
needs_torchtitan = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(LINE not in ("0.2", "0.3") and not IN_CI, reason=MISSING),
]
ABOUT_03 = "about torchtitan 0.3.x, under which test_real_torchtitan_03.py runs it"
only_02 = pytest.mark.skipif(LINE == "0.3", reason="about torchtitan 0.2.x")
only_03 = pytest.mark.skipif(LINE != "0.3", reason=ABOUT_03)
# Imports what takes long once (argv), then runs every program that stdin names in a fork.
_FORKS = """
import importlib, json, os, signal, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    code, folder, arguments, printed, errors = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(600)
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv[1:] = arguments
        for number, name in ((1, printed), (2, errors)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)  # to tear torch down takes seconds
    print(os.waitpid(child, 0)[1], flush=True)
"""


@cache
def _forks() -> "subprocess.Popen[str]":
    """One process with TorchTitan imported, for all programs of this worker."""
    own = ("models", "trainer") if LINE == "0.3" else ("protocols.train_spec",)
    heavy = [f"torchtitan.{name}" for name in ("config", "components.quantization.float8", *own)]
    # no GPU is wanted: what is read here is what every rank reads before it looks for one
    search = os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")])
    started = subprocess.Popen(
        [sys.executable, "-c", _FORKS, *heavy],
        env={**os.environ, "PYTHONPATH": search},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def run_python(code: str, folder: Path, *arguments: str) -> object:
    """The JSON that the last line of a program prints, run where torchtitan's own trainer would."""
    assert LINE in ("0.2", "0.3"), MISSING
    process, printed, errors = _forks(), folder / "printed.txt", folder / "errors.txt"
    asked = [code, str(folder), arguments, str(printed), str(errors)]
    print(json.dumps(asked), file=process.stdin, flush=True)
    assert process.stdout.readline() == "0\n", errors.read_text(encoding="utf-8")[-3000:]
    return json.loads(printed.read_text(encoding="utf-8").strip().splitlines()[-1])


def written(exported: Export, folder: Path) -> Export:
    """The same export, after its files are written into the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in exported.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return exported


def counts_of(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of its model by ours: it ties embeddings after it has built both, and what
    corrects a router is counted with the weights only when published.
    """
    own = spec.total_parameters()
    own -= spec.num_moe_layers * spec.num_experts * spec.router_correction_bias
    return own, own + spec.tie_word_embeddings * spec.parameters.embedding()


# argv[1]: a JSON list of [name, folder, arguments]. Prints name -> what the real package made of
# the export.
_EACH = """
import dataclasses, importlib, json, os, sys, types
import torch
from torchtitan.config import ConfigManager
DIMS = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_inter_dim", "n_dense_layers")
ROUTER = ("num_experts", "top_k", "score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
answers = {}
for name, folder, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.path.insert(0, folder)
    for own in ("planner_model", "planner_job"):
        sys.modules.pop(own, None)
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(arguments)
    answers[name] = look(config)
    sys.path.remove(folder)
print(json.dumps(answers, default=str))
"""  # noqa: E501
_LOOK_02 = """
def frequencies(spec, args):
    args = dataclasses.replace(args, max_seq_len=8192)
    module = sys.modules[spec.model_cls.__mro__[0].__module__]
    if hasattr(args, "rope_factor") and hasattr(args, "qk_rope_head_dim"):
        return torch.angle(module.precompute_freqs_cis(args)[1]).tolist()
    for method in ("_precompute_freqs_cis", "_precompute_rope_cache"):
        if hasattr(spec.model_cls, method):
            cache = getattr(spec.model_cls, method)(types.SimpleNamespace(model_args=args))[1]
            if cache.is_complex():
                return torch.angle(cache).tolist()
            cosine, _, sine, _ = cache.chunk(4)
            return torch.atan2(sine, cosine).tolist()

def look(config):
    from torchtitan.protocols import train_spec
    train_spec._extra_train_specs.pop("planner_model", None)
    if config.experimental.custom_import:
        importlib.import_module(config.experimental.custom_import)
    spec = train_spec.get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    rope = frequencies(spec, args)
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    said = {key: getattr(args, key) for key in DIMS if hasattr(args, key)}
    moe = getattr(args, "moe_args", None)
    return {
        **said,
        "module": config.model.name,
        "rope_theta": args.rope_theta,
        "rope": rope,
        "eps": list({m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)}),
        "router": None if moe is None else {key: getattr(moe, key, None) for key in (*ROUTER, "score_before_experts")},
        "parameters": sum({id(p): p.numel() for p in model.parameters()}.values()),
        "layers": args.n_layers,
        "mscale": getattr(args, "mscale", None),
    }
"""  # noqa: E501
_LOOK_03 = """
def look(config):
    from torchtitan.models.common.rope import RoPE
    from torchtitan.models.common.moe import TokenChoiceTopKRouter
    spec = config.model_spec.model
    ropes = [found for _, found, _, _ in spec.traverse(RoPE.Config)]
    routers = [found for _, found, _, _ in spec.traverse(TokenChoiceTopKRouter.Config)]
    rope = dataclasses.replace(ropes[0], max_seq_len=8192).build()
    cache = rope._precompute_cache()[1]
    if not cache.is_complex():
        cosine, _, sine, _ = cache.chunk(4)
    with torch.device("meta"):
        model = spec.build()
    attention = spec.layers[0].attention
    return {
        "dim": spec.dim,
        "vocab_size": spec.vocab_size,
        "n_heads": attention.n_heads,
        "module": config.model_spec.name,
        "rope_theta": ropes[0].theta,
        "rope": torch.angle(cache).tolist() if cache.is_complex() else torch.atan2(sine, cosine).tolist(),
        "eps": list({m.eps for m in model.modules() if isinstance(m, torch.nn.RMSNorm)}),
        "router": {key: getattr(routers[0], key) for key in ROUTER} if routers else None,
        "parameters": sum({id(p): p.numel() for p in model.parameters()}.values()),
        "layers": len(spec.layers),
        "mscale": getattr(attention, "mscale", None),
    }
"""  # noqa: E501
LOOK_AT_ALL = (_LOOK_03 if LINE == "0.3" else _LOOK_02) + _EACH
