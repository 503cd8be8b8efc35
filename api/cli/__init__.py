"""`planner-cli`: one file a command; what is slow to import is imported when the command runs."""

import sys


def main() -> None:
    """The console script."""
    from api.cli.root import run

    sys.exit(run(sys.argv[1:]))
