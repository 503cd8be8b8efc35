"""Rules: one condition on a layout, written once for columns, with its text for people.

A rule names the columns it `reads`, so that a search can apply it as soon as those are known,
before it crosses the rest. `broken` is elementwise and broadcasts columns (N,), or (C, 1) with (T,)
where two sets are crossed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, Column, IntColumn, LayoutBatch
from planner.specs.cluster import ClusterSpec
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.base import TrainerRules
from planner.trainers.muon import Muon
from planner.trainers.registry import TRAINERS, runs_under, training_release
from planner.trainers.release import Release, Releases
from planner.work.attention import WIDEST_FUSED


@dataclass(frozen=True, slots=True)
class Context:
    """The job around a layout: what is the same for all candidates of one search."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec

    @property
    def trainer(self) -> TrainerRules:
        """The trainer, regardless of its release."""
        return TRAINERS[self.training.trainer]

    @property
    def release(self) -> Release:
        return training_release(self.training)

    @property
    def released(self) -> TrainerRules:
        return self.trainer.at(self.release)

    @property
    def muon(self) -> Muon:
        return self.released.muon

    @property
    def num_heads(self) -> int:
        """Query heads of attention, the greatest common divisor where layers differ."""
        return math.gcd(*(self.model.at(window).num_attention_heads for window in (0, 1)))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Key-value heads of attention in each kind of layer; MLA expands to all query heads."""
        heads = "num_attention_heads" if self.model.uses_mla else "num_key_value_heads"
        return tuple({getattr(self.model.at(window), heads): 0 for window in (0, 1)})

    @property
    def num_kv_heads(self) -> int:
        """Their greatest common divisor."""
        return math.gcd(*self.kv_heads)

    @property
    def release_name(self) -> str:
        """The trainer, with its release where rules differ by it."""
        number = self.release.number
        return self.trainer.name if number == "0" else f"{self.trainer.name} {number}"

    @property
    def unfused(self) -> bool:
        """Whether attention materialises its probabilities, in all layers or in some."""
        wide = self.trainer.fused_kernels and self.model.qk_head_dim > WIDEST_FUSED
        return wide or self.training.attention_kernel == "unfused"


Text = str | Callable[[Layout, Context], str]
"""A template of x, the layout, and of c, the job; a function where the words need more."""


def under(
    trainer: str, *, since: str = "", before: str = "", before_day: str = ""
) -> Callable[[Context], bool]:
    """Whether a job runs under this trainer, in its releases from `since` and before `before`."""
    releases = Releases(since=since, before=before, before_day=before_day)
    return lambda context: runs_under(context.training, trainer, releases)


def always(context: Context) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition that makes a layout illegal.

    key: the reason under which rejected layouts are counted.
    field: the layout's field to change.
    reads: columns of `LayoutBatch` that `broken` uses: its parameters. Where it takes a whole batch
        x, they are given, or just the field.
    applies: False where the rule can never break in this job (another trainer, no experts), so that
        a search need not evaluate it.
    broken: True where the layout is illegal. It is written as a function of columns and of c, the
        job, or of x and c, and is called with x and c.
    rule, remedy: what is wrong with one layout, and what would pass.
    """

    key: str
    field: str
    reads: frozenset[str] = frozenset()
    broken: Callable[..., BoolColumn]
    rule: Text
    remedy: Text
    applies: Callable[[Context], bool] = always

    def __post_init__(self) -> None:
        broken, names = self.broken, tuple(signature(self.broken).parameters)

        def of_batch(x: LayoutBatch, c: Context) -> BoolColumn:
            return broken(*(c if name == "c" else getattr(x, name) for name in names))

        if "x" not in names:
            object.__setattr__(self, "broken", of_batch)
            object.__setattr__(self, "reads", frozenset(names) - {"c"})
        elif not self.reads:
            object.__setattr__(self, "reads", frozenset({self.field}))

    def words(self, layout: Layout, context: Context) -> tuple[str, str]:
        """(what is wrong with a layout, what would pass)."""
        rule, remedy = (
            text.format(x=layout, c=context) if isinstance(text, str) else text(layout, context)
            for text in (self.rule, self.remedy)
        )
        return rule, remedy


def num_microbatches(x: LayoutBatch, context: Context) -> IntColumn:
    """Microbatches per step. (N,).

    Rounded down where the batch does not divide, which is another rule's concern.
    """
    return context.training.global_batch_size // (x.micro_batch_size * x.dp_replicate * x.dp_shard)


def sharding_degree(x: LayoutBatch, context: Context) -> IntColumn:
    """Ranks over which FSDP and ZeRO shard: dp_shard x cp. (N,)."""
    return x.dp_shard * x.cp


def by_split(x: LayoutBatch, usual: IntColumn | int, own: Sequence[int]) -> IntColumn:
    """`usual` (N,) under the trainer's split; of others their number in `own` (splits), (N,)."""
    of_split = np.array([*own, 0], dtype=np.int64)[x.split]
    return np.asarray(np.where(x.split == TRAINER_SPLIT, usual, of_split))


def in_set(codes: Column, names: Iterable[str], wanted: Iterable[str]) -> BoolColumn:
    wanted = frozenset(wanted)
    table = np.array([name in wanted for name in names], dtype=np.bool_)
    return np.asarray(table[codes], dtype=np.bool_)


def divides(number: int, divisor: Column) -> BoolColumn:
    return np.asarray(number % divisor == 0, dtype=np.bool_)


def choices(values: Iterable[object], last: str = "or") -> str:
    """Possible values as text: 1, 2, 4 or 8; the largest eight when there are more."""
    texts = [str(value) for value in values]
    texts = texts if len(texts) <= 8 else ["...", *texts[-8:]]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
