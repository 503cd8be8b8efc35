"""Threads as futures: `concurrent.futures.wait` waits for them, also through a Ctrl-C."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def future_of(name: str, work: Callable[..., Result], *args: object) -> Future[Result]:
    """The result of `work`, which runs in a thread of its own that keeps no process from ending."""
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(work(*args))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
