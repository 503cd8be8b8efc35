"""`python -m api.cli` is planner-cli."""

from api.cli import main

main()
