"""Proxy runs of a layout on fewer data-parallel ranks, as a low fidelity of a study.

The model-parallel layout does not change, and every replica has the same share of the batch. What
the small run cannot show, communication over more ranks and smaller shards, is added by the cost
model; that part is its error.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.calibration.intervals import oom_probability, proxy_run_sd
from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.errors import SpecError
from planner.rules import violations
from planner.search.fit import OOM_LIMIT
from planner.specs.layout import Layout
from planner.study.candidates import Candidates
from planner.study.fidelity_options import FidelityOption, LowFidelity
from planner.study.posterior import PROXY, RUN_SD

# Judgement: two depths magnify the noise of a run, and the step is not quite affine in depth
# (`probes.proxy_runs` knows once they are chosen).
TWO_DEPTHS_SD = 0.05
MOST_OPTIONS = 2  # sizes priced of one candidate, a few milliseconds each
MEAN_DEPTH = 0.35  # of the whole model, of the two; judgement


class ProxyRuns:
    """Proxy runs of a job's candidates on at most `num_devices` GPUs.

    Each is priced on paper when its candidate is first asked about.
    """

    def __init__(self, pricer: Pricer, candidates: Candidates, num_devices: int) -> None:
        self.pricer, self.candidates = pricer, candidates
        self.num_devices = min(num_devices, pricer.cluster.num_gpus - 1)
        self._options: dict[int, tuple[FidelityOption, ...]] = {}
        self._pricers: dict[int, Pricer | None] = {}

    def fidelity(self) -> LowFidelity:
        """Proxy runs as a fidelity of a study."""
        batch = self.candidates.batch
        replica = batch.tp * batch.cp * batch.pp  # least GPUs of a proxy run
        possible = (replica <= self.num_devices) & (batch.dp_replicate * batch.dp_shard > 1)
        return LowFidelity(
            name=PROXY,
            options=self.options,
            least_gpus=np.where(possible, replica, np.inf),
            shows_memory=False,
        )

    def options(self, row: int) -> tuple[FidelityOption, ...]:
        """The options on the fewest GPUs where the whole depth fits.

        Larger sizes are options too while the cost model still has much to add. If the pool is too
        small for the whole depth, the options are two depths on the most GPUs. Empty if no smaller
        layout is legal.
        """
        if row not in self._options:
            self._options[row] = tuple(self._found(row))
        return self._options[row]

    def smaller(self, row: int) -> Iterator[tuple[Layout, Pricer]]:
        """Yields the legal smaller layouts of a candidate with their pricers.

        There is one of each size, fewest GPUs first.
        """
        for _, alike in self._sizes(row):
            found = self._legal(alike)
            if found is not None:
                yield found

    def _sizes(self, row: int) -> list[tuple[int, list[Layout]]]:
        """Smaller layouts by their number of GPUs, within the pool."""
        by_size = groupby(
            self.candidates.batch.row(row).fewer_replicas(), key=lambda small: small.num_gpus
        )
        return [(size, list(alike)) for size, alike in by_size if size <= self.num_devices]

    def _legal(self, alike: Sequence[Layout]) -> tuple[Layout, Pricer] | None:
        """The first legal layout among these of one size.

        They are ordered by sharding, most first, as fewer shards fit no better.
        """
        pricer = self._on(alike[0].num_gpus)
        if pricer is None:
            return None
        return next(
            (
                (one, pricer)
                for one in alike
                if not violations(one, pricer.model, pricer.cluster, pricer.training)
            ),
            None,
        )

    def _found(self, row: int) -> list[FidelityOption]:
        whole, sizes = float(np.exp(self.candidates.prior.log_seconds[row])), self._sizes(row)
        known: dict[int, _Priced | None] = {}

        def priced(place: int) -> _Priced | None:
            if place not in known:
                legal = self._legal(sizes[place][1])
                known[place] = None if legal is None else _Priced.of(*legal)
            return known[place]

        # larger sizes shard more: bisection finds the fewest GPUs on which it fits
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            one = priced(middle)
            low, high = (low, middle) if one is not None and one.fits else (middle + 1, high)
        options: list[FidelityOption] = []
        for one in filter(None, map(priced, range(low, len(sizes)))):
            off = proxy_run_sd(
                self.pricer.cluster, one.pricer.cluster, abs(whole - one.step_seconds) / whole
            )
            options.append(
                FidelityOption(num_gpus=one.num_gpus, runs=1, step_seconds=one.step_seconds, sd=off)
            )
            if len(options) == MOST_OPTIONS or off <= RUN_SD:
                break
        return options or self._two_depths(
            whole, filter(None, map(priced, reversed(range(len(sizes)))))
        )

    def _two_depths(self, whole: float, largest_first: Iterable["_Priced"]) -> list[FidelityOption]:
        one = next(iter(largest_first), None)
        if one is None:
            return []
        off = proxy_run_sd(
            self.pricer.cluster, one.pricer.cluster, abs(whole - one.step_seconds) / whole
        )
        sd = math.hypot(off, TWO_DEPTHS_SD)
        return [
            FidelityOption(
                num_gpus=one.num_gpus, runs=2, step_seconds=MEAN_DEPTH * one.step_seconds, sd=sd
            )
        ]

    def _on(self, num_gpus: int) -> Pricer | None:
        """The pricer for layouts of this size with their share of the batch.

        None if there is no cluster of this size.
        """
        if num_gpus not in self._pricers:
            self._pricers[num_gpus] = self._made(num_gpus) if num_gpus <= self.num_devices else None
        return self._pricers[num_gpus]

    def _made(self, num_gpus: int) -> Pricer | None:
        whole, training = self.pricer.cluster, self.pricer.training
        batch, rest = divmod(training.global_batch_size * num_gpus, whole.num_gpus)
        if rest or not batch:
            return None
        try:
            cluster = whole.with_num_gpus(num_gpus)
        except SpecError:
            return None
        return Pricer.build(
            self.pricer.model,
            cluster,
            training.model_copy(update={"global_batch_size": batch}),
            self.pricer.calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A smaller layout, priced on paper."""

    num_gpus: int
    pricer: Pricer
    step_seconds: float
    fits: bool

    @classmethod
    def of(cls, layout: Layout, pricer: Pricer) -> "_Priced":
        prices = pricer.price(LayoutBatch.from_layouts([layout]))
        risk = float(oom_probability(pricer.profile, pricer.cluster, prices.device_bytes)[0])
        return cls(
            num_gpus=layout.num_gpus,
            pricer=pricer,
            step_seconds=float(prices.step_seconds[0]),
            fits=risk <= OOM_LIMIT,
        )
