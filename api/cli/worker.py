"""`planner-cli worker`: runs queued and due work, until it is stopped."""

import signal
import threading
from typing import Annotated

import typer

from planner.api.cli.output import note
from planner.api.jobs.workers import ProbeWorkers, TaskWorkers, is_idle
from planner.api.logs import set_up
from planner.api.storage.engine import shown
from planner.api.wiring import wire


def command(
    tasks: Annotated[int, typer.Option(min=1)] = 1,
    probes: Annotated[int, typer.Option(min=0)] = 1,
    once: bool = False,
) -> None:
    """Run probes, studies and sweeps from the database; sweeps start when their schedule says.
    Stops gently on SIGTERM and Ctrl-C.

    tasks: Studies and sweep runs at once.
    probes: Queued probes at once.
    once: Leave when nothing is queued or due.
    """
    wiring = wire()
    set_up(wiring.settings.log_format, wiring.settings.log_level)
    _ = wiring.store
    stopped = threading.Event()
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    workers: list[TaskWorkers | ProbeWorkers] = [
        TaskWorkers(wiring, tasks, note),
        ProbeWorkers(wiring, probes, note),
    ]
    note(f"working on {shown(wiring.engine)}")
    for worker in workers:
        worker.start()
    while not stopped.wait(1.0):
        if once and is_idle(wiring):
            break
    for worker in workers:
        worker.stop()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
