"""Micro-probes: one file a kind of kernel. Each turns a `planner.calibration.coverage.Shape` into
something to time.
"""
