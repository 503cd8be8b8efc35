"""What has to be done: operations over named dimensions, and what each axis and recipe does to
them.
"""
