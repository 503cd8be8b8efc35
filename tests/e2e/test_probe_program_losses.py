"""Every layout trains the same model: losses and gradient norms of steps are those of one process.

Real torchrun, gloo, 1, 2 and 4 processes; all layouts share one job. Later losses hold only if
gradients and updates do. What is not here is among the pairs of test_feature_pairs.py.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, clean_environment, compiles, needed, needed_compiler
from tests.e2e.probe_jobs import task, torchrun

needed("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
LOSS, NORM = 1e-6, 1e-5  # relative, fp32: sums are taken in another order
V2 = {"virtual_stages": 2}
Case = tuple[dict[str, Any], dict[str, Any]]  # layout, (model, training)


def on(model: str = "llama", **training: Any) -> dict[str, Any]:
    return {"model": model, "training": training}


CASES: dict[str, Case] = {
    "unfused-attention": ({}, on(attention_kernel="unfused")),
    "compile-memory-budget": ({"compile": True, "ac": "memory-budget-0.5"}, on("wide-norms")),
    "fsdp-adafactor": ({"dp_shard": 2}, on(optimizer="adafactor")),
    "fsdp-sgd": ({"dp_shard": 2}, on(optimizer="sgd")),
    "fsdp-bf16-states": ({"dp_shard": 2}, on(optimizer="adamw-bf16-states")),
    "tp-sp-vocab-parallel": ({"tp": 2, "ac": "selective-op"}, on(vocab_parallel_loss=True)),
    "tp-compile": ({"tp": 2, "compile": True}, on("wide-norms")),
    "pp-uneven": ({"pp": 2, "layers_per_stage": [1, 3]}, on()),
    "experts-over-tp": ({"tp": 2}, on("moe")), "pp-tied": ({"pp": 2}, on("tied")),
    "pp-tied-on-one-rank": ({"pp": 2, "pp_schedule": "ZBVZeroBubble", **V2}, on("tied")),
    "tp-tied": ({"tp": 2}, on("tied")), "tp-mla": ({"tp": 2, "ep": 2}, on("mla")),
    "cp-mla": ({"cp": 2}, on("mla")), "tp-windows": ({"tp": 2}, on("windows")),
    "cp-windows": ({"cp": 2}, on("windows")), "cp-sinks": ({"cp": 2}, on("sinks")),
    "ep-sinks": ({"tp": 2, "ep": 2}, on("sinks")),
    "tp-wide-norms": ({"tp": 2}, on("wide-norms")),
    "tp-parallel-residual": ({"tp": 2}, on("parallel")),
    "tp-gated-shared-expert": ({"tp": 2, "sequence_parallel": False}, on("gated-shared")),
    "fsdp-4": ({"dp_shard": 4}, on()),
    "pp-4": ({"pp": 4}, on()),
    "fsdp-ep": ({"dp_shard": 4, "ep": 2}, on("moe")),
    "cp-ep": ({"dp_shard": 2, "cp": 2, "ep": 4}, on("moe")),
    "ep-over-tp": ({"dp_shard": 2, "tp": 2, "ep": 4}, on("moe")),
    "ep-etp-without-sp": ({"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2,
            "sequence_parallel": False}, on("moe")),
    "ep-without-sp": ({"dp_shard": 2, "tp": 2, "ep": 2, "sequence_parallel": False}, on("moe")),
    "other-rank-order": ({"dp_shard": 2, "tp": 2},
        {**on(), "rank_order": ["dp_shard", "tp", "cp", "dp_replicate", "pp"]}),
}  # fmt: skip


def run(tasks: Mapping[str, Any], folder: Path, *options: str) -> dict[str, Any]:
    """One torchrun job; each task's losses and norms by name."""
    given, out = folder / "tasks.json", folder / "out.json"
    given.write_text(json.dumps(tasks))
    world = max(one["job"]["cluster"]["num_gpus"] for one in tasks.values())
    program = (ROOT / "tests" / "e2e" / "probe_combinations.py", given, out, *options)
    for _ in range(2):  # a thread of gloo's own has crashed, once in some hundred jobs
        done = torchrun(world, *program, env=clean_environment(), seconds=1500.0)
        if out.exists() or "exitcode: -11" not in done.stderr:
            break
    assert out.exists(), done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


def trained(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = results.get(name, {"error": "an earlier one broke the job"})
    assert "error" not in found, found["error"]
    return found


def case_task(case: Case) -> dict[str, Any]:
    layout, options = case
    model, training = options["model"], options["training"]
    world = math.prod(layout.get(axis, 1) for axis in ("dp_shard", "tp", "cp", "pp"))
    made = task({"dp_shard": 1, **layout}, num_gpus=world, model=model, training=training)
    if "rank_order" in options:
        made["job"]["cluster"]["rank_order"] = options["rank_order"]
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results by name; one rank also runs every model and training in use in the plainest way."""
    tasks = {name: case_task(case) for name, case in CASES.items() if can_run(case)}
    plain = {reference(one): on(one["model"], **one["training"]) for _, one in CASES.values()}
    tasks |= {name: case_task(({}, options)) for name, options in plain.items()}
    return run(tasks, tmp_path_factory.mktemp("losses"))


def can_run(case: Case) -> bool:
    return "compile" not in case[0] or compiles()


def reference(options: Mapping[str, Any]) -> str:
    """Name of the plain run that a case is compared with."""
    return f"alone {json.dumps([options['model'], options['training']])}"


@pytest.mark.parametrize("name", CASES)
def test_loss_does_not_depend_on_the_layout(name: str, runs: Mapping[str, Any]) -> None:
    if not can_run(CASES[name]):
        needed_compiler()
    found, alone = trained(runs, name), runs[reference(CASES[name][1])]
    assert found["losses"] == pytest.approx(alone["losses"], rel=LOSS)
    assert found["norms"] == pytest.approx(alone["norms"], rel=NORM)
    assert len(set(alone["losses"])) == len(alone["losses"])
