"""Is the plan's number one behind a rule of thumb on small models, by the model's own estimates?

    python -m benchmarks.rule_of_thumb [--every N]

Plans dense models on the GPUs of one node, over sequences and batches, and takes from the same
space the layout that `planner.calibration.sweeps.rule_of_thumb` takes: the first in its order that
fits by the memory estimate. Where the rule does not tell layouts apart, its fastest counts. Prints
every job, then the worst ratio. Regret on measured sweeps is in docs/accuracy.md.
"""

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":  # before NumPy starts its threads
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    )

import numpy as np

from planner import recommend
from planner.calibration.sweeps import first_by, rule_of_thumb
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.refine import refine
from planner.errors import InfeasibleError
from planner.intake.jobs import read_job
from planner.search.fit import fits_at_all
from planner.search.space.enumerate import build_space

TOLERANCE = 0.05
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b")
GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s", "rtx-4090")
SEQUENCES = (2048, 8192, 32768)
SEQUENCES_A_GPU = (1, 4, 16)  # of the global batch
TRAINERS = ("torchtitan", "megatron")
NUM_GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Estimated step seconds of number one and of the rule's layout, and both as text.

    stated: the plan itself says that a layout which number one is preferred to is faster on paper.
    """

    job: str
    number_one_seconds: float
    rule_seconds: float
    number_one: str
    rule: str
    stated: bool

    @property
    def ratio(self) -> float:
        """Above 1 where number one is slower than the rule's layout."""
        return self.number_one_seconds / self.rule_seconds

    @property
    def behind(self) -> bool:
        return self.ratio > 1.0 + TOLERANCE and not self.stated


def jobs() -> Iterator[dict[str, Any]]:
    """The grid."""
    for model, gpu, seq_len, each, trainer in itertools.product(
        MODELS, GPUS, SEQUENCES, SEQUENCES_A_GPU, TRAINERS
    ):
        yield {
            "model": model,
            "cluster": {"gpu": gpu, "num_gpus": NUM_GPUS},
            "training": {
                "seq_len": seq_len, "global_batch_size": each * NUM_GPUS, "trainer": trainer,
            },
        }  # fmt: skip


def by_rule(job: dict[str, Any]) -> tuple[float, str] | None:
    """(step seconds, text) of the first layout of the job's space, by the rule, that fits."""
    read = read_job(job)
    pricer = Pricer.build(read.model, read.cluster, read.training)
    space = build_space(pricer.rules_context, read.search)
    cells = np.column_stack([space.cells.tp, space.cells.pp, space.cells.cp])
    offloaded: list[LayoutBatch] = []
    for degrees in np.unique(cells, axis=0):
        batch = space.expand((cells == degrees).all(axis=1))
        keys = rule_of_thumb(batch)
        offloaded.append(batch.take(keys[:, 0] > 0))
        if found := _first(pricer, batch.take(keys[:, 0] == 0)):
            return found
    return next(filter(None, (_first(pricer, batch) for batch in offloaded)), None)


def _first(pricer: Pricer, batch: LayoutBatch) -> tuple[float, str] | None:
    fitting = batch.take(fits_at_all(pricer, batch)) if len(batch) else batch
    if not len(fitting):
        return None
    first = fitting.take(first_by(rule_of_thumb(fitting)))
    seconds = refine(pricer, first, pricer.price(first)).step_seconds
    fastest = int(np.argmin(seconds))
    return float(seconds[fastest]), first.row(fastest).short()


def picks(chosen: list[dict[str, Any]]) -> Iterator[Pick]:
    """Jobs with both picks; those of which only offloaded parts fit have none by the rule."""
    for job in chosen:
        rule = by_rule(job)
        try:
            plan = recommend(job)
        except InfeasibleError:
            assert rule is None, job
            continue
        if rule is None:
            continue
        one = plan.ranked[0]
        training = job["training"]
        yield Pick(
            job=f"{job['model']} {job['cluster']['gpu']} {training['trainer']} "
            f"{training['seq_len']} x {training['global_batch_size']}",
            number_one_seconds=one.estimate.step_seconds or np.inf,
            rule_seconds=rule[0],
            number_one=one.layout.short(),
            rule=rule[1],
            stated=plan.fastest_on_paper is not None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="plan one of so many jobs")
    options = parser.parse_args()
    found: list[Pick] = []
    for pick in picks(list(jobs())[:: options.every]):
        found.append(pick)
        print(f"{pick.ratio:.3f}  {pick.job}: {pick.number_one} | rule {pick.rule}", flush=True)
    ratios = [pick.ratio for pick in found]
    print(f"{len(found)} jobs; worst {max(ratios):.3f}, median {np.median(ratios):.3f}; "
          f"{sum(pick.behind for pick in found)} behind by more than {TOLERANCE:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
