"""Studies and sweeps watched on a terminal: a bar shows how far they are, Ctrl-C ends gently."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from planner.api.cli.output import note, progress
from planner.api.jobs.leases import Observer
from planner.api.jobs.standing import standing_line
from planner.api.jobs.studies import ask_study, run_study
from planner.api.render.figures import seconds
from planner.api.render.probing import REALLY
from planner.api.wiring import Wiring
from planner.specs.plan import Plan


def make_plan_with_probes(wiring: Wiring, values: object) -> tuple[Plan, bool]:
    """(the plan, whether it was interrupted). Raises what planning raises."""
    held = ask_study(wiring, values, allow_files=True, ours=True)
    if held.fencing_token > 1:
        note(f"going on with {held.id}, which its last process left unfinished")
    observer = Observer()
    with gentle_interrupt(observer) as interrupted, bar(observer, "probes", _stand):
        plan = run_study(wiring, held, observer)
    assert plan is not None, "only a worker puts a study back"
    return plan, bool(interrupted)


@contextmanager
def gentle_interrupt(observer: Observer) -> Iterator[list[int]]:
    """The first Ctrl-C asks for the best plan so far, the second ends the command."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        observer.stop.set()
        note("ending with the best so far; once more to end at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """How far the work is, after an event.

    words: shown beside the bar.
    line: printed and kept.
    passing: whether the line is left out where there is a bar.
    """

    done: int
    total: int
    words: str
    line: str
    passing: bool = False


@contextmanager
def bar(
    observer: Observer, unit: str, stand: Callable[[Mapping[str, Any]], Stand]
) -> Iterator[None]:
    """On a terminal a bar that counts units, and lines above it; else a line an event.

    All on stderr.
    """
    watched = sys.stderr.isatty()
    with progress(bar=True, hidden=not watched) as shown:
        line = shown.add_task(unit, total=None, words="planning on paper")

        def on_event(body: Mapping[str, Any]) -> None:
            now = stand(body)
            shown.update(line, total=now.total, completed=now.done, words=now.words)
            if not (watched and now.passing):
                note(now.line)

        observer.on_event = on_event
        observer.on_message = lambda words: shown.update(line, words=words)
        yield


def _stand(body: Mapping[str, Any]) -> Stand:
    probes = int(body["probes"])
    total, passing = probes + int(body["probes_left"]), body["event"] == "asked"
    return Stand(done=probes, total=total, words=_summary(body), line=_line(body), passing=passing)


def sweep_stand(body: Mapping[str, Any]) -> Stand:
    """How far a run of a sweep is, in layouts; later jobs count with as many as they ask for."""
    message, standing = str(body["message"]), standing_line(body)
    return Stand(
        done=int(body["layouts"]),
        total=int(body["num_layouts"]),
        words=f"{standing} · {message}" if message else standing,
        line=f"{message} ({standing})" if message else standing,
        passing=not message,
    )


def _summary(body: Mapping[str, Any]) -> str:
    parts = []
    if body["best_step_seconds"] is not None:
        parts.append(_best(body))
    if body["expected_regret"] is not None:
        parts.append(f"expected regret {body['expected_regret']:.1%}")
    return " · ".join([*parts, f"{body['gpu_seconds_left']:.0f} GPU-seconds left"])


def _best(body: Mapping[str, Any]) -> str:
    """The fastest step measured so far; before any, the leader's expected one."""
    step = seconds(body["best_step_seconds"])
    really = body.get("best_rung", REALLY[0]) in REALLY
    return f"best {step} a step" if really else f"{step} a step expected of the leader"


def _line(body: Mapping[str, Any]) -> str:
    word = {"asked": "probe", "told": "  ->", "stopped": "stopped:"}[body["event"]]
    layout = f" {body['layout']}:" if body["layout"] else ""
    tail = f" ({_summary(body)})" if body["event"] == "told" else ""
    return f"{word}{layout} {body['message']}{tail}"


def failure_of(plan: Plan) -> str | None:
    """The last failure's message where probes were to run and none gave a number; else None."""
    probing = plan.probing or {}
    trials = probing.get("trials", [])
    if any(trial.get("value") for trial in trials):
        return None
    failed = probing.get("probes") and any(trial["state"] == "fail" for trial in trials)
    if not failed and not probing.get("broken"):
        return None
    return str(probing["stopped"])
