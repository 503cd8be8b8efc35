"""Reads what people have (a trainer's config, a launch script, a log) as a job and a layout.

It also writes a layout back into their own file.
"""
