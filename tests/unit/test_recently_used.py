"""Values by key, the longest unused dropped first."""

from planner.cost.pipeline.recently_used import RecentlyUsed


def test_the_longest_unused_make_room() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(10)
    for number, key in enumerate("abc"):
        kept.put(key, number, 3)
    assert kept.get("a") == 0  # used again, so that b is the oldest
    kept.put("d", 3, 3)
    assert [kept.get(key) for key in "abcd"] == [0, None, 2, 3]
    kept.put("a", 7, 4)  # again, and larger: 4 + 3 + 3
    assert [kept.get(key) for key in "acd"] == [7, 2, 3]


def test_the_last_one_is_kept_whatever_its_size() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(10)
    kept.put("a", 1, 2)
    kept.put("b", 2, 11)
    assert (kept.get("a"), kept.get("b")) == (None, 2)
    kept.clear()
    assert kept.get("b") is None
