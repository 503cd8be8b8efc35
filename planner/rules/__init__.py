"""Every rule of trainer, model and cluster that makes a layout illegal, each written once.

The search applies them to millions of candidates (`broken_rules`, `legal_mask`), an estimate to one
(`violations`). A rule is here because the trainer refuses the layout or because it would not run.
What is merely unwise is no rule.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.rules.base import Context, Rule
from planner.rules.cuda_graphs import CUDA_GRAPH_RULES
from planner.rules.degrees import DEGREE_RULES
from planner.rules.experts import EXPERT_RULES
from planner.rules.features import FEATURE_RULES
from planner.rules.mixers import MIXER_RULES
from planner.rules.pipeline import pipeline_rules
from planner.rules.precisions import PRECISION_RULES
from planner.rules.recomputed_modules import MODULE_RULES
from planner.rules.sharding import SHARDING_RULES
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Violation
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec


def all_rules() -> tuple[Rule, ...]:
    return (
        *DEGREE_RULES,
        *MIXER_RULES,
        *pipeline_rules(),
        *EXPERT_RULES,
        *SHARDING_RULES,
        *PRECISION_RULES,
        *FEATURE_RULES,
        *MODULE_RULES,
        *CUDA_GRAPH_RULES,
    )


def rules_for(context: Context) -> tuple[Rule, ...]:
    """The rules that can break in this job, in the order in which reasons are counted."""
    return tuple(rule for rule in all_rules() if rule.applies(context))


def broken_rules(batch: LayoutBatch, context: Context) -> Iterator[tuple[Rule, BoolColumn]]:
    """Each rule that breaks for some layout, with the mask of those. (N,)."""
    for rule in rules_for(context):
        mask = rule.broken(batch, context)
        if mask.any():
            yield rule, np.broadcast_to(mask, len(batch))


def legal_mask(
    batch: LayoutBatch, context: Context, changed: Collection[str] | None = None
) -> BoolColumn:
    """True where no rule is broken. (N,).

    changed: columns in which these layouts differ from legal ones, if that is known: only rules
        that read one of them are asked.
    """
    legal = np.ones(len(batch), dtype=np.bool_)
    for rule in rules_for(context):
        if changed is None or not rule.reads.isdisjoint(changed):
            legal &= np.logical_not(rule.broken(batch, context))
    return legal


def violations(
    layout: Layout, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec
) -> list[Violation]:
    """Every rule that one layout breaks; empty for a legal one."""
    context = Context(model=model, cluster=cluster, training=training)
    return violations_of([layout], LayoutBatch.from_layouts([layout]), context)[0]


def violations_of(
    layouts: Sequence[Layout], batch: LayoutBatch, context: Context
) -> list[list[Violation]]:
    """Every rule that each of N layouts breaks, in order; empty for legal ones.

    batch: the same layouts as columns.
    """
    found: list[list[Violation]] = [[] for _ in layouts]
    for rule, mask in broken_rules(batch, context):
        for row in np.flatnonzero(mask).tolist():
            value = getattr(layouts[row], rule.field)
            words, remedy = rule.words(layouts[row], context)
            found[row].append(Violation(field=rule.field, value=value, rule=words, remedy=remedy))
    return found


__all__ = [
    "Context", "Rule", "all_rules", "broken_rules", "legal_mask",
    "rules_for", "violations", "violations_of",
]  # fmt: skip
