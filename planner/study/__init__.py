"""The measured search: which layout to probe next, what a result shows, when to stop.

Entry point: `planner.study.ask_tell.run`.
"""
