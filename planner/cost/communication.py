"""Communication of layouts: every collective that the price of a step sums.

The calls are those of `op_costs`, `sharding` and `sends`, at the distinct rows of the price, times
what its busiest rank runs of them.
Letters: N layouts, U distinct rows, K + 2 units (layers by kind, embedding, head).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import FloatColumn, LayoutBatch, in_order
from planner.cost.cost_inputs import CostInputs, in_mode
from planner.cost.data_parallel import sharding
from planner.cost.data_parallel.overlap import Rounds, rounds_of
from planner.cost.layer.op_costs import op_calls
from planner.cost.layer.unit_work import Unit, units_of
from planner.cost.network.collectives import chosen
from planner.cost.prepared_job import PreparedJob
from planner.cost.price import Prices
from planner.cost.refine import Refined, hops_of
from planner.cost.step_seconds import both_passes, data_parallel
from planner.schedules import SCHEDULES
from planner.specs.estimate import COMMUNICATION_AXES, CommunicationRow
from planner.work.checkpointing import BLOCK, FULL, NONE

DATA_PARALLEL = {"fsdp": "FSDP", "dp": "the gradient all-reduce"}
ALIKE = 1.01  # of the seconds without oversubscription
PASSED_ON = {"rotate": 1.0, "rotate-gradients": 2.0}  # trips round a ring of n - 1 sends


# what rows of the answer differ in: dimension, operation, group, level, algorithm, message bytes
Key = tuple[str, str, int, str, str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """One collective at R rows, of each its number in a list.

    unit: the unit of a load that runs it. often: how many a microbatch, or a gather or reduction.
    volume: bytes that a rank sends of one. seconds: of one. exposed: of all that a unit runs.
    part, is_head: of data parallelism (`sharding.ShardCall`), and whether the unit is the head.
    """

    unit: int
    keys: list[Key]
    often: list[float]
    volume: list[float]
    seconds: list[float]
    exposed: list[float]
    part: str = ""
    is_head: bool = False


class CommunicationTable:
    """The rows of one layout: how many, bytes sent, seconds alone and seconds exposed of each."""

    def __init__(self) -> None:
        self.rows: dict[Key, list[float]] = {}

    def add(self, calls: _Calls, at: int, units: float, exposed: float | None = None) -> None:
        """Adds one collective, at row `at` of its columns, as often as `units` run it.

        exposed: seconds of all that; the calls' own unless given.
        """
        count = units * calls.often[at]
        seconds = count * calls.seconds[at]
        if seconds > 0.0:
            row = self.rows.setdefault(calls.keys[at], [0.0, 0.0, 0.0, 0.0])
            row[0] += count
            row[1] += count * calls.volume[at]
            row[2] += seconds
            row[3] += units * calls.exposed[at] if exposed is None else exposed

    def add_shared(
        self,
        shards: list[_Calls],
        at: int,
        load: tuple[FloatColumn, Rounds, int],
        exposed: dict[str, float],
    ) -> None:
        """Adds the collectives of data parallelism; each has its share of what its part exposes.

        load: the units of a rank, and its rounds at one of their rows. exposed: seconds by part.
        """
        units, rounds, row = load
        reductions, gathers = float(rounds.reductions[row]), float(rounds.gathers[row])
        again = {True: float(rounds.head_again[row]), False: float(rounds.again[row])}
        counts = [
            float(units[one.unit])
            * (gathers * (1.0 + again[one.is_head]) if one.part == "gather" else reductions)
            for one in shards
        ]
        seconds = [
            count * one.often[at] * one.seconds[at]
            for count, one in zip(counts, shards, strict=True)
        ]
        sums = dict.fromkeys(exposed, 0.0)
        for one, took in zip(shards, seconds, strict=True):
            sums[one.part] += took
        for one, count, took in zip(shards, counts, seconds, strict=True):
            if took:
                self.add(one, at, count, took / sums[one.part] * exposed[one.part])

    def sums(self) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds alone, seconds exposed) by dimension."""
        alone, waits = (dict.fromkeys(COMMUNICATION_AXES, 0.0) for _ in range(2))
        for key, row in self.rows.items():
            alone[key[0]] += row[2]
            waits[key[0]] += row[3]
        return alone, waits

    def answer(self, exposed: dict[str, float], factor: float) -> list[CommunicationRow]:
        """The rows by dimension, the longest first; what is exposed of each adds up to the price's.

        exposed: seconds by dimension. factor: on seconds, that of one's own runs.
        """
        found = []
        alone, waits = self.sums()
        for (dimension, operation, group, level, algorithm, message), row in self.rows.items():
            # compute is slowed down where nothing is waited for, too
            waited = waits[dimension]
            share = row[3] / waited if waited else row[2] / alone[dimension]
            found.append(
                CommunicationRow.model_validate(
                    {
                        "dimension": dimension,
                        "operation": operation,
                        "group_size": group,
                        "level": level,
                        "algorithm": algorithm,
                        "per_step": row[0],
                        "message_bytes": message,
                        "volume_bytes": row[1],
                        "seconds": factor * row[2],
                        "exposed_seconds": share * exposed[dimension],
                    }
                )
            )
        order = COMMUNICATION_AXES
        return sorted(found, key=lambda one: (order.index(one.dimension), -one.seconds))


