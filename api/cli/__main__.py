"""`python -m planner.api.cli` is planner-cli."""

from planner.api.cli import main

if __name__ == "__main__":  # a planning process imports this file too
    main()
