"""Strategies that spend probes.

Each is a generator: it yields the row to probe and is sent the result.
Ours use the product's own ask and tell. Baselines see the same legal candidates, which is more than
the tools they stand for have: an Optuna sampler as shipped would mostly propose layouts that are
not legal, here it gets the nearest legal one.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import optuna
from landscapes import JOBS, Landscape, knowing_the_family

from planner.intake.jobs import read_job
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import AC_KINDS
from planner.specs.measurement import Measured, Measurement
from planner.study.candidates import Candidates
from planner.study.knowledge import Knowledge
from planner.study.ledger import Budget, StudySettings
from planner.study.records import Record
from planner.study.samplers import FiniteSampler, SnappedSampler
from planner.study.study import ProbeStudy
from planner.study.trials import Trials

Ask = Generator[int, Measured, None]
START_SECONDS, STEPS = 60.0, 13
# no planner can have this: see landscapes.knowing_the_family
FAMILY_KNOWN = "cost-model, family known"
GRID_ORDER = (
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "dp_replicate",
    "precision",
    "compile",
    "pp_schedule",
    "virtual_stages",
    "micro_batch_size",
    "ac_kind",
    "ac_value",
    "zero_stage",
)
# a study reads results by their row, so any job may carry them
JOB = read_job(JOBS["8B on 8 H100"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The results of a probe of each candidate, (N,).

    log_seconds: infinite if it does not run.
    memory_ratio: true over predicted.
    out_of_memory: runs out of memory.
    noise_sd: of the logarithm of a measured step around the truth.
    """

    name: str
    candidates: Candidates
    log_seconds: np.ndarray
    memory_ratio: np.ndarray
    out_of_memory: np.ndarray
    noise_sd: float
    # the candidates with the truth's own covariance as prior
    family: Callable[[], Candidates] | None = None

    @classmethod
    def of_landscape(cls, land: Landscape, noise_sd: float) -> "Truth":
        """The truth of a landscape.

        A candidate runs out of memory if its true memory exceeds what is usable. True memory is the
        prior's times the ratio.
        """
        log_share = Knowledge(land.candidates).log_share + np.log(land.memory_ratio)
        return cls(
            name=land.job,
            candidates=land.candidates,
            log_seconds=land.log_seconds,
            memory_ratio=land.memory_ratio,
            out_of_memory=log_share > 0.0,
            noise_sd=noise_sd,
            family=partial(knowing_the_family, land.job, land.error),
        )

    def best_log_seconds(self) -> float:
        """Log seconds of the fastest layout that fits."""
        return float(self.log_seconds[~self.out_of_memory].min())

    def probe(self, row: int, rng: np.random.Generator) -> Measured:
        """One run."""
        if self.out_of_memory[row]:
            return Measured(status="oom", rung="probed", message="out of memory")
        seconds = float(np.exp(self.log_seconds[row] + self.noise_sd * rng.standard_normal()))
        memory = {
            kind: float(column[row] * self.memory_ratio[row])
            for kind, column in self.candidates.memory.items()
        }
        return Measured(rung="probed", step_seconds=seconds, **memory)


def product(sampler: str) -> "Strategy":
    """Our study with this sampler, stopping rule off."""

    def ask(candidates: Candidates, seed: int, probes: int) -> Ask:
        study = ProbeStudy(
            candidates,
            StudySettings(
                sampler=sampler, seed=seed, budget=Budget(probes=probes, gpu_seconds=1e15)
            ),
        )
        while (asked := study.ask()) is not None:
            measured = yield asked.row or 0
            study.tell(asked, Measurement(id="", created_at="", job=JOB, measured=measured))

    return ask


def as_shipped(make: Callable[[int], optuna.samplers.BaseSampler]) -> "Strategy":
    """Optuna's sampler with its own defaults.

    It has none of our predictions, our pruning or our memory model.
    """

    def ask(candidates: Candidates, seed: int, probes: int) -> Ask:
        knowledge = Knowledge(candidates)
        sampler: FiniteSampler = SnappedSampler(make(seed), "Optuna", knowledge, risk_limit=1.0)
        trials = Trials(sampler)
        for _ in range(min(probes, len(candidates))):
            trial = trials.ask()
            row = sampler.picks[trial.number].row
            measured = yield row
            if measured.status == "ok":
                knowledge.observe(row, measured)
            else:  # only the layout that ran out, and nothing that follows from it
                knowledge.records[row] = Record(
                    row=row,
                    status="oom",
                    log_seconds=None,
                    variance=None,
                    runs=0,
                    margin=None,
                    message="out of memory",
                )
            trials.finish(trial, knowledge.records[row], {})

    return ask


def best_first(candidates: Candidates, seed: int, probes: int) -> Ask:
    """The model's ranking of what fits, from the top; what may not fit comes after."""
    fits = candidates.prior.oom_probability <= OOM_LIMIT
    for row in np.lexsort((candidates.prior.log_seconds, ~fits))[:probes]:
        yield int(row)


def grid(candidates: Candidates, seed: int, probes: int) -> Ask:
    """Field by field, in the order of the fields."""
    for row in _grid(candidates)[:probes]:
        yield int(row)


def random(candidates: Candidates, seed: int, probes: int) -> Ask:
    """Any candidate, each as likely."""
    for row in np.random.default_rng([seed, 2]).permutation(len(candidates))[:probes]:
        yield int(row)


def history_pruning(candidates: Candidates, seed: int, probes: int) -> Ask:
    """A grid that skips what its history decides, after PaddlePaddle's auto_tuner.

    Source: python/paddle/distributed/auto_tuner/prune.py.
    With everything else equal, it skips a smaller microbatch or a higher ZeRO stage than one that
    ran, recomputation if it ran without, and a larger microbatch than one that ran out of memory.
    Larger microbatches come first.
    """
    x = candidates.batch
    order = _grid(candidates, descending=("micro_batch_size",))
    skipped = np.zeros(len(candidates), dtype=bool)
    none = AC_KINDS.index("none")
    names = [name for name, _ in x.columns()]
    for row in order:
        if skipped[row]:
            continue
        measured = yield int(row)
        ran = measured.status == "ok"

        def beside(*free: str, row: int = int(row)) -> np.ndarray:
            return np.logical_and.reduce(
                [getattr(x, name) == getattr(x, name)[row] for name in names if name not in free]
            )

        size = x.micro_batch_size
        skipped |= beside("micro_batch_size") & ((size < size[row]) if ran else (size > size[row]))
        if ran:
            skipped |= beside("zero_stage") & (x.zero_stage > x.zero_stage[row])
            skipped |= (
                beside("ac_kind", "ac_value") & (x.ac_kind != none) & (x.ac_kind[row] == none)
            )


def _grid(candidates: Candidates, descending: tuple[str, ...] = ()) -> np.ndarray:
    keys = [
        np.asarray(getattr(candidates.batch, name), dtype=float) * (-1 if name in descending else 1)
        for name in GRID_ORDER
    ]
    return np.lexsort(keys[::-1])


Strategy = Callable[[Candidates, int, int], Ask]
STRATEGIES: Mapping[str, Strategy] = {
    "cost-model": product("cost-model"),
    FAMILY_KNOWN: product("cost-model"),
    "tpe": product("tpe"),
    "gp": product("gp"),
    "nsga2": product("nsga2"),
    "random, what fits": product("random"),
    "best-first": best_first,
    "random": random,
    "grid": grid,
    "history-pruning": history_pruning,
    "tpe-as-shipped": as_shipped(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "gp-as-shipped": as_shipped(
        lambda seed: optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    ),
}