def communication(
    job: PreparedJob, prices: Prices, refined: Refined
) -> list[list[CommunicationRow]]:
    """The rows of every layout of these prices; refined: their simulated steps."""
    answers = []
    for row, table in enumerate(tables(job, prices)):
        exposed = {axis: float(prices.parts[axis][row]) for axis in COMMUNICATION_AXES}
        exposed["pp"] = float(refined.send_seconds[row])
        answers.append(table.answer(exposed, float(prices.own_factor[row])))
    return answers


def unslowed(job: PreparedJob, prices: Prices, even: PreparedJob, same: Prices) -> list[list[str]]:
    """Why an oversubscribed level does not slow data parallelism across it, for each layout.

    even, same: the job on a fabric without oversubscription, and its prices.
    """
    answers = []
    fabric = job.cluster.fabric
    narrow = [index for index, level in enumerate(fabric) if level.oversubscription > 1]
    names = [level.name for level in fabric]
    for own, other in zip(tables(job, prices), tables(even, same), strict=True):
        crossing: dict[tuple[str, int], bool] = {}
        for key, row in own.rows.items():
            dimension, group, level, algorithm = key[0], key[2], key[3], key[4]
            if dimension in DATA_PARALLEL and level in names and names.index(level) >= narrow[0]:
                alike = key in other.rows and row[2] < ALIKE * other.rows[key][2]
                one = DATA_PARALLEL[dimension], group
                crossing[one] = crossing.get(one, True) and alike and algorithm == "ring"
        answers.append(
            [
                f"{fabric[narrow[0]].name} is oversubscribed "
                f"{fabric[narrow[0]].oversubscription:g} times and does not slow {words} over "
                f"{group:,} GPUs: a ring crosses it from one node to the next, on the links of "
                f"{fabric[0].gpus} of the {fabric[narrow[0] - 1].gpus} GPUs that share its uplinks"
                for (words, group), alike in crossing.items()
                if alike
            ]
            if narrow[0]
            else []
        )
    return answers


def tables(job: PreparedJob, prices: Prices) -> Iterator["CommunicationTable"]:
    """Communication of the busiest rank of every layout, before `PreparedJob.own_factor`."""
    stage, inputs = prices.stage_seconds, prices.stage_seconds.inputs
    loads, waits = inputs.loads.of_ranks, data_parallel(inputs, both_passes(inputs))
    of_layers, of_shards = list(_of_layers(job, inputs)), list(_of_shards(job, inputs))
    rounds = rounds_of(loads.batch, loads.m, job.rules)
    for row in range(len(inputs.batch)):
        load, table = int(stage.load[row]), CommunicationTable()
        units, m = loads.units[:, load], float(loads.m[load])
        for calls in of_layers:
            table.add(calls, int(inputs.at_unit[row]), m * float(units[calls.unit]))
        fsdp, gathers = float(waits.fsdp[load]), float(waits.gathers[load])
        parts = {"gather": gathers, "scatter": fsdp - gathers, "replicate": float(waits.dp[load])}
        table.add_shared(of_shards, int(inputs.at_shard[row]), (units, rounds, load), parts)
        for calls in _of_sends(job, prices, row):
            table.add(calls, 0, 1.0)
        yield table


def _of_layers(job: PreparedJob, inputs: CostInputs) -> Iterator[_Calls]:
    """Collectives of the units' operations, at distinct rows.

    Where layouts have block-N, layers count by kind and mode (`CostInputs`).
    """
    rows = inputs.unit_rows
    units = list(units_of(job.context(rows), job.model))
    for index, unit in enumerate(units):
        for mode, number in zip((NONE, FULL), _numbers(inputs, index, len(units)), strict=False):
            yield from _of_unit(job, unit, in_mode(rows, mode), number)


def _numbers(inputs: CostInputs, index: int, count: int) -> tuple[int, ...]:
    """The units of a load that are the model's unit `index` of `count`: of each mode of a layer."""
    blocks, kinds = bool((inputs.batch.ac_kind == BLOCK).any()), count - 2
    if not blocks:
        return (index,)
    return (index, index + kinds) if index < kinds else (index + kinds,)


