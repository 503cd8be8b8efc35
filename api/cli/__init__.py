"""`planner-cli`: one file a command; what is slow to import is imported when the command runs."""

import sys


def main() -> None:
    """The console script."""
    try:
        from api.cli.root import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line was read
        code = 130
    sys.exit(code)
