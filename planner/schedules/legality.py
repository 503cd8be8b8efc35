"""Whether orders of actions would run.

Every microbatch runs once per stage, forward before backward, and nothing deadlocks.
"""

from collections import Counter
from collections.abc import Iterator

from planner.schedules.actions import Action, Item, Order, OverlappedPair, leaves

Singles = tuple[tuple[Action, ...], ...]


def check_legal(actions: Order, num_stages: int, m: int) -> None:
    """Returns when the orders run to their end; raises ValueError naming the first fault.

    Each stage is on one rank. Each (stage, microbatch) has one F and one B, or one F, one I and one
    W, in that order. Receives come from the neighbouring stages and never wait for each other in a
    circle. An overlapped pair needs both inputs before it starts.
    """
    singles = tuple(leaves(order) for order in actions)
    _check_homes(singles, num_stages)
    _check_counts(singles, num_stages, m)
    for rank, order in enumerate(singles):
        _check_local_order(rank, order)
    left = _blocked(actions, num_stages)
    if left:
        raise ValueError(f"deadlock: rank {left[0][0]} waits forever before {left[0][1]}")


def _check_homes(actions: Singles, num_stages: int) -> None:
    home: dict[int, int] = {}
    for rank, order in enumerate(actions):
        for action in order:
            if not 0 <= action.stage < num_stages:
                raise ValueError(f"{action} on rank {rank}: there are {num_stages} stages")
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} is on rank {home[action.stage]} and on rank {rank}"
                )


def _check_counts(actions: Singles, num_stages: int, m: int) -> None:
    seen = Counter(action for order in actions for action in order)
    doubled = next((action for action, count in seen.items() if count > 1), None)
    if doubled is not None:
        raise ValueError(f"{doubled} appears {seen[doubled]} times")
    for stage in range(num_stages):
        for microbatch in range(m):
            kinds = "".join(
                kind for kind in ("F", "I", "W", "B") if Action(stage, kind, microbatch) in seen
            )
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage}, microbatch {microbatch} runs {kinds or 'nothing'}; F and B, "
                    "or F, I and W are needed"
                )
    excess = len(seen) - sum(1 for action in seen if action.microbatch < m)
    if excess:
        raise ValueError(f"{excess} actions are for microbatches beyond {m}")


def _check_local_order(rank: int, order: tuple[Action, ...]) -> None:
    done: set[Action] = set()
    for action in order:
        needs = {"F": None, "I": "F", "B": "F", "W": "I"}[action.kind]
        if needs is not None and not any(before.kind == needs for before in _same(done, action)):
            raise ValueError(f"rank {rank} runs {action} before its {needs}")
        done.add(action)


def _same(done: set[Action], action: Action) -> Iterator[Action]:
    for candidate in (
        Action(action.stage, "F", action.microbatch),
        Action(action.stage, "I", action.microbatch),
    ):
        if candidate in done:
            yield candidate


def _blocked(actions: Order, num_stages: int) -> list[tuple[int, Item]]:
    """The item that each stuck rank waits before, after everything that can run has run."""
    done: set[tuple[int, str, int]] = set()
    position = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(actions):
            while position[rank] < len(order) and _ready(order[position[rank]], done, num_stages):
                for stage, kind, microbatch in leaves((order[position[rank]],)):
                    done.add((stage, "I" if kind == "B" else kind, microbatch))
                position[rank] += 1
                moved = True
    return [
        (rank, order[position[rank]])
        for rank, order in enumerate(actions)
        if position[rank] < len(order)
    ]


def _ready(item: Item, done: set[tuple[int, str, int]], num_stages: int) -> bool:
    if isinstance(item, OverlappedPair):
        return _ready(item.forward, done, num_stages) and _ready(item.backward, done, num_stages)
    if item.kind == "F":
        return item.stage == 0 or (item.stage - 1, "F", item.microbatch) in done
    if item.kind == "W":
        return True
    if item.stage == num_stages - 1:
        return (item.stage, "F", item.microbatch) in done
    return (item.stage + 1, "I", item.microbatch) in done
