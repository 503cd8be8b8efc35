"""The drift part of a sweep's report: its layouts' whole history, tested for changes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from planner.api.calibration.update import update_about
from planner.api.jobs.failures import MOST_OUT, SLOW, BadHostLine, keep_out
from planner.api.storage.common import told
from planner.api.storage.job_records import TaskRecord
from planner.api.storage.records import HistoryRow
from planner.api.storage.tables import DriftFinding
from planner.api.wiring import Wiring
from planner.calibration.drift.findings import NEWEST, Creep, Drift, SlowHost, StepChange
from planner.calibration.drift.nights import Nights, Reading
from planner.calibration.drift.replay import drift_of
from planner.calibration.drift.scores import FEWEST_AFTER, FEWEST_BEFORE
from planner.specs.sweep import SweepSpec
from planner.units import counted

Document = dict[str, Any]
NAMED = 3  # layouts that a sentence lists
FEWEST_RUNS = FEWEST_BEFORE + FEWEST_AFTER  # that a layout needs to be watched


def with_drift(wiring: Wiring, run: TaskRecord, spec: SweepSpec, report: Document) -> Document:
    """The run's report with what its layouts' history says.

    Calibrations forget what was measured before a change; slow hosts are kept out.
    """
    lines = (line for job in report["jobs"] for line in job["layouts"])
    measured = [line["measurement_id"] for line in lines if line["status"] == "ok"]
    if not measured:
        return {**report, "drift": None}
    history = _History.of(wiring.drift.history(measured, spec.pool, run.asked_by or ""))
    drift = drift_of(history.nights, spec.drift.runs_per_false_alarm)
    if run.parent_id is not None:
        wiring.drift.replace(run.parent_id, list(history.findings(drift, run)))
        update_about(wiring, {(row.trainer, row.gpu) for row in history.rows.values()})
    document = history.document(drift, spec)
    new = []
    for one in document["changes"]:
        if one["new"]:  # of several layouts the headline says how many
            head, _, _ = one["statement"].partition(" [")
            new.append(one["statement"] if len(one["layouts"]) == 1 else head)
    if document["creeps"]:
        new.append(f"{counted(len(document['creeps']), 'layout')} slower than before")
    known = {one["host"] for one in report["quarantined"]}
    bad = [one for one in history.bad_hosts(drift.hosts) if one.host not in known]
    for one in bad:
        keep_out(wiring, spec.pool, one, run.id)
    if bad:
        new.append(f"{counted(len(bad), 'slow host')} in quarantine")
    return {
        **report,
        "headline": "; ".join([report["headline"], *new]),
        "quarantined": report["quarantined"] + [asdict(one) for one in bad],
        "drift": document,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """Runs of a sweep's questions by night.

    rows: one of each reading, by layout and night, as `nights` numbers them.
    young: runs of each layout that has too few to tell.
    """

    nights: Nights
    rows: Mapping[tuple[int, int], HistoryRow]
    young: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[HistoryRow]) -> "_History":
        """Drift of the layouts that were run often enough."""
        runs = Counter(key for key, _ in {(_key(row), row.run) for row in rows})
        watched = [row for row in rows if runs[_key(row)] >= FEWEST_RUNS]
        nights = Nights.of(
            [
                Reading(
                    layout=_key(row),
                    job=row.job_hash,
                    run=row.run,
                    at=row.created_at.isoformat(),
                    step_seconds=row.step_seconds,
                    hosts=frozenset(row.hosts),
                    software=row.software,
                )
                for row in watched
            ]
        )
        layouts = {name: place for place, name in enumerate(nights.layouts)}
        places = {name: place for place, name in enumerate(nights.runs)}
        return cls(
            nights=nights,
            rows={(layouts[_key(row)], places[row.run]): row for row in reversed(watched)},
            young=tuple(count for count in runs.values() if count < FEWEST_RUNS),
        )

    def _first(self, layouts: Sequence[int], night: int) -> HistoryRow:
        wanted = set(layouts)
        keys = [key for key in self.rows if key[0] in wanted and key[1] >= night]
        return self.rows[min(keys, key=lambda key: (key[1], self.rows[key].created_at))]

    def _label(self, layout: int) -> str:
        row = self._first([layout], 0)
        return f"{row.model} on {row.num_gpus} {row.gpu}: {row.layout}"

    def findings(self, drift: Drift, run: TaskRecord) -> Iterator[DriftFinding]:
        """Runs that learning must forget: all of a trainer and GPU, or only layouts that changed.

        What not everybody may count is forgotten for the owner alone.
        """
        stacks: dict[tuple[str, str], set[int]] = defaultdict(set)
        for layout in range(len(self.nights.layouts)):
            row = self._first([layout], 0)
            stacks[row.trainer, row.gpu].add(layout)
        for change in drift.changes:
            for (trainer, gpu), watched in stacks.items():
                changed = watched & set(change.layouts)
                if not changed:
                    continue
                first = self._first(sorted(changed), change.since)
                shared = all(row.shared for key, row in self.rows.items() if key[0] in changed)
                parts: list[HistoryRow | None] = [None]
                if changed != watched:
                    parts = [self._first([layout], change.since) for layout in sorted(changed)]
                found = f"the sweep {run.request['name']} found step times {_by(change)}"
                for part in parts:
                    yield DriftFinding(
                        sweep_id=run.parent_id or "",
                        trainer=trainer,
                        gpu=gpu,
                        owner="" if shared else run.asked_by or "",
                        software_hash=first.software_hash,
                        job_hash=None if part is None else part.job_hash,
                        layout_hash=None if part is None else part.layout_hash,
                        since=first.created_at,
                        statement=f"{found} since then",
                    )

    def bad_hosts(self, hosts: Sequence[SlowHost]) -> list[BadHostLine]:
        """Hosts that are so much slower than others that no run should use them.

        On the newest night too, and with software that others ran: else it may be that software.
        """
        found = [
            BadHostLine(host=one.host, evidence=[self._slower(one)])
            for one in hosts
            if one.until is None
            and one.newest is not None
            and 1.0 + min(one.change, one.newest) > SLOW
            and self.nights.ran_elsewhere(one.host, one.since)
        ]
        return found if len(found) <= MOST_OUT * len(self.nights.on) else []

    def _slower(self, host: SlowHost) -> str:
        return (
            f"slower than others by {host.change:.1%} ({host.low:.1%} to {host.high:.1%}) since "
            f"{self.nights.at[host.since][:10]}"
        )

    # ---- the report ------------------------------------------------------------------------------

    def document(self, drift: Drift, spec: SweepSpec) -> Document:
        """JSON-safe form of what was found; newest changes first."""
        changes = [self._change(change) for change in reversed(drift.changes)]
        young = {"layouts": len(self.young), "most": max(self.young, default=0)}
        young["needed"] = FEWEST_RUNS
        return {
            "runs_per_false_alarm": spec.drift.runs_per_false_alarm,
            "nights": len(self.nights.runs),
            "layouts": len(self.nights.layouts),
            "series": drift.series,
            "threshold": drift.threshold,
            "night_sd": drift.night_sd,
            "changes": changes,
            "hosts": [self._host(host) for host in drift.hosts],
            "outliers": [
                {"layout": self._label(one.layout), "change": one.change} for one in drift.outliers
            ],
            "creeps": [self._creep(one) for one in drift.creeps],
            "too_few_nights": young,
        }

    def _creep(self, creep: Creep) -> Document:
        first, last = (self.nights.at[night][:10] for night in (creep.first, creep.last))
        level = "the best so far" if creep.best else "its first nights"
        return {
            "layout": self._label(creep.layout),
            "change": creep.change,
            "first": self.nights.at[creep.first],
            "last": self.nights.at[creep.last],
            "best": creep.best,
            "statement": f"{creep.change:.1%} slower than {level} ({first} to {last}), the newest "
            f"{counted(NEWEST, 'night')} alike [{self._label(creep.layout)}]",
        }

    def _change(self, change: StepChange) -> Document:
        since = self._first(change.layouts, change.since)
        labels = [self._label(layout) for layout in change.layouts]
        last_good = self.nights.at[change.last_before]
        return {
            "layouts": labels,
            **told(change, "change", "low", "high"),
            "since": since.created_at.isoformat(),
            "run": since.run,
            "last_before": last_good,
            "found": self.nights.at[change.found],
            "new": change.found == len(self.nights.runs) - 1,
            "versions": {name: list(pair) for name, pair in change.versions.items()},
            "hosts": list(change.hosts),
            "statement": _statement(change, labels, since.created_at, last_good),
        }

    def _host(self, host: SlowHost) -> Document:
        until = None if host.until is None else self.nights.at[host.until]
        since = self.nights.at[host.since]
        ended = "" if until is None else f" until {until[:10]}"
        return {
            "host": host.host,
            "since": since,
            "until": until,
            **told(host, "change", "low", "high"),
            "layouts": [self._label(layout) for layout in host.layouts],
            "statement": f"host {host.host} is {self._slower(host)}{ended}; what it measured then "
            "counts as no drift",
        }


def _key(row: HistoryRow) -> str:
    """The series that a run belongs to: a question, a layout and the program that runs it."""
    return f"{row.job_hash}{row.layout_hash}{row.program}"


def _by(change: StepChange) -> str:
    """For example "7.2% slower (6.3% to 8.1%)"."""
    low, high = sorted((abs(change.low), abs(change.high)))
    way = "slower" if change.change > 0 else "faster"
    return f"{abs(change.change):.1%} {way} ({low:.1%} to {high:.1%})"


def _statement(change: StepChange, labels: Sequence[str], since: datetime, last_good: str) -> str:
    """A sentence: what changed by how much, since when, and with which version."""
    named = ", ".join(labels[:NAMED])
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    versions = ", ".join(
        f"{name} {old or 'unknown'} -> {new or 'unknown'}"
        for name, (old, new) in change.versions.items()
    )
    if versions:
        why = f"first with {versions}"
    else:
        where = f", all on host {change.hosts[0]}" if len(change.hosts) == 1 else ""
        why = f"no version changed; the last run before was on {last_good[:10]}{where}"
    layouts = f"{counted(len(labels), 'layout')} " if len(labels) > 1 else ""
    return f"{layouts}{_by(change)} since {since:%Y-%m-%d}, {why} [{named}{more}]"