def _of_unit(job: PreparedJob, unit: Unit, rows: LayoutBatch, number: int) -> Iterator[_Calls]:
    costs, again = unit.costs(), unit.repeats(rows)
    for index, calls in op_calls(unit.context, unit.ops, unit.model):
        sums = {
            (call.dimension, call.backward): in_order(
                [
                    other.exposed
                    for other in calls
                    if (other.dimension, other.backward) == (call.dimension, call.backward)
                ]
            )
            for call in calls
        }
        for call in calls:
            cost = costs[index].exposed_backward if call.backward else costs[index].exposed_forward
            total = sums[call.dimension, call.backward]
            own = cost[("tp", "cp", "ep").index(call.dimension)]
            share = np.divide(own, total, out=np.zeros_like(total), where=total > 0)
            often = 1.0 if call.backward else 1.0 + again[index]
            yield _named(
                job,
                (call.dimension, call.operation),
                call.payload,
                unit.context.group(call.axis),
                unit=number,
                often=np.where(call.payload > 0, often, 0.0),
                seconds=call.seconds,
                exposed=often * share * call.exposed,
                kernels=call.kernels,
            )


def _named(
    job: PreparedJob,
    what: tuple[str, str],
    payload: FloatColumn,
    group: tuple[FloatColumn, FloatColumn],
    *,
    unit: int,
    often: FloatColumn,
    seconds: FloatColumn,
    exposed: FloatColumn,
    kernels: tuple[str, FloatColumn] | None = None,
) -> _Calls:
    """The collective with its algorithm, its level and what a rank sends of it.

    What is passed round a ring counts as its sends.
    what: (dimension, operation). payload: bytes, as `collectives` counts them. group: (degree,
        stride). All of R groups.
    """
    (dimension, operation), (degree, stride) = what, group
    carried = chosen(operation, payload, degree, stride, job.fabric, job.profile.nvls_gain)
    names, shares = carried.algorithm, carried.wire_share
    if kernels is not None:
        names, shares = np.full(len(degree), kernels[0]), kernels[1]
    sends = PASSED_ON.get(operation, 0.0) * np.maximum(degree - 1.0, 1.0)
    split = np.where(sends > 0, sends, 1.0)
    passed_on = operation in PASSED_ON
    sizes = payload / degree if passed_on else payload
    return _Calls(
        unit=unit,
        keys=[
            (
                dimension,
                "send" if passed_on else operation,
                int(ranks),
                job.cluster.fabric[level].name,
                name,
                size,
            )
            for ranks, level, name, size in zip(
                degree.tolist(), carried.level.tolist(), names.tolist(), sizes.tolist(), strict=True
            )
        ],
        often=(often * split).tolist(),
        volume=(payload * shares / split).tolist(),
        seconds=(seconds / split).tolist(),
        exposed=exposed.tolist(),
    )


def _of_shards(job: PreparedJob, inputs: CostInputs) -> Iterator[_Calls]:
    """Collectives of parameters and gradients at distinct rows, by unit of a load."""
    for call in sharding.shard_calls(job, inputs.shard_rows):
        times = np.broadcast_to(call.times, call.payload.shape)
        for index, payload in enumerate(call.payload):
            calls = _named(
                job,
                ("dp" if call.part == "replicate" else "fsdp", call.operation),
                payload,
                call.group,
                unit=index,
                often=np.where(payload > 0, times[index], 0.0),
                seconds=call.seconds[index],
                exposed=np.zeros(len(payload)),
            )
            for number in _numbers(inputs, index, len(call.payload)):
                is_head = index == len(call.payload) - 1
                yield replace(calls, unit=number, part=call.part, is_head=is_head)


def _of_sends(job: PreparedJob, prices: Prices, row: int) -> Iterator[_Calls]:
    """The sends of the busiest rank, one row of calls for each boundary of its stages."""
    stage, batch = prices.stage_seconds, prices.stage_seconds.inputs.batch
    pp, v = int(batch.pp[row]), int(batch.virtual_stages[row])
    if pp == 1:
        return
    schedule = SCHEDULES.of_code(int(batch.pp_schedule[row]))
    sends = stage.sends.take(np.array([row]))
    alone, levels = sends.hop_seconds(pp)[0][0].tolist(), sends.levels(pp)[0].tolist()
    wire, m = float(sends.on_wire()[0]), float(stage.inputs.m[row])
    hops, rank = hops_of(schedule, pp, v), int(stage.rank[row])
    at = schedule.stage_rank(np.arange(pp * v), pp, v)
    for one in range(pp * v - 1):
        if at[one] != at[one + 1] and rank in (at[one], at[one + 1]):
            hop = hops[one]
            level = job.cluster.fabric[levels[hop]].name
            yield _Calls(
                unit=0,
                keys=[("pp", "send", pp, level, "neighbour", wire)],
                often=[m],
                volume=[wire],
                seconds=[alone[hop]],
                exposed=[m * alone[hop]],
            )
