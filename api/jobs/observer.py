"""Observers of a study or a sweep while it runs."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Observer:
    """Callbacks of who follows a study or a sweep, and the way to stop it.

    on_event: called with each event, JSON-safe.
    on_message: called with what is being done now.
    stop: set it to end with the best so far.
    """

    on_event: Callable[[Mapping[str, Any]], None] = lambda _: None
    on_message: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
