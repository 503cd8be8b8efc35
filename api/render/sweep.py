"""The report of a sweep's run as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.units import counted


def report_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield str(result["headline"])
    spent = f"{counted(result['probes'], 'probe')}, {result['gpu_seconds']:.0f} GPU-seconds"
    yield "; ".join((spent, *_software(result)))
    for bad in result.get("quarantined", ()):
        yield f"host {bad['host']} is kept out for a day: {'; '.join(bad['evidence'])}"
    yield from drift_lines(result)
    for job in result["jobs"]:
        error = f": {job['error']}" if job.get("error") else ""
        yield f"{job['model']} on {job['num_gpus']} {job['gpu']}{error}"
        if job["new_winner"]:
            yield f"  new winner: {job['winner']} (before: {job['winner_before']})"
        for line in job["layouts"]:
            yield f"  {sweep_line(line)}"


def drift_lines(result: Mapping[str, Any]) -> Iterator[str]:
    drift = result.get("drift")
    if not drift:
        return
    young = drift.get("too_few_nights")
    if young and young["layouts"]:
        yield (
            f"drift: too few nights to tell of {counted(young['layouts'], 'layout')}: "
            f"{young['most']} of {young['needed']} nights"
        )
    if drift["threshold"] is None:
        return
    yield (
        f"drift: {counted(drift['layouts'], 'layout')} over {counted(drift['nights'], 'run')}, at "
        f"most one false alarm in {drift['runs_per_false_alarm']:g} runs; they differ by "
        f"{drift['night_sd']:.1%} from run to run"
    )
    for change in drift["changes"]:
        yield f"  {'new' if change['new'] else 'stands'}: {change['statement']}"
    for host in drift["hosts"]:
        yield f"  {host['statement']}"
    for creep in drift.get("creeps", ()):
        yield f"  {creep['statement']}"
    for outlier in drift["outliers"]:
        yield f"  far off this time only: {outlier['layout']} {outlier['change']:+.1%}"
    if not any(drift.get(name) for name in ("changes", "hosts", "outliers", "creeps")):
        yield "  none"


def _software(result: Mapping[str, Any]) -> Iterator[str]:
    """The sets of software versions under which it was measured."""
    sets = (line.get("software") or {} for job in result["jobs"] for line in job["layouts"])
    yield from dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in sorted(each.items()))
        for each in sets
        if each
    )


def sweep_line(line: Mapping[str, Any]) -> str:
    """One measured layout, and how it changed since the last run."""
    head = f"{line['layout']} [{line['why']}]"
    if line["status"] != "ok":
        return f"{head}: {line['status']}" + (f", {line['message']}" if line["message"] else "")
    parts = [f"{line['step_seconds']:.4g} s"]
    if line["predicted_step_seconds"]:
        parts.append(f"predicted {line['predicted_step_seconds']:.4g} s")
    if line["change"] is not None:
        parts.append(f"{line['change']:+.1%} since the last run")
    return f"{head}: {', '.join([*parts, *versions_changed(line)])}"


def versions_changed(line: Mapping[str, Any]) -> list[str]:
    """The software that changed since the last run, as "torch 2.9 -> 2.10"."""
    changed = line.get("versions_changed") or {}
    return [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]
