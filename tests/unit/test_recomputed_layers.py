"""How many layers of a stage block-N and uniform-N recompute, and what a memory budget saves."""

from itertools import pairwise

import numpy as np
import pytest

from planner import estimate
from planner.columns import LayoutBatch
from planner.cost.pipeline.stages import block_layers, stage_units
from planner.cost.price import Pricer
from planner.intake.jobs import read_job, resolve_layout
from planner.specs.estimate import Estimate
from planner.work.checkpointing import saved_by_budget
from tests.conftest import job_values

JOB = job_values("llama3-70b", "h100-sxm-80gb", 64, 8192, 128, trainer="megatron")
LAYOUT = {"tp": 4, "pp": 4}
PER_STAGE = 20


def of(ac: str, **more: object) -> Estimate:
    found = estimate(**JOB, layout={**LAYOUT, "ac": ac, **more})  # type: ignore[arg-type]
    assert found.valid, found.violations
    return found


def pricer() -> tuple[Pricer, dict[str, object]]:
    job = read_job(JOB)
    return Pricer.build(job.model, job.cluster, job.training), LAYOUT


def batch_of(modes: list[str]) -> LayoutBatch:
    return LayoutBatch.from_layouts(
        [resolve_layout({**LAYOUT, "ac": mode}, trainer="megatron", num_gpus=64) for mode in modes]
    )


def _redone(found: Estimate) -> tuple[float, float]:
    """Recomputed seconds, and recomputed flops over required ones."""
    done, required = ((one.hfu or 0.0) * (one.step_seconds or 0.0) for one in (found, of("none")))
    return found.time.recompute_seconds, done / required - 1.0


def _peak(ac: str, **more: object) -> float:
    peak = of(ac, **more).peak_allocated_bytes
    assert peak is not None
    return peak


@pytest.mark.parametrize("count", [1, 7, 19])
def test_recomputation_takes_its_share_of_what_full_takes(count: int) -> None:
    none, full, some = (_redone(of(ac)) for ac in ("none", "full", f"block-{count}"))
    assert none == (0.0, 0.0)
    assert some == pytest.approx([share * count / PER_STAGE for share in full], rel=1e-6)


def test_each_layer_recomputed_frees_what_it_saved() -> None:
    peaks = [_peak(f"block-{count}") for count in range(2, PER_STAGE)]
    freed = [before - after for before, after in pairwise(peaks)]
    assert max(freed) == pytest.approx(min(freed), rel=0.15), "but for the layers at the ends"
    assert _peak("none") > peaks[0]
    assert peaks[-1] > _peak("full")


def test_a_batch_prices_each_layout_as_alone() -> None:
    job, _ = pricer()
    modes = ["none", "block-3", "full", "block-12", "selective-attention", "uniform-5"]
    together = job.price(batch_of(modes))
    for row, mode in enumerate(modes):
        alone = job.price(batch_of([mode]))
        assert together.step_seconds[row] == alone.step_seconds[0], mode
        assert together.peak_allocated_bytes[row] == alone.peak_allocated_bytes[0], mode


def test_lower_bounds_hold() -> None:
    job, _ = pricer()
    batch = batch_of([f"block-{count}" for count in (1, 10, 19)])
    prices = job.price(batch)
    seconds, device = job.lower_bounds(batch)
    assert (seconds <= prices.step_seconds).all()
    assert (device <= prices.device_bytes).all()
    assert (job.layout_lower_bounds(batch) <= prices.step_seconds).all()


def test_uneven_stages_recompute_their_own_first_layers() -> None:
    model = read_job(JOB).model
    units = stage_units((19, 21, 21, 19), model, 5)
    assert units.shape == (4, 4)
    assert units[:, 0].tolist() == [14, 16, 16, 14]
    assert units[:, 1].tolist() == [5, 5, 5, 5]
    split = of("block-5", layers_per_stage=[19, 21, 21, 19])
    assert _redone(split) > (0.0, 0.0)
    assert block_layers(batch_of(["none", "full"])) is None


def test_uniform_saves_one_input_for_several_layers() -> None:
    assert _redone(of("uniform-2")) == _redone(of("full"))
    layer_input = 8192 * 8192 * 2 / 4  # tokens x hidden x 2 bytes over TP
    in_flight = 4  # of 1F1B's first stage
    tensors = (_peak("block-1") - _peak("block-2")) / in_flight + layer_input
    for count in (2, 5):
        fewer_inputs = in_flight * PER_STAGE * (1 - 1 / count) * layer_input
        freed = _peak("full") - _peak(f"uniform-{count}")
        assert freed == pytest.approx(fewer_inputs - (count - 1) * tensors, rel=0.01)


@pytest.mark.parametrize(("ac", "legal"), [("block-20", False), ("block-19", True)])
@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_it_counts_layers_of_a_stage_and_is_megatrons(ac: str, legal: bool, trainer: str) -> None:
    training = {**JOB["training"], "trainer": trainer}  # type: ignore[dict-item]
    found = estimate(**{**JOB, "training": training}, layout={**LAYOUT, "ac": ac})  # type: ignore
    rules = [violation.rule for violation in found.violations if violation.field == "ac"]
    assert found.valid == (legal and trainer == "megatron")
    if trainer == "torchtitan":
        assert any("has no activation checkpointing block" in rule for rule in rules)
    elif not legal:
        assert rules == ["block-20 is as many layers as a stage has, or more"]


def test_a_budget_saves_the_dearest_first_and_a_share_of_the_last() -> None:
    """Of 10 and 20 bytes, 20 bytes of room hold the first and half of the second."""
    sizes, again = np.array([[10.0], [20.0]]), np.array([[[3.0]], [[8.0]]])
    found = saved_by_budget(sizes, again, np.array([0.0]), np.array([20.0]))
    assert found.tolist() == [[3.0 + 8.0 / 2]]
