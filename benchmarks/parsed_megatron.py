"""Checks that a checkout of Megatron-LM takes what we export to its release.

    python benchmarks/parsed_megatron.py CHECKOUT --release 0.19 [--gpu h100-sxm-80gb]
        [--capability 9] [--layouts 1]

Exports a seeded sample of legal layouts of each catalogue model on 8, 64 and 512 GPUs, under every
kind of CUDA graphs, optimizer and overlap that the rules allow. CHECKOUT's own `parse_args`,
`validate_args`, `core_transformer_config_from_args` and `OptimizerConfig` then judge each, as
pretrain_gpt.py does before it builds a model; triton and Transformer Engine are stand-ins.
Prints what is refused and which arguments are called deprecated. Exits 1 if anything is refused.
Needs torch and what megatron/training imports: megatron-core's requirements (`make test-slow` puts
them into `megatron` in the environment), einops, regex, six.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import os
import sys
import types
import typing
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runnable import SIZES, Combination, reason, sample
from planner.catalog.models import model_names
from planner.export import export
from planner.export.base import Export
from planner.rules import Context
from planner.specs.model import ModelSpec

TRAININGS: tuple[dict[str, Any], ...] = (
    {}, {"cuda_graphs": "partial"}, {"cuda_graphs": "full"}, {"optimizer": "muon"},
    {"optimizer": "adamw-bf16-states"}, {"overlap": {"ep": True}},
    *({"moe_capacity_factor": 1.25, "cuda_graphs": kind} for kind in ("none", "partial", "full")),
)  # fmt: skip
TAKEN = "taken"
ENGINE, TRITON = "2.20", "3.4.0"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
MODULES = ("triton", "triton.language", "triton.runtime", "triton.testing")


class StandIn:
    """What a module that needs a GPU would hand out: callable, a decorator that changes nothing."""

    def __call__(self, *words: Any, **named: Any) -> Any:
        return words[0] if len(words) == 1 and callable(words[0]) and not named else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class StandInModule(types.ModuleType):
    """A module that is not installed here."""

    __path__: typing.ClassVar[list[str]] = []
    __version__ = TRITON

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class FusedAdam:
    """Transformer Engine's, of which Megatron-LM reads the arguments."""

    def __init__(
        self, params: Any, *, use_decoupled_grad: bool = False, master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None,
    ) -> None: ...  # fmt: skip


def prepare(checkout: Path, capability: int) -> Any:
    """CHECKOUT's module of arguments, on a GPU of this compute capability that is not there."""
    import torch
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_compat  # reads the real triton before the stand-in
    from packaging.version import Version

    typing.override = lambda method: method  # of Python 3.12, which 0.18 asks for
    for name in MODULES:
        sys.modules[name] = StandInModule(name)
    gpu = types.SimpleNamespace(
        major=capability, minor=0, name="", total_memory=80 << 30, multi_processor_count=132
    )
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.get_device_capability = lambda *_: (capability, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    sys.path.insert(0, str(checkout))
    for name in [one for one in sys.modules if one.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    importlib.import_module("megatron.core.utils")._te_version = Version(ENGINE)
    arguments = importlib.import_module("megatron.training.arguments")
    config = importlib.import_module("megatron.core.transformer.transformer_config")
    config._validate_dsa_kernel_backend_dependencies = lambda *_: (
        None
    )  # flash_mla, cuDNN's frontend
    rope = importlib.import_module(ROPE)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        setattr(rope, name, lambda *_, **__: None)
    for name in ("", ".pytorch", ".pytorch.optimizers"):
        sys.modules[f"transformer_engine{name}"] = StandInModule(name)
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    return arguments


def judge(arguments: Any, words: Sequence[str], ranks: int) -> tuple[str, list[str]]:
    """(what the checkout refuses, empty where it takes them; what it calls deprecated)."""
    os.environ |= {
        "WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"
    }  # fmt: skip
    sys.argv = ["pretrain_gpt.py", *words]
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            parsed = arguments.parse_args()
            parsed = arguments.validate_args(parsed, {}) or parsed
            arguments.core_transformer_config_from_args(parsed)
            optimizer = importlib.import_module("megatron.core.optimizer.optimizer_config")
            known = {one.name for one in dataclasses.fields(optimizer.OptimizerConfig)}
            given = {name: value for name, value in vars(parsed).items() if name in known}
            optimizer.OptimizerConfig(**given)  # training.py get_megatron_optimizer_config
        except (Exception, SystemExit) as error:  # whatever Megatron raises is its refusal
            said = printed.getvalue()[-200:] if isinstance(error, SystemExit) else error
            return f"{type(error).__name__}: {said}", []
    texts = [str(one.message) for one in caught]
    texts += [line for line in printed.getvalue().splitlines() if "...." not in line]  # its table
    return "", [text for text in texts if "deprecated" in text.lower()]


def exported(
    trainer: str, release: str, gpu: str, layouts: int, seed: int = 0
) -> Iterator[tuple[ModelSpec, str, Export, int]]:
    """(model, name, export, ranks) of legal layouts of every model that the release can train."""
    for model in model_names():
        for num_gpus in SIZES:
            one = Combination(model, gpu, trainer, release, num_gpus)
            context = one.context()
            if reason(context) is not None:
                continue
            for place, more in enumerate(TRAININGS):
                training = type(context.training).model_validate(
                    {**context.training.model_dump(exclude_unset=True), **more}
                )
                job = Context(model=context.model, cluster=context.cluster, training=training)
                if reason(job) is not None:
                    continue
                for layout in sample(job, layouts, one.seed() + seed + place):
                    made = export(layout, job.model, job.cluster, training, to=trainer)
                    yield job.model, f"{model} x{num_gpus} {more} {layout.short()}", made, num_gpus


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--release", required=True)
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--capability", type=int, default=9, help="10 for Blackwell")
    parser.add_argument("--layouts", type=int, default=1)
    asked = parser.parse_args()
    arguments = prepare(asked.checkout, asked.capability)
    said = []
    for _, name, made, ranks in exported("megatron", asked.release, asked.gpu, asked.layouts):
        refusal, deprecated = judge(arguments, made.arguments, ranks)
        said += [(one, name) for one in (refusal or TAKEN, *deprecated)]
    return report(said)


def report(said: Sequence[tuple[str, str]]) -> int:
    """Prints (verdict, name of an export) pairs by verdict; 1 if anything else is among them."""
    first = {verdict: name for verdict, name in reversed(said)}
    counts = Counter(verdict for verdict, _ in said)
    for verdict, count in counts.most_common():
        print(f"{count:>5}  {verdict[:300]}  ({first[verdict]})")
    return int(counts.keys() != {TAKEN})


if __name__ == "__main__":
    sys.exit(main())
