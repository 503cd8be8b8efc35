"""Turns at a subject: one works, one waits, and whoever comes meanwhile is covered by that one."""

import queue
import threading

from planner.api.turns import Turns

WITHOUT_END = 60.0


def test_of_three_one_works_one_waits_and_one_is_covered() -> None:
    turns, ours = Turns(), queue.Queue[bool]()

    def take() -> None:
        with turns.turn("model") as mine:
            ours.put(mine)

    others = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    with turns.turn("model") as mine:
        assert mine
        for other in others:
            other.start()
        assert not ours.get(timeout=WITHOUT_END), "it returns while the first is still at work"
        with turns.turn("another model") as free:
            assert free
        assert ours.empty(), "the other waits"
    assert ours.get(timeout=WITHOUT_END)
    for other in others:
        other.join()
    with turns.turn("model") as again:
        assert again, "whoever comes later is covered by nobody"
