"""What shares of offload gain, and what offload of activations and bucket sizes could gain at most.

    python benchmarks/offload_gains.py [--jobs 18]

For the Megatron-LM jobs of `beyond_enumeration.py`, against the best that the search finds with all
of an offloaded optimizer's states on the host:

- share: the best with `optimizer_offload_fraction` left open.
- activations: the fastest layout without pipeline and recomputation (Megatron-LM's CPU offload of
  activations allows neither) whose memory fits once what all layers but two save is on the host.
  "free": copies cost nothing. "copied": those of the fewest layers that must go hide under the
  forward and the backward as far as they last, over the PCIe of one GPU.
- bucket: seconds of the data-parallel reduction of Megatron-LM's own bucket, which nothing hides
  after the last backward (--ddp-bucket-size: max(40M, 1M x ranks) parameters), as a share of a
  step; no bucket size gains more.
"""

import argparse
from itertools import islice

import numpy as np
from beyond_enumeration import jobs

from planner.calibration.intervals import oom_probability
from planner.columns import FloatColumn, LayoutBatch
from planner.cost.chunks import CHUNK
from planner.cost.cost_inputs import CostInputs
from planner.cost.price import Pricer
from planner.rules import Context
from planner.search.bounds import OOM_LIMIT
from planner.search.one_size import OneSize, search_size
from planner.search.space.enumerate import build_space
from planner.specs.job import Job
from planner.specs.layout import Layout
from planner.work.checkpointing import NONE

BUCKET, BUCKET_A_RANK = 40e6, 1e6  # core/distributed/distributed_data_parallel.py


def searched(job: Job, **fix: object) -> OneSize:
    """The search with these fields fixed."""
    search = job.search.model_copy(update={"fix": {**job.search.fix, **fix}})
    return search_size(
        job.model_copy(update={"search": search}), job.cluster, lambda _: None, samples=False
    )


def with_activations_away(job: Job, pricer: Pricer, limit: float) -> tuple[float, float]:
    """(step seconds of the fastest layout below the limit if copies are free, if they are not)."""
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    free = copied = limit
    for offload in (False, True):
        space = build_space(context, job.search, offload=offload, oversized=True)
        cells = np.flatnonzero((space.cells.pp == 1) & (space.cells.ac_kind == NONE))
        cells = cells[pricer.time_lower_bounds(space.cells.take(cells)) < limit]
        for start in range(0, len(cells), 64):
            batch = space.expand(cells[start : start + 64])
            for first in range(0, len(batch), CHUNK):
                part = batch.take(slice(first, first + CHUNK))
                bare, real = _away(job, pricer, part)
                free, copied = min(free, float(bare.min())), min(copied, float(real.min()))
    return free, copied


def _away(job: Job, pricer: Pricer, batch: LayoutBatch) -> tuple[FloatColumn, FloatColumn]:
    prices = pricer.price(batch)
    inputs = CostInputs.of(pricer, batch, every_rank=False)
    layers = float(job.model.num_hidden_layers)
    counts = pricer.unit_counts[:-2, None]
    saved, forward, backward = (
        (counts * values[:-2, inputs.at_unit]).sum(axis=0)
        for values in (
            inputs.unit.costs.saved_bytes,
            inputs.unit.forward,
            inputs.unit.input_grad + inputs.unit.weight_grad,
        )
    )
    each = saved / layers
    free, real = np.full((2, len(batch)), np.inf)
    for away in range(int(layers)):
        held = prices.least_device_bytes - each * max(0, away - 2)
        fits = oom_probability(pricer.profile, pricer.cluster, np.maximum(held, 1.0)) <= OOM_LIMIT
        copies = away * each / pricer.cluster.pcie_bandwidth_bytes_per_second
        waits = np.maximum(copies - forward, 0.0) + np.maximum(copies - backward, 0.0)
        free = np.where(fits, np.minimum(free, prices.step_seconds), free)
        slower = prices.step_seconds + inputs.m * waits
        real = np.where(fits, np.minimum(real, slower), real)
    return free, real


def bucket_seconds(pricer: Pricer, layout: Layout) -> float:
    """Reduction of one bucket of Megatron-LM's own size, on the rank that decides."""
    batch = LayoutBatch.from_layouts([layout])
    inputs = CostInputs.of(pricer, batch, every_rank=False)
    whole = inputs.shards.scatter_seconds + inputs.shards.replicate_seconds
    held = (inputs.units[:, :, 0] @ inputs.shards.local[:, inputs.at_shard])[:, 0]
    total = (inputs.units[:, :, 0] @ whole[:, inputs.at_shard])[:, 0]
    ranks = layout.dp_degree * layout.cp
    return float(np.max(total * np.minimum(1.0, max(BUCKET, BUCKET_A_RANK * ranks) / held)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=18)
    print("| job | best, states whole | share | activations, free | copied | bucket |")
    print("|---|---|--:|--:|--:|--:|")
    for name, job in islice(jobs(), parser.parse_args().jobs):
        whole = searched(job, optimizer_offload_fraction=1.0)
        if not whole.candidates:
            continue
        best, _, layout = whole.candidates[0]
        share = best / searched(job).best_seconds - 1.0
        free, copied = with_activations_away(job, whole.pricer, best)
        bucket = bucket_seconds(whole.pricer, layout) / best
        print(
            f"| {name} | {layout.short()}, {best:.3f} s | {share:.2%} | {best / free - 1.0:.2%} "
            f"| {best / copied - 1.0:.2%} | {bucket:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
