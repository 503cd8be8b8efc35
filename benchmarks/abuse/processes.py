"""A service or worker under abuse, forked from a process that has imported the command line."""

import os
import sys

from tests import zygote
from tests.conftest import ROOT


def become(command: list[str], environment: dict[str, str], root: str, log: str) -> None:
    """Goes on as the command line of a checkout, in a session of its own."""
    os.setsid()
    streams = (os.devnull, log, log)
    if root == str(ROOT):
        zygote.become(command, environment, root, streams)
    zygote.enter(environment, root, streams)
    program = [sys.executable, "-m", "planner.api.cli", *command]
    os.execve(sys.executable, program, environment)
