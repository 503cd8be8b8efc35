"""Why nothing is legal: impossible values of the user, or one rule.

The rule is the one without which layouts would be left.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from planner.columns import Column, LayoutBatch
from planner.errors import Fault
from planner.rules import Context, Rule, rules_for, violations
from planner.rules.degrees import PRODUCT_KEY
from planner.search.space.domains import Domains, domains_of
from planner.search.space.enumerate import DEGREES, MAX_TRIED, Space, enumerate_space
from planner.search.space.rows import Rows, all_choices, length
from planner.specs.estimate import Violation
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout
from planner.units import counted

# A field that only matters if this degree is above 1: a value that no such layout may have is
# wrong, though layouts without the axis ignore it.
MEANT_FOR: Mapping[str, str] = {
    "pp_schedule": "pp", "virtual_stages": "pp", "layers_per_stage": "pp", "cp_method": "cp",
    "moe_dispatcher": "ep", "sequence_parallel": "tp",
}  # fmt: skip
MOST_RELAXED = 6


def impossible_values(context: Context, search: SearchSpec) -> list[Fault]:
    """The requested values that no layout of this job can have, whatever the other fields are.

    Checks `search.fix` and `search.allow`; empty if there is no fault. Raises SpecError for unknown
    fields and ill-typed values.
    """
    asked = _Asked(context, search, domains_of(context, search))
    if not asked.given:
        return []
    return [*asked.refused_by_one_rule(), *asked.uneven_product()] or asked.refused_together()


def refused_choices(context: Context, search: SearchSpec) -> list[str]:
    """One sentence for every value of a `search.allow` that no layout can have.

    Only if other values of the same field are possible.
    """
    sentences = []
    for name, values in search.allow.items():
        for value in values if len(values) > 1 else ():
            faults = impossible_values(context, SearchSpec(allow={name: [value]}))
            if faults:
                sentences.append(f"search.allow.{name} {value} is left out: {faults[0].rule}")
    return sentences


def binding_rule(
    context: Context, search: SearchSpec, rejected: Mapping[str, int]
) -> Violation | None:
    """The rule that by itself keeps a job from having any legal layout.

    It is reported for one layout that breaks it. Every rule that excluded something is left out in
    turn; the answer is the one without which the plainest layout would be legal, which cuts the
    model into fewest parts, and of several such rules the one that excludes most. If it takes
    several at once, it is the first of them. None if no rule explains it.
    """
    domains = domains_of(context, search, oversized=True)
    keys = [key for key in rejected if any(rule.key == key for rule in rules_for(context))]
    freed = {key: enumerate_space(context, domains, without=frozenset({key})) for key in keys}
    best = max(keys, key=lambda key: (-_parts(freed[key]), freed[key].num_layouts), default=None)
    if best is None:
        return None
    space = freed[best]
    without = {best}
    for _ in range(MOST_RELAXED):
        if space.num_layouts:
            row = space.cells.row(0)
            broken = violations(row, context.model, context.cluster, context.training)
            return broken[0] if broken else None
        without |= set(space.rejected) & {rule.key for rule in rules_for(context)}
        space = enumerate_space(context, domains, without=frozenset(without))
    return None


def _parts(space: Space) -> float:
    """Parts into which the plainest layout of a space cuts the model; infinite for no layout."""
    cells = space.cells
    return float((cells.tp * cells.cp * cells.pp).min()) if space.num_layouts else np.inf


# ---- values that the user gave -------------------------------------------------------------------


class _Asked:
    """The fields that a search fixes or narrows, among the domains of all."""

    def __init__(self, context: Context, search: SearchSpec, domains: Domains) -> None:
        self.context, self.search, self.domains = context, search, domains
        self.given = [name for name, domain in domains.by_field.items() if domain.given]
        self.rules = rules_for(context)
        self.home = {column: name for name in domains.by_field for column in domains.columns(name)}

    def refused_by_one_rule(self) -> list[Fault]:
        """Faults of rules that exclude every combination of the values they read.

        Rules that exclude everything even in a search without requests do not count.
        """
        free = _Asked(self.context, SearchSpec(), domains_of(self.context, SearchSpec()))
        faults = []
        for rule in self.rules:
            names = sorted({self.home[column] for column in rule.reads})
            # `uneven_product` has a better message
            if rule.key == PRODUCT_KEY and not set(self.given).issuperset(names):
                continue
            if set(self.given).isdisjoint(names) or free._first_refused([rule], names) is not None:
                continue
            layout = self._first_refused([rule], names)
            faults += [] if layout is None else [self._fault(rule, layout)]
        return faults

    def refused_together(self) -> list[Fault]:
        """Faults of the first combination of the given values, if every combination is excluded.

        Only rules that read nothing but these values count.
        """
        columns = {column for name in self.given for column in self.domains.columns(name)}
        rules = [rule for rule in self.rules if rule.reads <= columns]
        layout = self._first_refused(rules, self.given)
        if layout is None:
            return []
        batch = LayoutBatch.from_layouts([layout])
        return [
            self._fault(rule, layout) for rule in rules if np.any(rule.broken(batch, self.context))
        ]

    def uneven_product(self) -> list[Fault]:
        """Degrees of which no combination divides num_gpus."""
        gpus = self.context.cluster.num_gpus
        names = [name for name in DEGREES if name in self.given]
        degrees = {name: self.domains.columns(name)[name].tolist() for name in names}
        if not names or any(gpus % prod(chosen) == 0 for chosen in product(*degrees.values())):
            return []
        first = {name: values[0] for name, values in degrees.items()}
        largest = max(first, key=lambda name: first[name])
        written = " x ".join(f"{name} {value}" for name, value in first.items())
        written += f" = {prod(first.values())}" if len(first) > 1 else ""
        rule = f"{written} does not divide {counted(gpus, 'GPU')}"
        remedy = f"choose degrees whose product divides {gpus}"
        return [Fault(self._path(largest), first[largest], rule, remedy)]

    def _first_refused(self, rules: Sequence[Rule], names: Sequence[str]) -> Layout | None:
        """The first combination of these fields' values, if the rules exclude every one.

        None if one is legal or there are too many.
        """
        values = [self._meant(name) for name in names]
        sizes = [length(columns) for columns in values]
        if not rules or not 0 < prod(sizes) <= MAX_TRIED:
            return None
        batch = Rows(self.context, self.domains.splits).batch(all_choices(values))
        refused = np.zeros(prod(sizes), dtype=np.bool_)
        for rule in rules:
            refused |= rule.broken(batch, self.context)
        return batch.row(0) if refused.all() else None

    def _meant(self, name: str) -> Mapping[str, Column]:
        """The field's values.

        Of an axis that a given field is meant for, only values above 1, unless the user chose
        the axis too.
        """
        columns = self.domains.columns(name)
        if name in self.given or not any(MEANT_FOR.get(field) == name for field in self.given):
            return columns
        return {column: values[values > 1] for column, values in columns.items()}

    def _fault(self, rule: Rule, layout: Layout) -> Fault:
        read = {self.home[column] for column in rule.reads}
        given = rule.field in self.given
        field = rule.field if given else next(name for name in self.given if name in read)
        words = rule.words(layout, self.context)
        return Fault(self._path(field), getattr(layout, field), *words)

    def _path(self, field: str) -> str:
        return f"search.{'fix' if field in self.search.fix else 'allow'}.{field}"
