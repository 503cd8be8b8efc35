"""Orders lowered and laid out in levels: columns against actions one by one, many against one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.pipeline.lowering import Graph, lower
from planner.cost.pipeline.order_parts import RankColumns
from planner.cost.pipeline.simulate import KEPT, simulate
from planner.cost.pipeline.torch_rounds import ACTIVE_STAGES, entries_before, rounds
from planner.cost.pipeline.waves import waves
from planner.schedules import SCHEDULES, Action, Schedule, leaves
from planner.schedules.actions import ActionColumns, as_columns
from planner.trainers import transports
from planner.trainers.transports import IDEAL, Transport
from tests.pricing import stage_costs

SHAPES = [(2, 1, 5), (4, 1, 9), (2, 2, 4), (3, 3, 6), (4, 2, 8), (2, 5, 6), (4, 4, 4)]
LEGAL = [
    (entry, shape)
    for entry, shape in itertools.product(SCHEDULES.values(), SHAPES)
    if entry.violation(*shape) is None
]
TRANSPORTS = {
    (row.transport.receive, row.transport.waits, row.transport.stream): row.transport
    for row in (*transports.TORCH_ROWS, *transports.MEGATRON_ROWS)
} | {("free", "none", "link"): IDEAL}


@pytest.mark.parametrize(("entry", "shape"), LEGAL, ids=lambda x: getattr(x, "name", str(x)))
def test_columns_are_the_actions(entry: Schedule, shape: tuple[int, int, int]) -> None:
    for order, columns in zip(entry.actions(*shape), entry.columns(*shape), strict=True):
        again = ActionColumns.of(order)
        assert again.items() == order == columns.items()
        for name in ("stage_A", "kind_A", "microbatch_A"):
            assert np.array_equal(getattr(again, name), getattr(columns, name))
        joined = [one.joined_A for one in (again, columns)]
        pairs = [np.flatnonzero([] if one is None else one).tolist() for one in joined]
        assert pairs[0] == pairs[1]


def test_an_empty_rank_has_empty_columns() -> None:
    assert ActionColumns.of(()).items() == ()
    assert as_columns([(Action(0, "F", 0),)])[0].items() == (Action(0, "F", 0),)


def test_pipelines_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT.clear()
    calls: list[RankColumns] = []

    def counted(order: RankColumns, transport: Transport) -> Graph:
        calls.append(order)
        return lower(order, transport)

    monkeypatch.setattr("planner.cost.pipeline.simulate.lower", counted)
    for _ in range(2):
        for name, shape in (("1F1B", (4, 1, 9)), ("1F1B", (8, 1, 700)), ("DualPipeV", (8, 2, 480))):
            ones = np.ones((1, shape[0] * shape[1]))
            simulate(SCHEDULES[name], shape, stage_costs(ones, ones, ones, 0.1 * ones, ones))
        assert len(calls) == 5


@given(st.data())
def test_a_node_is_in_the_wave_of_its_longest_chain(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    names = data.draw(st.permutations(range(count)))
    needs_DN = np.full((3, count), -1)
    depth = [0] * count
    for place, node in enumerate(names):
        for slot in range(3):
            before = data.draw(st.integers(-1, place - 1))
            if before >= 0:
                needs_DN[slot, node] = names[before]
                depth[node] = max(depth[node], depth[names[before]] + 1)
    found = list(waves(needs_DN))
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    for wave, nodes in enumerate(found):
        assert all(depth[node] == wave for node in nodes.tolist())


def test_a_circle_has_no_waves() -> None:
    with pytest.raises(ValueError, match="deadlocks"):
        list(waves(np.array([[-1, 2, 1]])))


def plain_entries(order: tuple[Action, ...]) -> list[int]:
    """What `_add_unshard_reshard` and `_add_reduce_grad` put before each action of a rank."""
    gathered: set[int] = set()
    entries = []
    last = {action.stage: place for place, action in enumerate(order)}
    for place in range(len(order)):
        coming = list(dict.fromkeys(action.stage for action in order[place:]))[:ACTIVE_STAGES]
        entries.append(len(gathered ^ set(coming)) + (place - 1 in last.values()))
        gathered = set(coming)
    return entries


@settings(max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1), min_size=1))
def test_entries_before_each_action(drawn: list[list[tuple[int, int]]]) -> None:
    ranks = [
        tuple(Action(stage + 6 * rank, "F", microbatch) for stage, microbatch in order)
        for rank, order in enumerate(drawn)
    ]
    rank_A = np.repeat(np.arange(len(ranks)), [len(order) for order in ranks])
    stage = np.array([action.stage for order in ranks for action in order])
    found = entries_before(rank_A, np.arange(len(rank_A)), stage)
    assert found.tolist() == [count for order in ranks for count in plain_entries(order)]


@pytest.mark.parametrize(("entry", "shape"), LEGAL, ids=lambda x: getattr(x, "name", str(x)))
def test_rounds_go_from_rank_to_rank(entry: Schedule, shape: tuple[int, int, int]) -> None:
    """Torch's pass played out: each round every rank in turn takes its next action if it may."""
    order, last = entry.actions(*shape), shape[0] * shape[1] - 1
    items = [item for rank in order for item in rank]
    rank_A = np.repeat(np.arange(len(order)), [len(rank) for rank in order])
    parts = [[one for one in leaves((item,)) if one.kind != "W"] for item in items]
    made = {
        (action.stage, action.kind == "F", action.microbatch): place
        for place, actions in enumerate(parts)
        for action in actions
    }
    inputs = [
        [
            made[source, action.kind == "F", action.microbatch]
            for action in actions
            if 0 <= (source := action.stage + (-1 if action.kind == "F" else 1)) <= last
        ]
        for actions in parts
    ]
    entries = np.arange(len(items)) % 3
    played = [-1] * len(items)
    nexts = [int(np.searchsorted(rank_A, rank)) for rank in range(len(order))]
    spent, turn = [0] * len(order), 0
    while -1 in played:
        for rank, place in enumerate(nexts):
            if place == len(items) or rank_A[place] != rank:
                continue
            if spent[rank] < entries[place]:
                spent[rank] += 1
            elif all(played[source] >= 0 for source in inputs[place]):
                played[place], spent[rank] = turn, 0
                nexts[rank] += 1
        turn += 1
    source_DA = np.array([(*found, -1, -1)[:2] for found in inputs]).T
    before_A = np.where(np.diff(rank_A, prepend=-1) != 0, -1, np.arange(len(items)) - 1)
    assert rounds(rank_A, before_A, source_DA, entries).tolist() == played
