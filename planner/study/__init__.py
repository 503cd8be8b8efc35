"""Spending probes: which layout to measure next, what a result teaches, when to stop. Entry point:
`planner.study.ask_tell.run`.
"""
