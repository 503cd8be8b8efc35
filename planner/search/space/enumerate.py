"""All legal layouts of a job as columns, without building each of them.

A cell is a legal choice of degrees, experts, microbatch, recomputation and precision. The other
fields (schedule, ZeRO stage, switches) form components that no rule ties together, such as
{schedule, virtual stages, compile} and {zero_stage}. What a component may be depends on a few
columns of the cell, so it is worked out once per distinct case ("class"). A cell expands to the
product of its components' tables, and the number of layouts is a sum of products.

Letters: N cells, C classes of a component, T rows of its table, V values of a domain.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.columns import COLUMNS, BoolColumn, Column, IntColumn, LayoutBatch, narrow, taken
from planner.rules import Context, Rule, rules_for
from planner.rules.degrees import PRODUCT_KEY
from planner.search.space.domains import CELL_FIELDS, FREE_FIELDS, Domain, Domains, domains_of
from planner.search.space.keeps import Keep
from planner.search.space.rows import (
    Columns,
    Mask,
    Rows,
    all_choices,
    kinds_of,
    length,
    unique_boolean_rows,
)
from planner.specs.job import SearchSpec

DEGREES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
MAX_TRIED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """One component with its classes.

    table: columns (T,) of the component's fields.
    classes: class of each cell (N,).
    rows: indices into the table of what is legal, class after class, best guess first.
    starts, counts (C,): the part of `rows` of each class.
    """

    table: Columns
    classes: IntColumn
    starts: IntColumn
    counts: IntColumn
    rows: IntColumn

    def first(self) -> Columns:
        """The component's fields in the first expansion of each cell, `narrow`.

        A field that is the same in all is one number.
        """
        there = self.counts > 0  # cells without a legal expansion are gone
        row = np.zeros(len(there), dtype=np.int64)
        row[there] = self.rows[self.starts[there]]
        columns: Columns = {}
        for name, column in self.table.items():
            of_class = column[row]
            alike = of_class[there]
            if len(alike) and (alike == alike[0]).all():
                columns[name] = np.broadcast_to(alike[0], len(self.classes))
            else:
                columns[name] = narrow(of_class)[self.classes]
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All legal layouts of a job.

    cells (N,): each with its free fields at their first legal value; columns are `narrow`, those of
        what is taken from them are not.
    cell_sizes (N,): layouts in each cell.
    rejected: candidates that a rule excluded, under the first rule that did.

    A candidate counts once, where it was excluded: a tp that does not divide the heads does not
    count again for every pp. A cell in which nothing is legal counts under the rule that excluded
    its most nearly legal expansion. Duplicates that a domain leaves out do not count.
    """

    cells: LayoutBatch
    cell_sizes: IntColumn
    rejected: Mapping[str, int]
    expansions: tuple[Expansion, ...]

    @property
    def num_layouts(self) -> int:
        return int(self.cell_sizes.sum())

    def take(self, cells: IntColumn) -> "Space":
        expansions = tuple(replace(one, classes=one.classes[cells]) for one in self.expansions)
        columns = {
            name: taken(column, cells) if column.strides == (0,) else column[cells]
            for name, column in self.cells.columns()
        }
        return replace(
            self,
            cells=LayoutBatch(**columns, splits=self.cells.splits),
            cell_sizes=self.cell_sizes[cells],
            expansions=expansions,
        )

    def expand(self, cells: Column | slice) -> LayoutBatch:
        """All layouts of these cells (indices, mask or slice), in the order of the cells."""
        return self.expanded(cells).batch()

    def expanded(self, cells: Column | slice) -> "Expanded":
        """The rows, before their columns are worked out."""
        chosen = np.arange(len(self.cells))[cells]
        sizes = self.cell_sizes[chosen]
        rest, places = _counted(sizes), []
        for expansion in self.expansions:
            classes = expansion.classes[chosen]
            rest, choice = np.divmod(rest, np.repeat(narrow(expansion.counts[classes]), sizes))
            places.append(np.repeat(expansion.starts[classes], sizes) + choice)
        owner = np.repeat(np.arange(len(chosen)), sizes)
        return Expanded(space=self, chosen=chosen, owner=owner, places=tuple(places))

    def kinds(
        self, columns: Sequence[IntColumn], names: Sequence[str]
    ) -> tuple[IntColumn, "Space"]:
        """(kind of each cell (N,), one cell of each kind).

        Cells of one kind are equal in these columns (N,) and in what their expansions allow of the
        fields of these names.
        """
        of = [one.classes for one in self.expansions if not one.table.keys().isdisjoint(names)]
        firsts, kinds = kinds_of([*columns, *of], len(self.cells))
        return kinds, self.take(firsts)

    def schedules(self) -> Iterator[tuple[int, IntColumn]]:
        """(a schedule, the most stages a rank has in any layout of each cell with it (N,)).

        0 where a cell has no such layout.
        """
        named, staged = (
            next((one for one in self.expansions if name in one.table), None)
            for name in ("pp_schedule", "virtual_stages")
        )
        codes = self.cells.pp_schedule if named is None else named.table["pp_schedule"]
        most = self.cells.virtual_stages
        if staged is not None and staged is not named:
            most = self._most_stages(staged, staged.table["virtual_stages"])
        for code in np.unique(codes).tolist():
            there = codes == code
            if named is None:
                yield code, np.where(there, most, 0)
            elif named is staged:
                stages = np.where(there, named.table["virtual_stages"], 0)
                yield code, self._most_stages(named, stages)
            else:
                yield code, self._most_stages(named, there.astype(np.int64)) * most

    def _most_stages(self, expansion: Expansion, stages: IntColumn) -> IntColumn:
        """The largest of these (T,) in any expansion of each cell, (N,)."""
        owner = np.repeat(np.arange(len(expansion.counts)), expansion.counts)
        most = np.zeros(len(expansion.counts), dtype=np.int64)
        np.maximum.at(most, owner, stages[expansion.rows])
        return most[expansion.classes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """N layouts of a space, whose columns are worked out when they are asked for.

    Many are left out for what few of their columns say.
    chosen: cells. owner (N,): the place in `chosen` of each layout's cell. places: of each
        expansion, the place in its `rows` of each layout, (N,).
    """

    space: Space
    chosen: IntColumn
    owner: IntColumn
    places: tuple[IntColumn, ...]

    def __len__(self) -> int:
        return len(self.owner)

    @property
    def cells(self) -> IntColumn:
        """The cell of each layout, (N,)."""
        return self.chosen[self.owner]

    def take(self, rows: BoolColumn) -> "Expanded":
        at = np.flatnonzero(rows)
        return replace(self, owner=self.owner[at], places=tuple(place[at] for place in self.places))

    def batch(self, names: Collection[str] = COLUMNS) -> LayoutBatch:
        """The layouts. Columns of other names are one number, which means nothing."""
        cells = self.cells
        found = {name: (column, cells) for name, column in self.space.cells.columns()}
        for expansion, place in zip(self.space.expansions, self.places, strict=True):
            row = place if expansion.table.keys().isdisjoint(names) else expansion.rows[place]
            found.update({name: (column, row) for name, column in expansion.table.items()})
        columns = {
            name: taken(column, at) if name in names else np.broadcast_to(column[:1], len(at))
            for name, (column, at) in found.items()
        }
        return LayoutBatch(**columns, splits=self.space.cells.splits)


def _counted(sizes: IntColumn) -> IntColumn:
    """The numbers from 0 to each of these sizes, one after the other; `narrow`."""
    first = np.repeat(narrow(np.cumsum(sizes) - sizes), sizes)
    return np.asarray(np.arange(len(first), dtype=first.dtype) - first)


def build_space(
    context: Context,
    search: SearchSpec | None = None,
    *,
    offload: bool = False,
    oversized: bool = False,
) -> Space:
    """The space of one job on one number of GPUs.

    search: its `fix` and `allow` narrow or widen the default domains.
    offload: cpu_offload on in all layouts.
    oversized: include degrees whose model states by themselves exceed the device, to report how far
        from fitting they are.

    Raises SpecError for unknown fields and ill-typed values. A space without legal layouts is no
    error: it is empty, and `rejected` gives the reasons.
    """
    domains = domains_of(context, search or SearchSpec(), offload=offload, oversized=oversized)
    return enumerate_space(context, domains)


def enumerate_space(
    context: Context, domains: Domains, *, without: frozenset[str] = frozenset()
) -> Space:
    """The space that these domains span.

    without: keys of rules that are left out, to see what only they forbid.
    """
    builder = _Builder(context, domains, without)
    for name in CELL_FIELDS:
        builder.cross(name)
    return builder.space()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """Free fields tied together by rules.

    It holds their crossed table, and the rules and keeps that read it.
    known: columns that are the same in all cells.
    """

    domains: tuple[Domain, ...]
    shape: tuple[int, ...]
    table: Columns
    rules: tuple[Rule, ...]
    known: frozenset[str]

    @property
    def keeps(self) -> tuple[Keep, ...]:
        return tuple(domain.keep for domain in self.domains if domain.keep is not None)

    def of_cell(self, tie: Rule | Keep) -> frozenset[str]:
        """Columns that a rule or keep reads of a cell, and not of the table."""
        return tie.reads - self.table.keys() - self.known

    @property
    def reads(self) -> frozenset[str]:
        ties: tuple[Rule | Keep, ...] = (*self.rules, *self.keeps)
        return frozenset[str]().union(*map(self.of_cell, ties))

    def first_legal(self, kept: BoolColumn) -> BoolColumn:
        """The kept rows, with one value of each domain that lists the first legal one alone."""
        grid = kept.reshape(len(kept), *self.shape)
        for axis, domain in enumerate(self.domains, start=1):
            if domain.first_legal:
                grid = grid & (np.cumsum(grid, axis=axis) == 1)
        return grid.reshape(kept.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Verdict of one rule or keep on each cell's expansions.

    Cells that read the same to it are one case, and so are cells of which it says the same.

    cases: case of each cell (N,).
    holds: what it says, (cases, parts of the table that it tells apart).
    parts: part of each table row (T,).
    """

    cases: IntColumn
    holds: BoolColumn
    parts: IntColumn

    @classmethod
    def ask(
        cls, tie: Rule | Keep, mask: Mask, rows: Rows, cells: Columns, component: _Component
    ) -> "_Verdict":
        """The mask once for each distinct case of what it reads of these cells and of the table."""
        table, count = component.table, length(cells) if cells else 1
        of_cell = component.of_cell(tie)
        firsts, cases = kinds_of([cells[name] for name in of_cell], count)
        heads, parts = kinds_of([table[name] for name in table.keys() & tie.reads], length(table))
        crossed = {
            **rows.constants,
            **{name: column[firsts][:, None] for name, column in cells.items()},
            **{name: column[heads] for name, column in table.items()},
        }
        values = np.broadcast_to(mask(rows.batch(crossed), rows.context), (len(firsts), len(heads)))
        alike, same = unique_boolean_rows(values)
        return cls(cases=same[cases], holds=values[alike], parts=parts)

    def of(self, cells: IntColumn) -> BoolColumn:
        """Verdict on each table row, for these cells, (C, T)."""
        return np.asarray(self.holds[self.cases[cells]][:, self.parts])


class _Builder:
    """Crosses the domains one by one; drops what a rule excludes as soon as it can be checked."""

    def __init__(self, context: Context, domains: Domains, without: frozenset[str]) -> None:
        self.context, self.domains = context, domains
        self.rows = Rows(context, domains.splits)
        self.rejected: Counter[str] = Counter()
        self.rules = [rule for rule in rules_for(context) if rule.key not in without]
        self.values = {name: self._legal_values(name) for name in (*CELL_FIELDS, *FREE_FIELDS)}
        single = [columns for columns in self.values.values() if length(columns) == 1]
        self.rows.constants = {
            name: column for columns in single for name, column in columns.items()
        }
        self.impossible = any(length(columns) == 0 for columns in self.values.values())
        self.rules = [rule for rule in self.rules if self._may_break(rule)]
        self.expansions: list[Expansion] = []
        self.pending = self._components()
        self.keeps = [
            keep
            for name, columns in self.values.items()
            if (name in CELL_FIELDS or length(columns) == 1)
            and (keep := self.domains.by_field[name].keep)
        ]
        self._factor(given=True)
        self._prune()

    # ---- one field at a time ----

    def _legal_values(self, name: str) -> Columns:
        """The domain's columns, without values that a rule always excludes."""
        columns, domain = self.domains.columns(name), self.domains.by_field[name]
        batch = self.rows.batch(columns)
        legal = np.ones(length(columns), dtype=np.bool_)
        for rule in self.rules:
            if rule.reads <= columns.keys():
                broken = rule.broken(batch, self.context) & legal
                if domain.given or name in CELL_FIELDS:
                    self.rejected[rule.key] += int(broken.sum())
                legal &= ~broken
        return {column: values[legal] for column, values in columns.items()}

    def _may_break(self, rule: Rule) -> bool:
        """Whether some combination of the values that the rule reads breaks it.

        Rules that cannot break are dropped: fewer rules tie fewer fields.
        """
        fields = [columns for columns in self.values.values() if not rule.reads.isdisjoint(columns)]
        if not np.prod([length(columns) for columns in fields]) <= MAX_TRIED:
            return True
        tried = self.rows.batch(all_choices(fields))
        return bool(rule.broken(tried, self.context).any())

    def cross(self, name: str) -> None:
        """Crosses all rows with all values of this field, and drops what a rule now excludes."""
        columns, given = self.values[name], self.domains.by_field[name].given
        if self.impossible or columns.keys() <= self.rows.constants.keys():
            return
        if name == "dp_shard" and not given:
            self.rows.columns[name] = narrow(self.context.cluster.num_gpus // self._product())
        else:
            self.rows.cross({name: narrow(values) for name, values in columns.items()})
        if name in DEGREES:
            self._factor(given)
        self._prune()

    # ---- dropping rows ----

    def _product(self) -> IntColumn:
        product = np.ones(self.rows.count, dtype=np.int64)
        for axis in DEGREES:
            if axis in self.rows.columns:
                product = product * self.rows.columns[axis]
            elif axis in self.rows.constants:
                product = product * self.rows.constants[axis]
        return product

    def _factor(self, given: bool) -> None:
        """Drops rows whose product does not divide the number of GPUs.

        They count as rejected only if the user gave the degree: degrees are
        enumerated as factorisations.
        """
        fits = self.context.cluster.num_gpus % self._product() == 0
        if given:
            self.rejected[PRODUCT_KEY] += int((~fits).sum())
        self._take(fits)

    def _prune(self) -> None:
        """Applies the rules whose columns are known, then resolves the components that can be."""
        known = self.rows.columns.keys() | self.rows.constants.keys()
        alive = np.ones(self.rows.count, dtype=np.bool_)
        for rule in [rule for rule in self.rules if rule.reads <= known]:
            self.rules.remove(rule)
            broken = self.rows.of_cells(rule.reads, rule.broken) & alive
            self.rejected[rule.key] += int(broken.sum())
            alive &= ~broken
        for keep in [keep for keep in self.keeps if keep.reads <= known]:
            self.keeps.remove(keep)
            kept = self.rows.of_cells(keep.reads, keep.mask)
            if keep.counted:
                self.rejected[keep.counted] += int((alive & ~kept).sum())
            alive &= kept
        self._take(alive)
        for component in [component for component in self.pending if component.reads <= known]:
            self.pending.remove(component)
            self._resolve(component)

    def _take(self, alive: BoolColumn) -> None:
        if not alive.all():
            self.rows.take(np.flatnonzero(alive))

    # ---- components ----

    def _components(self) -> list[_Component]:
        """Free fields with more than one value, grouped so that no rule reads two groups."""
        free = [name for name in FREE_FIELDS if length(self.values[name]) > 1]
        groups: list[list[str]] = [[name] for name in free]
        keeps = [keep for name in free if (keep := self.domains.by_field[name].keep)]
        for reads in [*(rule.reads for rule in self.rules), *(keep.reads for keep in keeps)]:
            tied = [
                group for group in groups if any(reads & self.values[name].keys() for name in group)
            ]
            if len(tied) > 1:
                rest = [group for group in groups if group not in tied]
                groups = [*rest, [name for group in tied for name in group]]
        return [self._component([name for name in free if name in group]) for group in groups]

    def _component(self, names: Sequence[str]) -> _Component:
        shape = tuple(length(self.values[name]) for name in names)
        table = all_choices([self.values[name] for name in names])
        domains = tuple(self.domains.by_field[name] for name in names)
        rules = tuple(rule for rule in self.rules if rule.reads & table.keys())
        self.rules = [rule for rule in self.rules if rule not in rules]
        known = frozenset(self.rows.constants)
        return _Component(domains=domains, shape=shape, table=table, rules=rules, known=known)

    def _resolve(self, component: _Component) -> None:
        """Finds the classes of the rows; drops and counts rows without a legal expansion.

        Rows that all rules and keeps read the same of are one kind, and are asked about once.
        """
        heads, kinds = self.rows.cases(component.reads)
        one_each = self.rows.at(heads)
        asked = self.rows, one_each, component
        rules = [_Verdict.ask(rule, rule.broken, *asked) for rule in component.rules]
        keeps = [_Verdict.ask(keep, keep.mask, *asked) for keep in component.keeps]
        firsts, classes = kinds_of([one.cases for one in (*rules, *keeps)], len(heads))
        classes = classes[kinds]
        legal = np.ones((len(firsts), length(component.table)), dtype=np.bool_)
        first_broken = np.full(legal.shape, len(component.rules))
        for index, rule in enumerate(rules):
            broken = rule.of(firsts) & legal
            first_broken[broken] = index
            legal &= ~broken
        for keep in keeps:
            legal &= keep.of(firsts)
        kept = component.first_legal(legal)
        counts = kept.sum(axis=1)
        lost = np.bincount(classes, minlength=len(firsts)) * (counts == 0)
        self._count_empty(component, first_broken, lost)
        self.rows.columns[f"class {len(self.expansions)}"] = narrow(classes)
        starts, rows = np.cumsum(counts) - counts, np.nonzero(kept)[1]
        table = component.table
        self.expansions.append(
            Expansion(table=table, classes=classes, starts=starts, counts=counts, rows=rows)
        )
        self._take(counts[classes] > 0)

    def _count_empty(self, component: _Component, first_broken: IntColumn, lost: IntColumn) -> None:
        """Counts lost rows under the rule that their most nearly legal table row breaks first.

        lost (C,): rows lost with each class.
        first_broken (C, T): the first rule that each table row breaks.
        """
        keys = [*(rule.key for rule in component.rules), "twin of another layout"]
        for case in np.flatnonzero(lost):
            self.rejected[keys[int(first_broken[case].max())]] += int(lost[case])

    # ---- the result ----

    def space(self) -> Space:
        rejected = {key: count for key, count in self.rejected.most_common() if count}
        if self.impossible:
            nothing = np.zeros(0, dtype=np.int64)
            cells = self.rows.batch({}).take(nothing)
            return Space(cells=cells, cell_sizes=nothing, rejected=rejected, expansions=())
        num_rows = self.rows.count
        undecided = [*self.rules, *self.keeps, *self.pending]
        assert not undecided, "a rule reads a column that no domain supplies"
        expansions = tuple(
            replace(e, classes=self.rows.columns.pop(f"class {index}"))
            for index, e in enumerate(self.expansions)
        )
        constants = self.rows.constants.items()
        columns = {name: np.broadcast_to(column, num_rows) for name, column in constants}
        columns |= self.rows.columns
        sizes = np.ones(num_rows, dtype=np.int64)
        for expansion in expansions:
            columns.update(expansion.first())
            sizes *= expansion.counts[expansion.classes]
        return Space(
            cells=self.rows.batch(columns),
            cell_sizes=sizes,
            rejected=rejected,
            expansions=expansions,
        )
