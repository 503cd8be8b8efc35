"""torchao's float8 trains in the reference program on two gloo ranks, with casts as on an H100 and
products in the casts' values.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.conftest import needed
from tests.e2e.probe_jobs import MODELS, task
from tests.e2e.test_feature_pairs import BACKEND
from tests.e2e.test_probe_program_losses import run

needed("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
GATHER = {"precision": "float8-tensorwise", "float8_all_gather": True}
RUNS: Mapping[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"precision": "float8-tensorwise"},
    "tensorwise, gathered": GATHER,
    "rowwise": {"precision": "float8-rowwise"},
    "tensorwise, gathered, compiled": {**GATHER, "compile": True},
}


def float8_task(layout: Mapping[str, Any]) -> dict[str, Any]:
    model = {**MODELS["llama"], "num_hidden_layers": 2}
    dtypes = {"param_dtype": "bfloat16", "ac": "none", "compile": False, "dp_shard": 2}
    made = task({**dtypes, **layout}, num_gpus=2, model=model, training={"trainer": "torchtitan"})
    made["job"]["cluster"]["gpu"] = "h100-sxm-80gb"
    return made


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[float]]:
    """Of each run, all in one torchrun job."""
    needed("torchao")
    tasks = {name: float8_task(layout) for name, layout in RUNS.items()}
    found = run(tasks, tmp_path_factory.mktemp("float8"), BACKEND)
    assert [one["error"] for one in found.values() if "error" in one] == []
    return {name: found[name]["losses"] for name in RUNS}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16"])
def test_it_trains_as_bf16_but_for_rounding(losses: Mapping[str, list[float]], name: str) -> None:
    assert losses[name] == pytest.approx(losses["bf16"], rel=0.01)
    assert losses[name] != losses["bf16"], "nothing was quantised"


def test_compiled_casts_are_the_eager_ones(losses: Mapping[str, list[float]]) -> None:
    eager, compiled = losses["tensorwise, gathered"], losses["tensorwise, gathered, compiled"]
    assert compiled == pytest.approx(eager, rel=1e-3)
