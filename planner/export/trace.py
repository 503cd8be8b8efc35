"""A simulated step as a Chrome trace: opens in Perfetto (ui.perfetto.dev) and chrome://tracing."""

from collections.abc import Mapping

from planner.cost.pipeline.simulate import Simulation, Timeline
from planner.schedules.actions import leaves
from planner.units import MEGA

Event = dict[str, object]

MICROSECONDS_PER_SECOND = MEGA
"""Chrome trace timestamps are microseconds."""

KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "thread_state_running"),
    "I": ("input gradient", "rail_response"),
    "W": ("weight gradient", "rail_idle"),
    "B": ("backward", "thread_state_iowait"),
}
"""Kind -> (category, one of Chrome's reserved colours).

Perfetto colours by name and filters by category.
"""


def chrome_trace(simulation: Simulation, candidate: int = 0) -> dict[str, object]:
    """JSON-ready trace of one candidate.

    Each pipeline rank has a row of actions ("2F0") and a counter of its saved bytes.
    Source: Trace Event Format: complete events "X", counters "C", metadata "M", microseconds.
    Raises ValueError for a simulation without times.
    """
    timeline = simulation.timeline
    if timeline is None:
        raise ValueError("the simulation kept no times; simulate with times=True")
    ranks = int(timeline.rank_A.max()) + 1
    events = [_named("process_name", 0, "pipeline")]
    events += [_named("thread_name", rank, f"rank {rank}") for rank in range(ranks)]
    events += [_counter(rank, 0.0, 0.0) for rank in range(ranks)]
    for index in range(len(timeline.actions)):
        events += _action_events(timeline, index, candidate)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _action_events(timeline: Timeline, index: int, candidate: int) -> tuple[Event, Event]:
    action, rank = timeline.actions[index], int(timeline.rank_A[index])
    start = float(timeline.start_seconds_AC[index, candidate]) * MICROSECONDS_PER_SECOND
    end = float(timeline.end_seconds_AC[index, candidate]) * MICROSECONDS_PER_SECOND
    # of an overlapped pair: the forward, then the backward, which gives the pair its colour
    *others, last = leaves((action,))
    category, colour = KINDS[last.kind]
    shown: Event = {
        "name": str(action),
        "cat": category,
        "cname": colour,
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": start,
        "dur": end - start,
        "args": {
            "stage": last.stage,
            "microbatch": last.microbatch,
            **({"beside": str(others[0])} if others else {}),
        },
    }
    return shown, _counter(rank, end, float(timeline.kept_bytes_AC[index, candidate]))


def _counter(rank: int, microseconds: float, saved_bytes: float) -> Event:
    name = f"saved activations, rank {rank}"
    return {
        "name": name,
        "ph": "C",
        "pid": 0,
        "tid": rank,
        "ts": microseconds,
        "args": {"bytes": saved_bytes},
    }


def _named(kind: str, rank: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
