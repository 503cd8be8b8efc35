"""Memory of the phases of a step: small cases worked out by hand."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from planner.cost.memory.peak import (
    LayerNeeds,
    PeakMemory,
    Phase,
    RankShapes,
    Widths,
    layer_phases,
    rank_memory,
)
from planner.cost.memory.reserved import cached_bytes, reserved_bytes
from planner.cost.memory.worst_phase import (
    OnRanks,
    PhaseBytes,
    PlaceBytes,
    Streams,
    chosen,
    worst_phase,
)
from planner.intake.jobs import read_training
from planner.trainers.registry import TRAINERS
from tests.pricing import rows

ONE = np.ones((1, 1))


def widths(microbatches: float = 1.0, trainer: str = "torchtitan", **layout: Any) -> Widths:
    return Widths.of(rows(layout, trainer=trainer), np.array([microbatches]), TRAINERS[trainer])


def phases(w: Widths, done: float) -> list[float]:
    values = {
        "running": 1000.0, "done": done, "following": 800.0, "second": 900.0,
        "reduced": 10.0, "shard": 2.0, "gathered": 11.0,
    }  # fmt: skip
    needs = LayerNeeds(**{name: value * ONE for name, value in values.items()})
    return [float(column[0, 0]) for column in layer_phases(needs, w)]


@pytest.mark.parametrize(("layout", "microbatches", "done", "expected"), [
    # two gathered layers at once (bf16, 2 x 11) and the reduction (fp32, 4 x 10) of the one before
    ({"zero_stage": 3}, 1, 700.0, [1000.0 + 44.0, 800.0 + 44.0 + 40.0, 900.0 + 44.0 + 40.0]),
    # while the reduction is filled gradients are whole and their shard (4 x 2) is not there: done
    # and one gather, where that is more than the next layer's backward
    ({"zero_stage": 3}, 1, 900.0, [1044.0, 900.0 + 22.0 - 8.0 + 40.0, 984.0]),
    # ZeRO-2 gathers nothing; the last layer's copy is gone, those of the first two are left
    ({"zero_stage": 2}, 1, 700.0, [1000.0, 800.0 + 40.0 - 22.0, 900.0 + 40.0 + 44.0]),
    # a pipeline keeps its copies and reduces after its last microbatch
    ({"zero_stage": 2, "pp": 2}, 4, 700.0, [1000.0, 800.0, 900.0]),
    ({"zero_stage": 2, "pp": 2}, 1, 700.0, [1000.0, 840.0, 940.0]),
])  # fmt: skip
def test_phases_of_the_last_the_next_and_the_second_layers_backward(
    layout: dict[str, int], microbatches: int, done: float, expected: list[float]
) -> None:
    assert phases(widths(microbatches, **layout), done) == expected


def test_widths_of_dtypes_and_stages() -> None:
    def of(names: str, **layout: Any) -> list[float]:
        found = widths(**layout)
        return [float(getattr(found, name)[0]) for name in names.split()]

    dtypes = {"param_dtype": "float32", "reduce_dtype": "bfloat16"}
    assert of("compute reduce gathered", zero_stage=3, **dtypes) == [4.0, 2.0, 4.0]
    megatron = {"trainer": "megatron", "zero_stage": 1}
    assert of("gathered resident reduced", **megatron) == [0.0] * 3
    assert of("resident reduced", zero_stage=0, dp_replicate=8) == [2.0, 0.0]
    assert of("resident", zero_stage=0, dp_replicate=4, tp=2) == [0.0]


def peak(trainer: str = "torchtitan", microbatches: float = 1.0, /, **given: Any) -> PeakMemory:
    layout = given.pop("layout", {"zero_stage": 3})
    held = {f.name: 0.0 * ONE for f in fields(RankShapes)}
    held |= {name: value * ONE for name, value in given.items()}
    training = read_training({"seq_len": 128, "global_batch_size": 64, "trainer": trainer})
    given = (np.array([microbatches]), training, TRAINERS[trainer], 0.0)
    return rank_memory(RankShapes(**held), rows(layout, trainer=trainer), *given)


@pytest.mark.parametrize(("given", "phase", "bytes_there"), [
    ({"logits_bytes": 100.0}, Phase.LOSS, 100.0),
    ({"head_bytes": 100.0, "logits_bytes": 90.0}, Phase.HEAD, 100.0),
    ({"last_layer_bytes": 100.0, "head_bytes": 90.0}, Phase.LAST_LAYER, 100.0),
    ({"next_layer_bytes": 100.0, "last_layer_bytes": 90.0}, Phase.NEXT_TO_LAST_LAYER, 100.0),
    ({"second_layer_bytes": 100.0, "next_layer_bytes": 90.0}, Phase.SECOND_LAYER, 100.0),
    ({"stream_bytes": 100.0, "second_layer_bytes": 90.0}, Phase.EMBEDDING, 100.0),
    ({"shard": 100.0}, Phase.EMBEDDING, 400.0),
])  # fmt: skip
def test_fullest_phase_is_named(given: dict[str, float], phase: Phase, bytes_there: float) -> None:
    memory = peak(**given)
    assert memory.phase(0, 0) is phase
    states = memory.resident + memory.optimizer
    assert (memory.allocated - states)[0, 0] == bytes_there


def test_the_optimizer_step_of_a_distributed_optimizer_is_no_worse_than_the_loss() -> None:
    memory = peak("megatron", layout={"zero_stage": 1}, local=10.0, shard=2.0, logits_bytes=1.0)
    assert memory.phase(0, 0) is Phase.LOSS
    assert (memory.parts()["parameters"] + memory.parts()["gradients"] + memory.optimizer)[
        0, 0
    ] == 10 * 6 + 2 * 12
    assert memory.moving[0, 0] == 1.0


def test_saved_activations_of_all_microbatches_in_flight_but_the_one_that_ran_back() -> None:
    given = {"in_flight": 3.0, "saved_bytes": 10.0, "boundary_bytes": 1.0, "held_bytes": 5.0}
    layout = {"pp": 2, "zero_stage": 2}
    assert peak(layout=layout, **given).allocated[0, 0] == 3 * 11.0 + 5.0
    ends = peak(layout=layout, **given, second_layer_bytes=100.0)
    assert ends.phase(0, 0) is Phase.SECOND_LAYER
    assert ends.allocated[0, 0] == 2 * 11.0 + 5.0 + 100.0


@pytest.mark.parametrize(("local", "allocated", "moving", "gradients"), [
    (2.0, 33 + 1000 + 8 - 8, 33 + 1000, 0.0), (5.0, 22 + 1000 + 20, 22 + 1000, 20.0)])  # fmt: skip
def test_where_all_are_in_flight_gradients_or_one_microbatch_is_not_there(
    local: float, allocated: float, moving: float, gradients: float
) -> None:
    """3 microbatches of 11 bytes at the loss, beside fp32 gradients of 8 or of 20 bytes."""
    memory = peak(
        "torchtitan", 3.0, layout={"pp": 2, "zero_stage": 2}, local=local, logits_bytes=1000.0,
        in_flight=3.0, saved_bytes=10.0, boundary_bytes=1.0, all_in_flight=1.0,
    )  # fmt: skip
    assert memory.phase(0, 0) is Phase.LOSS
    parts = memory.parts()
    columns = memory.allocated, memory.moving, parts["gradients"], parts["activations"]
    expected = [allocated, moving, gradients, moving - 1000]
    assert [column[0, 0] for column in columns] == expected


def test_a_pipelines_first_reduction_needs_a_buffer_beside_its_whole_gradients() -> None:
    """Whole fp32 gradients of 100 parameters, a layer of 40 in the buffer, and its copy gone."""
    memory = peak(
        "torchtitan", 4.0, layout={"pp": 2, "zero_stage": 2},
        local=100.0, gathered=100.0, largest_local=40.0, largest_gathered=40.0, shard=25.0,
    )  # fmt: skip
    assert memory.phase(0, 0) is Phase.FIRST_REDUCTION
    names = "buffers", "gradients", "parameters"
    held = [memory.parts()[name][0, 0] for name in names]
    assert held == [4.0 * 40.0 - 2.0 * 40.0, 400.0, 25.0 * 4.0 + 100.0 * 2.0]


def test_fragments_fill_what_room_there_is_and_under_pressure_a_floor_is_left() -> None:
    """80 allocated of which 50 move; a tenth is lost at ease, a twentieth under pressure."""

    def reserved(room: float) -> tuple[float, float]:
        found, least = reserved_bytes(80 * ONE, 7 * ONE, 50 * ONE, room * ONE, (0.1, 0.05))
        return float(found[0, 0]), float(least[0, 0])

    assert reserved(200.0) == (80 + 7 + 5.0, 82.5)
    assert reserved(90.0) == (90.0, 82.5)
    assert reserved(60.0) == (82.5, 82.5)


def test_what_one_stream_freed_does_not_serve_another() -> None:
    """Totals 100 and 90; of them 10 and 40 are the side stream's; a hole of 20 at the first."""
    phases = [PhaseBytes(0.0, 0.0, total * ONE, 0.0, 0.0) for total in (100.0, 90.0)]
    streams = Streams((10 * ONE, 40 * ONE), 20.0)
    nothing = PlaceBytes(activations=(0.0,), total=(0.0,), received=0.0 * ONE)
    worst = worst_phase(phases, nothing, streams, OnRanks(None))
    found = cached_bytes(worst.own, streams.most_apart + 3 * ONE, worst.bytes)
    assert found[0, 0] == max(100 - 10 + 20, 90 - 40) + 40 + 3 - 100


def test_of_two_loads_each_rank_reads_its_own_and_of_equal_phases_the_first_is_worst() -> None:
    """Two loads, three ranks; what a rank has saved adds to the first two phases alone."""
    by_load = ((5.0, 1.0), (5.0, 2.0), (9.0, 9.0), (0.0, 9.0))
    phases = [PhaseBytes(1.0, 1.0, np.array(both), 0.0, 0.0) for both in by_load]
    saved = np.array([[3.0], [4.0], [7.0]])
    place = OnRanks(np.array([[0], [0], [1]]))
    by_place = PlaceBytes(activations=(saved, 0.0), total=(saved, 0.0), received=10.0 + 0.0 * saved)
    worst = worst_phase(phases, by_place, None, place)
    assert worst.bytes.ravel().tolist() == [21.0, 21.0, 21.0]
    assert worst.moving.ravel().tolist() == [19.0, 19.0, 19.0]
    index = 2 * worst.pair + chosen(worst.pair, worst.seconds, place)
    assert index.ravel().tolist() == [2, 0, 1]
