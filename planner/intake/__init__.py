"""From what people have (a trainer's config, a launch script, a log) to a job and a layout, and
back into their own file.
"""
