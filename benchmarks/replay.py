"""Replays measured sweeps and generated landscapes as hidden truth for probing strategies.

    python benchmarks/replay.py [--seeds N] [--only KIND] [--write]
    python benchmarks/replay.py --likelihood

--write renews docs/replay.md and docs/replay.svg. --likelihood prints how likely the published
sweeps make the surrogate's weights.

A strategy sees only the cost model's predictions and the results of its own probes. Regret is how
much slower the best layout that it measured is than the best that fits. Sweeps are published rows
of one job, predicted by a calibration without their source. Landscapes are those of
`landscapes.py`, with the whole legal set as candidates.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from landscapes import JOBS, NOISE_SD, generate
from replay_runs import MEASURED, OWN, Run
from replay_strategies import FAMILY_KNOWN, START_SECONDS, STEPS, STRATEGIES, Truth
from replay_sweeps import own_sweeps, published_sweeps

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PROBES = 12
GOAL = 0.02
ERRORS = (0.05, 0.10, 0.30)
# landscapes of each job and error; with 5, chance decided whether nine of ten were reached
SEEDS = 15
WITHOUT_CHANCE = ("cost-model", "best-first", "grid", "history-pruning")
# fewer seeds for strategies that take long to ask
SLOW = {"tpe-as-shipped": 3, "gp-as-shipped": 2, "tpe": 3, "gp": 2, "nsga2": 3}
FIXED = {MEASURED: published_sweeps, OWN: own_sweeps}  # truths that are the same for every seed


def replay(truth: Truth, strategy: str, seed: int, kind: str) -> Run:
    """Plays one strategy on one truth."""
    candidates = truth.family() if strategy == FAMILY_KNOWN and truth.family else truth.candidates
    ask = STRATEGIES[strategy](candidates, seed, PROBES)
    rng = np.random.default_rng([seed, 1])
    best, regret, gpu_seconds, ooms, spent = np.inf, [], [], [], 0.0
    num_oom = 0
    goal = truth.best_log_seconds()
    answer = None
    while len(regret) < PROBES:
        try:
            row = next(ask) if answer is None else ask.send(answer)
        except StopIteration:
            break
        answer = truth.probe(row, rng)
        num_oom += answer.status == "oom"
        seconds = 0.0 if answer.step_seconds is None else STEPS * answer.step_seconds
        spent += truth.candidates.size.num_gpus * (START_SECONDS + seconds)
        if answer.status == "ok":
            best = min(best, float(truth.log_seconds[row]))
        regret.append(float(np.expm1(best - goal)))
        gpu_seconds.append(spent)
        ooms.append(num_oom)
    reached = next((index for index, value in enumerate(regret) if value <= GOAL), None)
    last = len(regret) - 1 if reached is None else reached
    padded = regret + [regret[-1]] * (PROBES - len(regret))
    return Run(
        strategy=strategy,
        kind=kind,
        truth=truth.name,
        seed=seed,
        regret=tuple(padded),
        to_goal=PROBES + 1 if reached is None else reached + 1,
        gpu_seconds=gpu_seconds[last],
        probes=len(regret),
        oom=ooms[-1],
    )


def truths(kind: str, seed: int) -> Iterator[Truth]:
    """All hidden truths of one kind."""
    if kind in FIXED:
        yield from FIXED[kind]()
        return
    for name in JOBS:
        land = generate(name, float(kind.split()[-1].rstrip("%")) / 100.0, seed)
        yield Truth.of_landscape(land, NOISE_SD)


GENERATED = tuple(f"generated, error {error:.0%}" for error in ERRORS)
KINDS = (MEASURED, OWN, *GENERATED)


def play(
    kinds: Sequence[str], strategies: Sequence[str], seeds: int, say: Callable[[str], None]
) -> list[Run]:
    """All runs.

    A measured sweep has no noise of its own, so deterministic strategies play it once.
    """
    runs: list[Run] = []
    for kind in kinds:
        for seed in range(seeds):
            chosen = [name for name in strategies if seed < SLOW.get(name, seeds)]
            if kind in FIXED:
                chosen = [
                    name
                    for name in chosen
                    if name != FAMILY_KNOWN and not (seed and name in WITHOUT_CHANCE)
                ]
            for truth in truths(kind, seed) if chosen else ():
                runs += [replay(truth, name, seed, kind) for name in chosen]
            say(f"{kind}: seed {seed + 1} of {seeds}")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="this kind of truth; may be repeated"
    )
    parser.add_argument(
        "--strategy",
        action="append",
        choices=sorted(STRATEGIES),
        help="this strategy; may be repeated",
    )
    parser.add_argument(
        "--likelihood",
        action="store_true",
        help="the surrogate's weights against the published sweeps, and nothing else",
    )
    parser.add_argument(
        "--runs", type=pathlib.Path, help="keep the runs in this file, or read them where it exists"
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/replay.md and docs/replay.svg"
    )
    options = parser.parse_args()
    if options.likelihood:
        from replay_likelihood import print_likelihood

        print_likelihood(published_sweeps())
        return
    from replay_report import document, plot, summary_lines

    if options.runs and options.runs.exists():
        runs = [
            Run(**{**row, "regret": tuple(row["regret"])})
            for row in json.loads(options.runs.read_text())
        ]
    else:
        runs = play(
            options.only or KINDS,
            options.strategy or list(STRATEGIES),
            options.seeds,
            lambda line: print(line, file=sys.stderr),
        )
        if options.runs:
            options.runs.write_text(json.dumps([asdict(run) for run in runs]))
    print("\n".join(summary_lines(runs)))
    if options.write:
        (DOCS / "replay.md").write_text(document(runs), encoding="utf-8")
        plot(runs, DOCS / "replay.svg")


if __name__ == "__main__":
    main()
