"""When nothing fits: the smallest changes to the request that would make something fit.

Each change is checked by a search.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.intake.machines import catalogue_gpus
from planner.rules import Context
from planner.search.fit import fitting
from planner.search.space.enumerate import Space, build_space
from planner.specs.cluster import ClusterSpec, resolve
from planner.specs.gpu import MAX_GPUS
from planner.specs.job import Job
from planner.specs.layout import FieldValue, Layout
from planner.specs.plan_comparisons import FittingChange
from planner.specs.training import mean_state_bytes
from planner.units import counted, format_bytes

ROUND = 4096
# judgement: layouts priced before a change is given up, nearest to fitting by their lower bound
MOST_PRICED = 100_000
SHORTEST_SEQUENCE = 256
PARTS_BETWEEN = 8  # lengths between two halvings that are checked


def fitting_changes(
    job: Job, cluster: ClusterSpec, say: Callable[[str], None]
) -> list[FittingChange]:
    """Changes after which a layout fits, smallest first.

    They are a fixed field left open, the fewest GPUs, the smallest GPU, and a shorter sequence.
    """
    say("nothing fits: looking for the smallest change that would")
    job = job.model_copy(update={"cluster": cluster})
    return [*_opened(job), *_more_gpus(job), *_larger_gpu(job), *_shorter(job)]


def _without(job: Job, *fields: str) -> Job:
    """Job with these fields of `search.fix` or `search.allow` left open."""
    left = {
        part: {name: one for name, one in getattr(job.search, part).items() if name not in fields}
        for part in ("fix", "allow")
    }
    return job.model_copy(update={"search": job.search.model_copy(update=left)})


def first_fitting(job: Job, *, offloads: bool = True) -> tuple[Layout, float] | None:
    """A layout that fits, with its device bytes.

    Layouts nearest to fitting by their proven lower bound are priced first.
    offloads: whether CPU offload counts if nothing fits without it.
    """
    pricer = Pricer.build(job.model, job.cluster, job.training)
    context = Context(model=job.model, cluster=job.cluster, training=job.training)
    open_offload = offloads and "cpu_offload" not in job.search.fix
    for offload in (False, True) if open_offload else (False,):
        found = _first(pricer, build_space(context, job.search, offload=offload))
        if found is not None:
            return found
    return None


def _first(pricer: Pricer, space: Space) -> tuple[Layout, float] | None:
    if not len(space.cells):
        return None
    _, device = pricer.lower_bounds(space.cells.take(slice(None)))
    order = np.argsort(device, kind="stable")
    order = order[fitting(pricer, device[order])]
    priced, start = 0, 0
    while start < len(order) and priced < MOST_PRICED:
        stop = start + max(
            1, int(np.searchsorted(np.cumsum(space.cell_sizes[order[start:]]), ROUND))
        )
        batch = space.expand(order[start:stop])
        prices = pricer.price(batch)
        best = int(np.argmin(prices.least_device_bytes))
        if fitting(pricer, prices.least_device_bytes)[best]:
            return batch.row(best), float(prices.device_bytes[best])
        priced, start = priced + len(batch), stop
    return None


def _change(
    field: str, value: FieldValue, sentence: str, found: tuple[Layout, float]
) -> FittingChange:
    return FittingChange(
        field=field, value=value, sentence=sentence, layout=found[0], device_bytes=found[1]
    )


def _opened(job: Job) -> Iterator[FittingChange]:
    """Each narrowed field left open by itself; if that never suffices, all of them."""
    search = job.search
    fields = [*search.fix, *search.allow]
    single = [
        (field, found)
        for field in fields
        if (found := first_fitting(_without(job, field))) is not None
    ]
    for field, found in single:
        value = getattr(found[0], field)
        yield _change(
            f"search.{'fix' if field in search.fix else 'allow'}.{field}",
            value,
            f"leave {field} open, say at {value}",
            found,
        )
    if not single and len(fields) > 1:
        found_open = first_fitting(_without(job, *fields))
        if found_open is not None:
            yield _change(
                "search.fix",
                None,
                f"leave {', '.join(fields[:-1])} and {fields[-1]} open",
                found_open,
            )


def _more_gpus(job: Job) -> Iterator[FittingChange]:
    """The fewest GPUs; if that needs CPU offload, also the fewest without it."""
    for offloads in (True, False):
        count, found = _fewest(job, offloads=offloads)
        if found is None:
            return
        on_host = found[0].cpu_offload and "cpu_offload" not in job.search.fix
        how = " with CPU offload" if on_host else "" if offloads else " without CPU offload"
        sentence = f"use {counted(count, 'GPU')} of this kind{how}"
        yield _change("cluster.num_gpus", count, sentence, found)
        if not on_host:
            return


def _fewest(job: Job, *, offloads: bool) -> tuple[int, tuple[Layout, float] | None]:
    """The smallest size on which something fits.

    Doubles until something fits, then checks every size below that in turn: more GPUs that divide
    fewer things may fit less. Where there are more than MOST_SIZES, it halves them first.
    """
    count = job.cluster.num_gpus
    found = None
    while found is None and count * 2 <= MAX_GPUS:
        count *= 2
        found = _at_size(job, count, offloads)
    if found is None:
        return count, None
    sizes = _sizes_between(job.cluster, count)
    while len(sizes) > MOST_SIZES:
        middle = len(sizes) // 2
        fewer = _at_size(job, sizes[middle], offloads)
        if fewer is None:
            sizes = sizes[middle + 1 :]
        else:
            count, found, sizes = sizes[middle], fewer, sizes[:middle]
    for smaller in sizes:
        if offloads or smaller >= _least_gpus(job):
            fewer = _at_size(job, smaller, offloads)
            if fewer is not None:
                return smaller, fewer
    return count, found


MOST_SIZES = 12  # judgement: a search each


def _sizes_between(cluster: ClusterSpec, high: int) -> list[int]:
    """All numbers of whole nodes above the cluster's size and below `high`; doublings in a node."""
    low, per_node = cluster.num_gpus, cluster.gpus_per_node
    inside = (low << doubling for doubling in range(1, per_node.bit_length()))
    nodes = range((low // per_node + 1) * per_node, high, per_node)
    return sorted({size for size in inside if size < min(high, per_node)} | set(nodes))


def _least_gpus(job: Job) -> int:
    """GPUs below which master weights and optimizer states alone exceed all devices together.

    Without offload every rank holds its shard of both, 1 / num_gpus at the least.
    """
    training = job.training
    model = job.model
    least = model.total_parameters() * mean_state_bytes(training.optimizer, model) / 2.0
    return int(least // job.cluster.usable_memory_bytes)


def _at_size(job: Job, count: int, offloads: bool) -> tuple[Layout, float] | None:
    try:
        cluster = job.cluster.with_num_gpus(count)
        return first_fitting(job.model_copy(update={"cluster": cluster}), offloads=offloads)
    except SpecError:
        return None


def _larger_gpu(job: Job) -> Iterator[FittingChange]:
    """The GPU of the catalogue with the least memory on which it fits, of the same vendor.

    One that computes in bf16 is not replaced by an older one that does not.
    """
    cluster = job.cluster
    halves = {"bf16"} & set(cluster.gpu.peak_flops_per_second)
    kinds = [
        gpu
        for gpu in catalogue_gpus()
        if gpu.vendor == cluster.gpu.vendor
        and gpu.memory_bytes > cluster.gpu.memory_bytes
        and halves <= set(gpu.peak_flops_per_second)
    ]
    for gpu in sorted(kinds, key=lambda gpu: gpu.memory_bytes):
        try:
            other = resolve(cluster.request, gpu, cluster.num_gpus, "cluster")
            found = first_fitting(job.model_copy(update={"cluster": other}))
        except SpecError:
            continue
        if found is not None:
            sentence = f"use {cluster.num_gpus:,} x {gpu.name} ({format_bytes(gpu.memory_bytes)})"
            yield _change("cluster.gpu", gpu.name, sentence, found)
            return


def _shorter(job: Job) -> Iterator[FittingChange]:
    """The longest sequence at which it fits.

    It is halved until something fits. Every eighth of the way back is then checked, longest first.
    """
    asked = job.training.seq_len
    halves = [asked]
    while halves[-1] % 2 == 0 and halves[-1] // 2 >= SHORTEST_SEQUENCE:
        halves.append(halves[-1] // 2)
    if len(halves) == 1 or _at_length(job, halves[-1]) is None:
        return
    longer, half, found = next(
        (longer, half, found)
        for longer, half in pairwise(halves)
        if (found := _at_length(job, half)) is not None
    )
    length, step = half, max(1, half // PARTS_BETWEEN)
    for between in range(longer - step, half, -step):
        better = _at_length(job, between)
        if better is not None:
            length, found = between, better
            break
    yield _change("training.seq_len", length, f"shorten seq_len to {length:,}", found)


def _at_length(job: Job, seq_len: int) -> tuple[Layout, float] | None:
    training = job.training.model_copy(update={"seq_len": seq_len})
    return first_fitting(job.model_copy(update={"training": training}))
