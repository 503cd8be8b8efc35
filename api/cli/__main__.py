"""`python -m api.cli` is planner-cli."""

from api.cli import main

if __name__ == "__main__":  # a planning process imports this file too
    main()
