"""What partial offload gains, and what bucket sizes could gain at most.

    python benchmarks/offload_gains.py [--jobs 18]

For the Megatron-LM jobs of `beyond_enumeration.py` in core 0.16, against the best that the search
finds with all of an offloaded optimizer's states on the host and no activations there:

- share: with `optimizer_offload_fraction` left open.
- layers: with `activation_offload_layers` left open.
- both: with both left open.
- bucket: seconds that the reduction of one bucket of Megatron-LM's own size (--ddp-bucket-size:
  max(40M, 1M x ranks) parameters) takes, as a share of a step. Only the last bucket is not hidden
  by the backward, so that no bucket size gains more.
"""

import argparse
from itertools import islice

import numpy as np
from beyond_enumeration import jobs

from planner.columns import LayoutBatch
from planner.cost.cost_inputs import CostInputs, on_ranks
from planner.cost.price import Pricer
from planner.search.one_size import search_size
from planner.search.size_candidates import OneSize
from planner.specs.job import Job
from planner.specs.layout import Layout

VERSION = "0.16"
BUCKET, BUCKET_A_RANK = 40e6, 1e6  # core/distributed/distributed_data_parallel.py
WHOLE, NO_LAYERS = {"optimizer_offload_fraction": 1.0}, {"activation_offload_layers": 0}


def searched(job: Job, **fix: object) -> OneSize:
    """The search with these fields fixed."""
    search = job.search.model_copy(update={"fix": {**job.search.fix, **fix}})
    training = job.training.model_copy(update={"trainer_version": VERSION})
    job = job.model_copy(update={"search": search, "training": training})
    return search_size(job, job.cluster, lambda _: None, samples=False)


def bucket_seconds(pricer: Pricer, layout: Layout) -> float:
    """Reduction of one bucket of Megatron-LM's own size, on the rank where it takes longest."""
    inputs = CostInputs.of(pricer, LayoutBatch.from_layouts([layout]), every_rank=True)
    shards, at = inputs.shards, inputs.at_shard
    seconds = on_ranks(inputs.units, (shards.scatter_seconds + shards.replicate_seconds)[:, at])
    held = on_ranks(inputs.units, shards.local[:, at])
    bucket = max(BUCKET, BUCKET_A_RANK * layout.dp_degree * layout.cp)
    return float(np.max(seconds * np.minimum(1.0, bucket / held)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=18)
    print("| job | best without | share | layers | both | bucket | best with both |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for name, job in islice(jobs(), parser.parse_args().jobs):
        without = searched(job, **WHOLE, **NO_LAYERS)
        if not without.candidates:
            continue
        best, _, layout = without.candidates[0]
        found = [searched(job, **fix) for fix in (NO_LAYERS, WHOLE, {})]
        gains = " | ".join(f"{best / one.best_seconds - 1.0:.2%}" for one in found)
        bucket = bucket_seconds(without.pricer, layout) / best
        last = found[-1].candidates[0][2].short()
        print(f"| {name} | {best:.3f} s | {gains} | {bucket:.2%} | {last} |", flush=True)


if __name__ == "__main__":
    main()
