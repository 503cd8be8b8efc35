"""Checks on replayed studies that their results agree with their measurements.

    python benchmarks/replay_studies.py [--seeds N] [--probes N]

Exits 1 if a promise is broken. Studies run on published sweeps and generated landscapes, with
noise, over seeds. Each is the product's own loop (`planner.study.ask_tell.run`: stopping
rule, repeats and smaller runs included) on a hidden truth, its result read as a plan reads
it. The promises:

- the answer is a measured layout if there is one, and no measurement is faster than its own;
- measured layouts are in the order of their measurements, and all that fitted are listed;
- the best so far never gets worse while probes are added, and is the answer's step in the end;
- what nobody measured is measured by the first probe after number 1's.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np
from landscapes import JOBS, NOISE_SD, generate, prepared
from replay_strategies import JOB, START_SECONDS, STEPS, Truth
from replay_sweeps import published_sweeps

from planner.calibration.basis import unmeasured
from planner.search.fit import OOM_LIMIT
from planner.specs.measurement import Measurement
from planner.study.ask_tell import Event, StudyResult, run
from planner.study.evaluations import ProbeCost, Proposal
from planner.study.isolating import isolating
from planner.study.ledger import Budget, StudySettings
from planner.study.measured_search import listed
from planner.study.samplers import Pick

SEEDS, PROBES, TOP_K = 5, 8, 3
ERRORS = (0.05, 0.30)
NOISES = (NOISE_SD, 0.10)  # a quiet cluster, and a shared one
SURPRISES = (-0.1, 0.15)  # what nobody measured is faster, or slower, than the model says
SURPRISING_ERROR = 0.05
CLOSE = 1e-12  # of a step, between two ways to add the same numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Number 1 on paper, and the layout beside it that isolates what nobody measured, by rows."""

    first: int
    isolating: Pick


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One study.

    told: row and step seconds of every run of a layout itself, in order; None for out of memory.
    pair: where some candidates rest on what nobody measured.
    """

    name: str
    outcome: StudyResult
    told: Sequence[tuple[int, float | None]]
    events: Sequence[Event]
    pair: Pair | None = None


@dataclass(kw_only=True)
class Machine:
    """Answers a study's questions from a hidden truth."""

    truth: Truth
    rng: np.random.Generator
    told: list[tuple[int, float | None]] = field(default_factory=list)

    def measure(self, one: Proposal) -> Measurement:
        """A `Measure`."""
        assert one.row is not None, "these studies time no kernels"
        numbers = self.truth.probe(one.row, self.rng)
        self.told.append((one.row, numbers.step_seconds))
        name = f"m-{len(self.told)}"
        return Measurement(id=name, created_at="", job=JOB, measured=numbers)


def play(
    truth: Truth, seed: int, *, probes: int, tolerance: float, pair: Pair | None = None
) -> Played:
    """Plays one study to its end.

    tolerance: the regret at which it stops; below 0 it spends all its probes.
    """
    machine, events = Machine(truth=truth, rng=np.random.default_rng([seed, 1])), list[Event]()
    settings = StudySettings(
        seed=seed,
        budget=Budget(probes=probes, gpu_seconds=1e15),
        tolerance=tolerance,
        cost=ProbeCost(start_seconds=START_SECONDS, steps=STEPS),
        first=None if pair is None else pair.first,
        isolating=None if pair is None else pair.isolating,
    )
    outcome = run(truth.candidates, settings, machine.measure, on_event=events.append)
    return Played(name=truth.name, outcome=outcome, told=machine.told, events=events, pair=pair)


def surprising(name: str, seed: int, off: float) -> tuple[Truth, Pair]:
    """A landscape whose layouts that rest on what nobody measured take exp(off) times as long.

    Number 1 does without, and the fastest of the others is the fastest on paper.
    """
    pricer, candidates = prepared(name)
    rests = unmeasured(candidates.batch, pricer, pricer.calibration).any(axis=1)
    truth = Truth.of_landscape(generate(name, SURPRISING_ERROR, seed), NOISE_SD)
    fits = (candidates.prior.oom_probability <= OOM_LIMIT) & ~truth.out_of_memory
    first, paper = (int(np.flatnonzero(fits & mask)[0]) for mask in (~rests, rests))
    found = isolating(pricer, candidates.batch.row(first), candidates.batch.row(paper))
    assert found is not None, "the fastest of the others rests on something"
    row = candidates.find(found.layout)
    pick = Pick(row=paper if row is None else row, reason=found.reason)
    return (
        replace(
            truth, name=f"{name}, off by {off:+.0%}", log_seconds=truth.log_seconds + off * rests
        ),
        Pair(first=first, isolating=pick),
    )


