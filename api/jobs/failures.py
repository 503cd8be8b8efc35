"""Failures of the probes of a run: which may pass and run again, and which hosts are to blame.

A layout that ran out of memory, or that the trainer refuses, does so again: it is not retried.

Two kinds of evidence speak against a host. Failures: far more probes fail on it than on the others.
Slowness: its steps are slower than expected; layouts that it ran then run once more elsewhere, and
where they are faster there the host is to blame, not the layout.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from planner.api.storage.job_records import ProbeRecord
from planner.api.wiring import Wiring
from planner.probes.protocol import FailureKind
from planner.units import DAY

# failures that a host may be to blame for
OF_THE_HOST = (
    FailureKind.LOST_GPU, FailureKind.LOST_NODE, FailureKind.FOREIGN, FailureKind.HANG,
    FailureKind.KILLED,
)  # fmt: skip
FALSE_ALARMS = 0.001  # of a run in which every host is as good as the others
FEWEST_FAILURES = 3
FEWEST_STEPS = 3  # of a host, before it is suspected
SUSPECT = 1.05  # times the expected step, in the median; a judgement
SLOW = 1.10  # times the same layout's step elsewhere; a judgement
PAIRS = 2  # layouts that were slower by so much
OUT_SECONDS = DAY  # that a bad host is kept out, unless somebody lets it in
MOST_OUT = 0.5  # of the hosts that were seen; where more look bad it is not the hosts
SPREADS = 3.0  # standard errors of the median beyond the others'
MAD_TO_SD = 1.4826  # of a normal distribution
Layout = tuple[str, str]  # hash of the question, short name
MOST_UNCOUNTED = 5  # a pool that takes every probe away must not keep a run for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class BadHostLine:
    """A host that a run found bad, with the measured evidence."""

    host: str
    evidence: list[str]


def keep_out(wiring: Wiring, pool: str, bad: BadHostLine, run_id: str) -> None:
    """No run uses this host of the pool for a while. run_id: of the one that found it."""
    wiring.quarantine.add(
        pool, bad.host, seconds=OUT_SECONDS, found_by=run_id, evidence=bad.evidence
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A measured step: on which hosts, and log(measured / expected) where that is known."""

    hosts: frozenset[str]
    seconds: float
    surprise: float | None


@dataclass
class HostWatch:
    """Evidence on hosts from the probes of a run. known: hosts that were found bad already."""

    known: set[str] = field(default_factory=set)
    _probes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _failed: dict[str, set[Layout]] = field(default_factory=lambda: defaultdict(set))
    _steps: dict[Layout, list[_Step]] = field(default_factory=lambda: defaultdict(list))
    _compared: set[Layout] = field(default_factory=set)  # that ran more than once
    _touched: set[str] = field(default_factory=set)  # since we were asked last

    def failed(self, layout: Layout, hosts: frozenset[str], kind: str | None) -> None:
        for host in hosts:
            self._probes[host] += 1
            if kind in OF_THE_HOST:
                self._failed[host].add(layout)
                self._touched.add(host)

    def measured(
        self, layout: Layout, hosts: frozenset[str], seconds: float | None, expected: float | None
    ) -> None:
        """A probe that ran there; out of memory is one without a step."""
        for host in hosts:
            self._probes[host] += 1
        if seconds and hosts:
            surprise = math.log(seconds / expected) if expected else None
            steps = self._steps[layout]
            steps.append(_Step(hosts, seconds, surprise))
            if len(steps) > 1:
                self._compared.add(layout)
                self._touched |= {host for step in steps for host in step.hosts}

    @property
    def num_hosts(self) -> int:
        return len(self._probes)

    def new_bad(self) -> list[BadHostLine]:
        """Hosts found bad since the last time that this was asked."""
        found = []
        for host in sorted(self._touched - self.known):
            evidence = [*self._too_many_failures(host), *self._slower_than_elsewhere(host)]
            if evidence:
                found.append(BadHostLine(host=host, evidence=evidence))
        self.known |= {one.host for one in found}
        self._touched.clear()
        return found

    def to_confirm(self) -> Iterator[tuple[str, list[Layout]]]:
        """Hosts that are suspected to be slow, with layouts to run once more elsewhere."""
        steps = [step for each in self._steps.values() for step in each]
        surprises = [(one.hosts, one.surprise) for one in steps if one.surprise is not None]
        by_host: dict[str, list[float]] = defaultdict(list)
        for hosts, surprise in surprises:
            for host in hosts:
                by_host[host].append(surprise)
        usual = median(surprise for _, surprise in surprises) if surprises else 0.0
        slower = (host for host, own in by_host.items() if median(own) > usual)
        for host in sorted(set(slower) - self.known):
            there = by_host[host]
            others = [surprise for hosts, surprise in surprises if host not in hosts]
            if len(there) < FEWEST_STEPS or len(others) < FEWEST_STEPS:
                continue
            middle = median(others)
            spread = MAD_TO_SD * median(abs(one - middle) for one in others)
            least = max(math.log(SUSPECT), SPREADS * 1.2533 * spread / math.sqrt(len(there)))
            if median(there) - middle < least:
                continue
            nowhere_else = [
                layout
                for layout, each in self._steps.items()
                if all(host in step.hosts for step in each)
            ]
            if nowhere_else:
                yield host, nowhere_else[:PAIRS]

    def _too_many_failures(self, host: str) -> tuple[str, ...]:
        own = {
            layout
            for layout in self._failed[host]
            if not any(layout in each for name, each in self._failed.items() if name != host)
        }  # what fails elsewhere too is the layout's fault
        failed, tried = len(own), self._probes[host]
        if failed < FEWEST_FAILURES:
            return ()
        tried_elsewhere = sum(self._probes.values()) - tried
        failed_elsewhere = sum(map(len, self._failed.values())) - len(self._failed[host])
        rate = (failed_elsewhere + 1) / (tried_elsewhere + 2)
        if at_least(failed, tried, rate) > FALSE_ALARMS / len(self._probes):
            return ()
        elsewhere = f"{failed_elsewhere} of {tried_elsewhere} elsewhere"
        return (f"{failed} of {tried} probes failed on it, {elsewhere}",)

    def _slower_than_elsewhere(self, host: str) -> tuple[str, ...]:
        sentences = []
        for layout in sorted(self._compared):
            name, steps = layout[1], self._steps[layout]
            here = [step.seconds for step in steps if host in step.hosts]
            elsewhere = [step.seconds for step in steps if not step.hosts & {host, *self.known}]
            if here and elsewhere and median(here) > SLOW * median(elsewhere):
                there, usual = median(here), median(elsewhere)
                more = f"{usual:.4g} s elsewhere ({there / usual - 1.0:+.0%})"
                sentences.append(f"{name}: {there:.4g} s a step there, {more}")
        return tuple(sentences) if len(sentences) >= PAIRS else ()


