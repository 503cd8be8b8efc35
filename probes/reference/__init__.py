"""A training program on plain torch: any layout that torch itself can run, on GPUs, on CPUs, or one
rank of a larger world alone.
"""

VERSION = "1"  # raised when the program changes what it measures