def violations(played: Played, top_k: int = TOP_K) -> list[str]:
    """The promises that a study broke, as sentences with numbers."""
    times: dict[int, float] = {}
    for row, seconds in played.told:
        if seconds is None:
            times.pop(row, None)  # it ran out of memory
        elif row in times or not any(row == other and step is None for other, step in played.told):
            times[row] = min(seconds, times.get(row, np.inf))
    if played.pair is not None and [row for row, _ in played.told[:2]] != [
        played.pair.first,
        played.pair.isolating.row,
    ]:
        return ["what nobody measured was not measured after number 1"]
    shown = listed(played.outcome, top_k)
    best = [
        event.best_seconds
        for event in played.events
        if event.best_fidelity == "probed" and event.best_seconds
    ]
    broken = [
        f"the best so far rose from {before:.6g} s to {after:.6g} s"
        for before, after in pairwise(best)
        if after > before * (1.0 + CLOSE)
    ]
    if not times:
        return broken
    fastest, winner = min(times.values()), shown[0]
    if winner.row not in times:
        broken.append("the answer was not measured")
    elif times[winner.row] > fastest * (1.0 + CLOSE):
        broken.append(
            f"the answer was measured at {times[winner.row]:.6g} s, another at {fastest:.6g} s"
        )
    if abs(winner.expected_seconds / fastest - 1.0) > 1e-9:
        broken.append(
            f"the headline says {winner.expected_seconds:.6g} s, the best measured is "
            f"{fastest:.6g} s"
        )
    if best and abs(best[-1] / fastest - 1.0) > 1e-9:
        broken.append(f"the last line said {best[-1]:.6g} s, the best measured is {fastest:.6g} s")
    missing = set(times) - {one.row for one in shown}
    if missing:
        broken.append(f"{len(missing)} measured layouts are not listed")
    order = [times[one.row] for one in shown if one.row in times]
    if order != sorted(order):
        broken.append("a measured layout stands below a slower measured one")
    return broken


def studies(seeds: int, probes: int) -> Iterator[tuple[str, Played]]:
    """(kind, study) of all truths.

    Every seed with noise, stopped by the regret and not, one probe at a time and three.
    """
    sweeps = published_sweeps()
    for seed, noise in product(range(seeds), NOISES):
        for truth in sweeps:
            noisy = replace(truth, noise_sd=noise)
            yield "published sweeps", play(noisy, seed, probes=probes, tolerance=-1.0)
    for seed, name, off in product(range(seeds), JOBS, SURPRISES):
        truth, pair = surprising(name, seed, off)
        yield "unmeasured mechanisms", play(truth, seed, probes=probes, tolerance=0.01, pair=pair)
    for seed, error, noise in product(range(seeds), ERRORS, NOISES):
        for name in JOBS:
            truth = Truth.of_landscape(generate(name, error, seed), noise)
            whole = seed % 2 == 0
            yield (
                "generated landscapes",
                play(truth, seed, probes=probes, tolerance=-1.0 if whole else 0.01),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--probes", type=int, default=PROBES)
    options = parser.parse_args()
    counts: dict[str, list[int]] = {}
    broken = 0
    for kind, played in studies(options.seeds, options.probes):
        found = violations(played)
        repeats = len(played.told) - len({row for row, _ in played.told})
        tally = counts.setdefault(kind, [0, 0, 0, 0])
        ooms = sum(seconds is None for _, seconds in played.told)
        for index, value in enumerate((1, len(played.told), repeats, ooms)):
            tally[index] += value
        broken += len(found)
        if tally[0] % 10 == 0:
            print(f"{kind}: {tally[0]} studies so far", file=sys.stderr, flush=True)
        for line in found:
            print(f"{kind}, {played.name}: {line}")
    for kind, (number, probes, repeats, ooms) in counts.items():
        print(
            f"{kind}: {number} studies, {probes} probes ({repeats} repeats, {ooms} out of memory)"
        )
    print(
        f"{sum(tally[0] for tally in counts.values())} replayed studies, {broken} broken promises"
    )
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