def at_least(failed: int, tried: int, rate: float) -> float:
    """P(at least `failed` of `tried` fail) where each fails with this probability."""
    if rate >= 1.0:
        return 1.0
    logs = (
        math.lgamma(tried + 1)
        - math.lgamma(number + 1)
        - math.lgamma(tried - number + 1)
        + number * math.log(rate)
        + (tried - number) * math.log1p(-rate)
        for number in range(failed, tried + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


# failures after which a probe runs again, not on the hosts where it failed, while others are left
ELSEWHERE = frozenset({
    FailureKind.KILLED, FailureKind.LOST_GPU, FailureKind.HANG, FailureKind.CRASH,
    FailureKind.FOREIGN, FailureKind.LOST_NODE,
})  # fmt: skip
# those after which it does without using up one of the sweep's `retries`
UNCOUNTED = frozenset({
    FailureKind.PREEMPTED, FailureKind.FOREIGN, FailureKind.LOST_NODE, FailureKind.REQUEUED,
    FailureKind.ALLOCATION_ENDED, FailureKind.LAUNCH,
})  # fmt: skip
AGAIN = ELSEWHERE | UNCOUNTED | {FailureKind.PORT}


def next_try(attempts: Sequence[ProbeRecord], retries: int) -> frozenset[str] | None:
    """Hosts that another attempt keeps off; None where there is none.

    attempts: those so far, oldest first; the last one failed.
    """
    last = attempts[-1]
    if last.failure not in AGAIN:
        return None
    counted = sum(counts(one) for one in attempts)
    if counted > retries or len(attempts) - counted > MOST_UNCOUNTED:
        return None
    return hosts_of(last) if last.failure in ELSEWHERE else frozenset()


def counts(record: ProbeRecord) -> bool:
    return record.failure not in UNCOUNTED


def step_of(record: ProbeRecord) -> float | None:
    """The step time that a probe measured of its layout itself; None where it has none."""
    if record.measurement_id is None or len(record.results) != 1:
        return None
    seconds = record.results[0].get("outcome", {}).get("step_seconds")
    return float(seconds) if isinstance(seconds, int | float) else None


def hosts_of(record: ProbeRecord) -> frozenset[str]:
    """The hosts that a probe ran on, as far as its pool told."""
    return frozenset(str(host) for result in record.results for host in result.get("hosts", ()))
