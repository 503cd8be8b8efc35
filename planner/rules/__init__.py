"""Every rule of trainer, model and cluster that makes a layout illegal, each written once.

The search applies them to millions of candidates (`broken_rules`, `legal_mask`), an estimate to one
(`violations`). A rule is here because the trainer refuses the layout or because it would not run.
What is merely unwise is no rule.
"""

from collections.abc import Iterator

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.rules.base import DERIVED, Context, Rule, columns_of
from planner.rules.cuda_graphs import CUDA_GRAPH_RULES
from planner.rules.degrees import DEGREE_RULES
from planner.rules.experts import EXPERT_RULES
from planner.rules.features import FEATURE_RULES
from planner.rules.pipeline import pipeline_rules
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Violation
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order in which reasons are counted."""
    return (*DEGREE_RULES, *pipeline_rules(), *EXPERT_RULES, *FEATURE_RULES, *CUDA_GRAPH_RULES)


def rules_for(context: Context) -> tuple[Rule, ...]:
    """The rules that can break in this job, in the order in which reasons are counted."""
    return tuple(rule for rule in all_rules() if rule.applies(context))


def broken_rules(batch: LayoutBatch, context: Context) -> Iterator[tuple[Rule, BoolColumn]]:
    """Each rule that breaks for some layout, with the mask of those. (N,)."""
    for rule in rules_for(context):
        mask = np.broadcast_to(rule.broken(batch, context), len(batch))
        if mask.any():
            yield rule, mask


def legal_mask(batch: LayoutBatch, context: Context) -> BoolColumn:
    """True where no rule is broken. (N,)."""
    legal = np.ones(len(batch), dtype=np.bool_)
    for _, mask in broken_rules(batch, context):
        legal &= ~mask
    return legal


def violations(
    layout: Layout, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec
) -> list[Violation]:
    """Every rule that one layout breaks; empty for a legal one."""
    context = Context(model=model, cluster=cluster, training=training)
    return [
        Violation(
            field=rule.field,
            value=getattr(layout, rule.field),
            rule=rule.rule(layout, context),
            remedy=rule.remedy(layout, context),
        )
        for rule, _ in broken_rules(LayoutBatch.from_layouts([layout]), context)
    ]


__all__ = [
    "DERIVED",
    "Context",
    "Rule",
    "all_rules",
    "broken_rules",
    "columns_of",
    "legal_mask",
    "rules_for",
    "violations",
]
