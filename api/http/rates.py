"""How many requests a key may send, and how many wrong keys an address may try."""

import time

from limits import RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from planner.api.errors import TooManyRequestsError

WINDOW_SECONDS = 10
GUESSES_PER_MINUTE = 20


class Rates:
    """Counts of this process alone.

    requests_per_second: of one key, over WINDOW_SECONDS, so that a burst passes.
    """

    def __init__(self, requests_per_second: int) -> None:
        self._counts = MovingWindowRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerSecond(
            requests_per_second * WINDOW_SECONDS, WINDOW_SECONDS
        )
        self._guesses = RateLimitItemPerMinute(GUESSES_PER_MINUTE)

    def note_request(self, key: str) -> None:
        """Counts one of this key. Raises TooManyRequestsError."""
        if not self._counts.hit(self._requests, "key", key):
            raise self._too_many(self._requests, "key", key, f"key {key} asks too often")

    def note_guess(self, address: str) -> None:
        """Counts a key that is not known. Raises TooManyRequestsError.

        A known key is never refused for what others at its address try.
        """
        if not self._counts.hit(self._guesses, "guess", address):
            raise self._too_many(self._guesses, "guess", address, "too many unknown keys")

    def _too_many(
        self, limit: RateLimitItemPerSecond | RateLimitItemPerMinute, kind: str, who: str, why: str
    ) -> TooManyRequestsError:
        reset = self._counts.get_window_stats(limit, kind, who).reset_time
        return TooManyRequestsError(
            f"{why}: more than {limit.amount} in {limit.get_expiry()} s; ask again later",
            retry_after_seconds=max(0.0, reset - time.time()),
        )
