"""Our orders against torch.distributed.pipelining's, and what it refuses our rules refuse."""

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from planner.schedules import SCHEDULES, to_csv
from tests.conftest import needed, one_fast
from tests.orders import from_csv
from tests.unit.test_replay_twin import NOT_PLAYED, RecordingStage

schedules = needed("torch.distributed.pipelining.schedules")
get_schedule_class = schedules.get_schedule_class
_PipelineScheduleRuntime = schedules._PipelineScheduleRuntime
pytestmark = pytest.mark.torch

MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
Named = tuple[tuple[str, ...], ...]
# torch builds one virtual stage, TorchTitan refuses it
FEW = [(1, 2, 3, 4, 8), (2, 3, 4), (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)]
LONG = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 20, 21, 24, 32, 33)
MANY = [(1, 2, 3, 4, 5, 7, 8), (2, 3, 4, 6), LONG]


def stage(index: int, num_stages: int, pp: int) -> Any:
    return SimpleNamespace(
        stage_index=index, num_stages=num_stages, group_size=pp, group_rank=0, submod=None,
        is_first=index == 0, is_last=index == num_stages - 1,
    )  # fmt: skip


def stages_of_first_rank(pp: int, v: int) -> list[Any]:
    return [stage(local * pp, pp * v, pp) for local in range(v)]


def torch_order(name: str, pp: int, v: int, m: int) -> Named:
    return named(get_schedule_class(name)(stages_of_first_rank(pp, v), m, loss_fn=no_loss))


def no_loss(*_: Any) -> None:
    """Never called."""


def named(built: Any) -> Named:
    """Idle slots left out; overlapped pairs stay pairs."""
    ranks = (order for _, order in sorted(built.pipeline_order.items()))
    return as_text([[action for action in order if action is not None] for order in ranks])


def as_text(order: Iterable[Iterable[object]]) -> Named:
    return tuple(tuple(str(action) for action in rank) for rank in order)


@pytest.mark.parametrize("sizes", one_fast(FEW, MANY), ids=["few", "many"])
@pytest.mark.parametrize("name", MULTI)
def test_multi_stage_orders_are_torchs(name: str, sizes: list[tuple[int, ...]]) -> None:
    ours, compared = SCHEDULES[name], 0
    for pp, v, m in itertools.product(*sizes):
        if ours.violation(pp, v, m):
            with pytest.raises((ValueError, AssertionError)):
                torch_order(name, pp, v, m)
            continue
        assert as_text(ours.actions(pp, v, m)) == torch_order(name, pp, v, m), (pp, v, m)
        compared += 1
    assert compared > (30 if sizes is MANY else 7)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_single_stage_orders_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = get_schedule_class(name)
    for part in NOT_PLAYED:
        monkeypatch.setattr(kind, part, lambda *_, **__: None, raising=False)
    for pp, m in itertools.product((1, 2, 4, 5), (1, 2, 4, 7)):
        stages = [RecordingStage(rank, pp, rank, lambda _: 0, []) for rank in range(pp)]
        for recorded in stages:
            recorded.group_size = pp
        if SCHEDULES[name].violation(pp, 1, m):
            with pytest.raises(ValueError, match="must be greater than"):
                kind(stages[0], m, loss_fn=no_loss)
            continue
        for recorded in stages:
            kind(recorded, m, loss_fn=no_loss)._step_microbatches()
        assert as_text(SCHEDULES[name].actions(pp, 1, m)) == as_text(one.log for one in stages)


@pytest.mark.parametrize(("name", "pp", "v", "m"), [
    (name, *sizes)
    for name in MULTI
    for sizes in [(4, 2, 8), (2, 2, 4), (3, 2, 12), (8, 2, 16), (4, 4, 8)]
    if not SCHEDULES[name].violation(*sizes)
])  # fmt: skip
def test_torch_loads_our_csv(name: str, pp: int, v: int, m: int, tmp_path: Any) -> None:
    """As `_PipelineScheduleRuntime` reads a user's file, to which torch adds sends and gathers."""
    order, path = SCHEDULES[name].actions(pp, v, m), tmp_path / "schedule.csv"
    path.write_text(to_csv(order))
    runtime = _PipelineScheduleRuntime(stages_of_first_rank(pp, v), m, loss_fn=no_loss)
    runtime._load_csv(str(path), format="compute_only")
    assert named(runtime) == as_text(order)
    ranks = {s: int(SCHEDULES[name].stage_rank(s, pp, v)) for s in range(pp * v)}
    assert runtime.stage_index_to_group_rank == ranks
    assert from_csv(path.read_text()) == order
    every = itertools.chain.from_iterable(runtime.pipeline_order_with_comms.values())
    computed = {str(action) for action in every if action.is_compute_op}
    assert computed == {str(item) for rank in order for item in rank}
