"""Values of the contract that enumeration leaves out: tried one by one, then by Optuna.

A domain leaves out what cannot win by judgement (`JUDGED`). Every such value that the contract has
is put into the best layouts and priced. Where one is faster the judgement is wrong:
an Optuna study then proposes over all fields. Where none is, nothing is sampled.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from planner.columns import TRAINER_SPLIT, BoolColumn, IntColumn, LayoutBatch
from planner.cost.price import Pricer
from planner.estimates import simulated_columns
from planner.rules import legal_mask, violations_of
from planner.rules.base import divisors
from planner.rules.pipeline import ENDS
from planner.rules.recomputed_modules import modules_in
from planner.samplers import SAMPLERS
from planner.search.fit import OOM_LIMIT, priced_and_fitting
from planner.search.space.domains import STATES_FIELD, Domain, Domains, Values, domains_of
from planner.specs.job import SearchSpec
from planner.specs.layout import Layout, format_ac, parse_ac

MEMORY_CONSTRAINT = "device_over_usable"  # of a trial: positive where it does not fit
TRIALS, BATCH = 64, 16  # trials in all; asked for and simulated together
LEAST_GAIN = 0.002  # judgement: less is not worth a study
NEAR = 1.02  # what closed forms differ by from the simulation (benchmarks/screening.py)
JUDGED = frozenset({"tp", "cp", "micro_batch_size", "virtual_stages", "ac", "float8_all_gather"})
SHAPE = ("pp", "pp_schedule", "virtual_stages")  # how many stages a split counts
# Split, offload and memory budgets have exact searches; dtypes train another model; dp_shard takes
# the GPUs that are left.
NOT_PROPOSED = frozenset({
    "layers_per_stage", "cpu_offload", "optimizer_offload_fraction", "activation_offload_layers",
    "param_dtype", "reduce_dtype", "master_dtype", "dp_shard",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrial:
    """One proposal.

    step_seconds, device_bytes: simulated; None where it was not priced.
    refused: why it was not, as a sentence.
    """

    layout: Layout
    step_seconds: float | None = None
    device_bytes: float | None = None
    fits: bool = False
    refused: str | None = None


def contract_values(pricer: Pricer) -> dict[str, Values]:
    """Every value of the judged fields; rules refuse what cannot run.

    Recomputation has the modes that the trainer's plans have, with any count and any modules.
    """
    layers = pricer.model.num_hidden_layers
    trainer = pricer.rules_context.trainer
    modes = {parse_ac(text)[0] for text in trainer.searched_ac} | trainer.dials
    counted = ("selective-layer", "block", "uniform")
    levels = (
        *("none", "selective-op", "selective-attention", "full", "selective-layer-1", "block-1"),
        *(f"{kind}-{n}" for kind in counted for n in range(2, layers + 1)),
        *_sets_of(modules_in(pricer.rules_context)),
    )
    gpus = tuple(divisors(pricer.cluster.num_gpus))
    return {
        "tp": gpus,
        "cp": gpus,
        "micro_batch_size": tuple(divisors(pricer.training.global_batch_size)),
        "virtual_stages": tuple(range(1, layers + ENDS + 1)),
        "ac": tuple(text for text in levels if parse_ac(text)[0] in modes),
    }


def _sets_of(modules: Set[str]) -> Iterator[str]:
    """Every `ac` that recomputes a set of these modules."""
    for n in range(1, len(modules) + 1):
        for names in combinations(sorted(modules), n):
            yield format_ac(*parse_ac(f"modules-{'+'.join(names)}"))


@dataclass(slots=True, eq=False)
class LeftOut:
    """The search for missed layouts around the best ones that enumeration found.

    seeds: those layouts, the best first.
    best_seconds: a step of the fastest layout that fits, so far.
    choices: values of each field that may be proposed.
    """

    pricer: Pricer
    search: SearchSpec
    seeds: Sequence[Layout]
    best_seconds: float
    domains: Mapping[str, Domain] = field(init=False)
    choices: dict[str, Values] = field(init=False)
    known: dict[Layout, SampledTrial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.domains = domains_of(self.pricer.rules_context, self.search).by_field
        asked = {*self.search.fix, *self.search.allow, *self.pricer.rules.by_request}
        every = {name: domain.values for name, domain in self.domains.items()}
        every |= {k: v for k, v in contract_values(self.pricer).items() if k not in asked}
        self.choices = {
            name: tuple(dict.fromkeys((*values, *(getattr(one, name) for one in self.seeds))))
            for name, values in every.items()
            if name not in NOT_PROPOSED
        }

    def gains(self) -> list[tuple[int, Layout]]:
        """(place of the seed, its change) of each left-out value that makes a seed the best."""
        seeds = LayoutBatch.from_layouts(self.seeds)
        parts = [self._changed(seeds, name) for name in sorted(JUDGED & self.choices.keys())]
        batch = LayoutBatch.concatenate([part for part, _ in parts])
        places = np.concatenate([rows for _, rows in parts])
        legal = np.flatnonzero(self._legal(batch))
        step, fits = priced_and_fitting(self.pricer, batch.take(legal))
        step = np.where(fits, step, np.inf)
        near = np.argsort(step, kind="stable")
        near = near[step[near] < NEAR * (1.0 - LEAST_GAIN) * self.best_seconds][:TRIALS]
        wanted = (1.0 - LEAST_GAIN) * self.best_seconds
        layouts = batch.take(legal[near]).layouts()
        return [
            (int(places[row]), layout)
            for row, layout, trial in zip(legal[near], layouts, self.at(layouts), strict=True)
            if trial.fits and trial.step_seconds is not None and trial.step_seconds < wanted
        ]

    def _changed(self, seeds: LayoutBatch, name: str) -> tuple[LayoutBatch, IntColumn]:
        """(seeds with each value of a field that no domain lists, which seed each row is of)."""
        values = self.choices[name]
        table = Domains(by_field={name: replace(self.domains[name], values=values)})
        rows = np.repeat(np.arange(len(seeds)), len(values))
        columns: dict[str, Any] = {
            key: np.tile(column, len(seeds)) for key, column in table.columns(name).items()
        }
        possible = np.ones(len(rows), dtype=np.bool_)
        if name in ("tp", "cp"):
            ranks = (seeds.dp_shard * getattr(seeds, name))[rows]
            columns["dp_shard"] = np.maximum(ranks // columns[name], 1)
            possible = ranks % columns[name] == 0
        if name == "virtual_stages":
            columns["split"] = np.full(len(rows), TRAINER_SPLIT)
            possible = seeds.pp[rows] > 1
        batch = replace(seeds.take(rows), **columns)
        listed = {*self.domains[name].values, *(getattr(one, name) for one in self.seeds)}
        seen = np.tile([value in listed for value in values], len(seeds))
        if self.domains[name].first_legal:  # of its values one is listed
            seen = columns[name] == getattr(seeds, name)[rows]
        new = np.flatnonzero(possible & ~(seen & self._listed(batch, JUDGED)))
        return batch.take(new), rows[new]

    def _legal(self, batch: LayoutBatch) -> BoolColumn:
        """Without second forms, other training runs and measured failures."""
        facts = self.domains.keys() - JUDGED - {STATES_FIELD}
        return legal_mask(batch, self.pricer.rules_context) & self._listed(batch, facts)

    def _listed(self, batch: LayoutBatch, names: Set[str]) -> BoolColumn:
        found = np.ones(len(batch), dtype=np.bool_)
        for keep in (self.domains[name].keep for name in names):
            if keep is not None:
                found &= keep.mask(batch, self.pricer.rules_context)
        return found

    def propose(
        self, gains: Sequence[tuple[int, Layout]], *, name: str, seed: int
    ) -> list[SampledTrial]:
        """Trials of an Optuna study that starts from the seeds and from `gains`.

        name, seed: of the sampler.

        The objective is simulated step seconds, with memory as a constraint. A layout that breaks a
        rule, or cannot beat the best by a lower bound, is pruned.
        """
        import optuna  # takes half a second

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(sampler=SAMPLERS.find(name).optuna_sampler(seed))
        for place, layout in [*enumerate(self.seeds), *gains][:TRIALS]:
            at = {one: values.index(getattr(layout, one)) for one, values in self.choices.items()}
            study.enqueue_trial({"start": place, **at})
        ends = {"start": len(self.seeds)} | {one: len(v) for one, v in self.choices.items()}
        trials: list[SampledTrial] = []
        while len(trials) < TRIALS:
            asked = [study.ask() for _ in range(BATCH)]
            points = [
                {one: trial.suggest_int(one, 0, end - 1) for one, end in ends.items() if end > 1}
                for trial in asked
            ]
            trials += (answers := self.at([self._layout(point) for point in points]))
            for trial, answer in zip(asked, answers, strict=True):
                if answer.step_seconds is None or answer.device_bytes is None:
                    trial.set_user_attr("reason", answer.refused)
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    usable = self.pricer.cluster.usable_memory_bytes
                    trial.set_constraint(MEMORY_CONSTRAINT, answer.device_bytes / usable - 1.0)
                    study.tell(trial, answer.step_seconds)
        return trials

    def _layout(self, point: Mapping[str, int]) -> Layout:
        seed = self.seeds[point.get("start", 0)]
        update = {one: values[point.get(one, 0)] for one, values in self.choices.items()}
        if any(update[one] != getattr(seed, one) for one in SHAPE):
            update["layers_per_stage"] = None
        changed = seed.model_copy(update=update)
        ranks = changed.tp * changed.cp * changed.pp * changed.dp_replicate
        left = max(self.pricer.cluster.num_gpus // ranks, 1)
        return changed.model_copy(update={"dp_shard": left})

    def at(self, layouts: Sequence[Layout]) -> list[SampledTrial]:
        """Each layout refused by a rule or a lower bound, or simulated; worked out once."""
        new = [one for one in dict.fromkeys(layouts) if one not in self.known]
        if new:
            batch, context = LayoutBatch.from_layouts(new), self.pricer.rules_context
            faults, facts = violations_of(new, batch, context), self._legal(batch)
            for one, broken, fact in zip(new, faults, facts, strict=True):
                if broken:
                    self._refuse(one, f"{broken[0].field}={broken[0].value}: {broken[0].rule}")
                elif not fact:
                    self._refuse(one, "another form of a layout, or another training run")
            self._price([one for one in new if one not in self.known])
        return [self.known[one] for one in layouts]

    def _price(self, legal: Sequence[Layout]) -> None:
        if not legal:
            return
        bounds = self.pricer.layout_lower_bounds(LayoutBatch.from_layouts(legal))
        for row in np.flatnonzero(bounds >= self.best_seconds).tolist():
            said = f"a step takes at least {bounds[row]:.4g} s by a lower bound; the best takes "
            self._refuse(legal[row], f"{said}{self.best_seconds:.4g} s")
        usable = self.pricer.cluster.usable_memory_bytes
        left = [one for one in legal if one not in self.known]
        for one, (step, oom, over) in zip(left, simulated_columns(self.pricer, left), strict=True):
            if np.isinf(step):
                self._refuse(one, "cannot be simulated")
                continue
            self.known[one] = SampledTrial(
                layout=one, step_seconds=step, device_bytes=(1 + over) * usable,
                fits=oom <= OOM_LIMIT,
            )  # fmt: skip
            if self.known[one].fits:
                self.best_seconds = min(self.best_seconds, step)

    def _refuse(self, layout: Layout, why: str) -> None:
        self.known[layout] = SampledTrial(layout=layout, refused=why)
