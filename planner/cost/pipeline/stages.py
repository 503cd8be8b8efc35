"""Which layers each pipeline rank holds.

Letters: U distinct pipelines by KEY, R pipeline ranks priced, K kinds of layer, S stages.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.columns import TRAINER_SPLIT, FloatColumn, IntColumn, LayoutBatch
from planner.schedules import SCHEDULES, Schedule
from planner.specs.model import ModelSpec
from planner.trainers.base import TrainerRules
from planner.work.checkpointing import BLOCK

KEY = ("pp", "virtual_stages", "pp_schedule", "split")
KEY_OF_BLOCKS = (*KEY, "ac_kind", "ac_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """Units on R ranks of each of U pipelines.

    units (R, K + 2, U): number of layers of each kind, then 1 where the rank holds the embedding,
        then 1 where it holds the head.
    rank (R, U): pipeline rank.
    mean_units (K + 2, U): units per rank, the mean over all ranks.
    """

    units: FloatColumn
    rank: IntColumn
    mean_units: FloatColumn


@lru_cache(maxsize=8192)
def stage_layers(num_layers: int, num_stages: int, *, counts_ends: bool) -> tuple[int, ...]:
    """Layers of each stage, first stage first, by the trainer's own split.

    TorchTitan counts the embedding and the head as one layer each and spreads all as evenly as it
    can; earlier stages take the remainder (generate_llm_fqn_per_model_part). Megatron splits evenly
    where that divides, and otherwise counts embedding and head as layers too
    (--account-for-embedding-in-pipeline-split).
    counts_ends: always count them.
    """
    if num_stages == 1:
        return (num_layers,)
    if not counts_ends and num_layers % num_stages == 0:
        return (num_layers // num_stages,) * num_stages
    per_stage, extra = divmod(num_layers + 2, num_stages)
    sizes = [per_stage + (index < extra) for index in range(num_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    short = max(0, -sizes[-1])
    sizes[-1] += short
    sizes[0] -= short
    return tuple(sizes)


def layers_of_stages(
    batch: LayoutBatch, row: int, model: ModelSpec, rules: TrainerRules
) -> tuple[int, ...]:
    """Layers of each stage of one layout: its own list, or the trainer's split."""
    if int(batch.pp[row]) == 1:
        return (model.num_hidden_layers,)
    split = int(batch.split[row])
    if split != TRAINER_SPLIT:
        return batch.splits[split]
    return stage_layers(
        model.num_hidden_layers,
        int(batch.pp[row] * batch.virtual_stages[row]),
        counts_ends=rules.split == "effective",
    )


def block_layers(batch: LayoutBatch) -> IntColumn | None:
    """Layers that each stage recomputes under block-N, (N,), 0 under any other mode.

    None if no layout of the batch has block-N.
    """
    blocks = batch.ac_kind == BLOCK
    return np.where(blocks, batch.ac_value, 0).astype(np.int64) if blocks.any() else None


def stage_units(sizes: tuple[int, ...], model: ModelSpec, blocks: int | None = None) -> FloatColumn:
    """Units of each stage, (S, K + 2): layers by kind, embedding, head.

    The first stage holds the embedding, the last one the head.
    blocks: the first layers of each stage that count apart, as K more kinds behind the K:
        (S, 2 K + 2).
    """
    return _stage_units(sizes, _kinds(model), blocks)


class _Kinds:
    """Kinds of layers of a model. Caches compare it as one object, which takes less than a model.

    until (layers + 1, K): layers of each kind before each layer and before the end.
    last (K,): layers that the last stage has besides, of multi-token prediction.
    """

    def __init__(self, model: ModelSpec) -> None:
        kinds = [kind for kind, _ in model.distinct_layers()]
        of_kind = np.array([[kind == other for other in kinds] for kind in model.layer_kinds()])
        nothing = np.zeros((1, len(kinds)), dtype=np.int64)
        self.until = np.concatenate([nothing, of_kind.cumsum(axis=0)])
        self.last = np.array([model.mtp_num_layers * kind.mtp for kind in kinds])


_kinds = lru_cache(maxsize=64)(_Kinds)


@lru_cache(maxsize=4096)
def _stage_units(sizes: tuple[int, ...], kinds: _Kinds, blocks: int | None) -> FloatColumn:
    until, num_kinds = kinds.until, kinds.until.shape[1]
    count_S, end_S = np.array(sizes), np.cumsum(sizes)
    apart_S = np.minimum(blocks or 0, count_S)
    middle = until[end_S - count_S + apart_S]
    held = [until[end_S] - middle]
    held[0][-1] += kinds.last
    if blocks is not None:
        held.append(middle - until[end_S - count_S])
    units = np.zeros((len(sizes), num_kinds * len(held) + 2))
    units[:, :-2] = np.concatenate(held, axis=1)
    units[0, -2] = 1.0
    units[-1, -1] = 1.0
    return units


@lru_cache(maxsize=8192)
def _held(
    pp: int,
    virtual: int,
    code: int,
    sizes: tuple[int, ...],
    kinds: _Kinds,
    blocks: int | None,
    every_rank: bool,
) -> tuple[FloatColumn, IntColumn, FloatColumn]:
    """Units of one pipeline's ranks (R, K + 2), which they are (R,), units of a mean rank."""
    schedule, stages = SCHEDULES.of_code(code), _stage_units(sizes, kinds, blocks)
    units, rank = np.zeros((pp, stages.shape[1])), np.arange(pp)
    np.add.at(units, schedule.stage_rank(np.arange(len(stages)), pp, virtual), stages)
    mean_units = units.mean(axis=0)
    if not every_rank:
        rank = _deciding_ranks(units, schedule)
    return units[rank], rank, mean_units


def _deciding_ranks(units: FloatColumn, schedule: Schedule) -> IntColumn:
    _, first, kind = np.unique(units, axis=0, return_index=True, return_inverse=True)
    if not schedule.splits_backward:
        return np.sort(first)
    last = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, kind.ravel(), np.arange(len(units)))
    return np.union1d(first, last)


def rank_layers(
    batch: LayoutBatch,
    model: ModelSpec,
    rules: TrainerRules,
    *,
    every_rank: bool,
    blocks: IntColumn | None = None,
) -> RankLayers:
    """Units of the ranks that can decide time or memory, for U pipelines.

    Ranks that hold the same units compute as long, and the earliest of them has the most
    microbatches in flight. Where weight gradients wait, what waits grows from rank to rank as what
    is in flight falls, so that one of both ends holds most. The deciding ranks are therefore the
    first of each kind, and there the last of each kind too. R is the largest number of them in any
    pipeline; shorter lists repeat their last rank.
    every_rank: units of all ranks instead.
    blocks: see `block_layers`; with it all have 2 K kinds of layers.
    """
    kinds, mode = _kinds(model), [None] * len(batch) if blocks is None else blocks.tolist()
    columns = (batch.pp, batch.virtual_stages, batch.pp_schedule)
    found = [
        _held(
            pp,
            virtual,
            code,
            layers_of_stages(batch, row, model, rules),
            kinds,
            mode[row],
            every_rank,
        )
        for row, (pp, virtual, code) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]
    units, ranks, means = zip(*found, strict=True)
    count = np.array([len(rank) for rank in ranks])
    place = np.minimum(np.arange(count.max()), count[:, None] - 1)
    place += (np.cumsum(count) - count)[:, None]
    return RankLayers(
        units=np.concatenate(units)[place].transpose(1, 2, 0),
        rank=np.concatenate(ranks)[place].T,
        mean_units=np.array(means).T,
    )
