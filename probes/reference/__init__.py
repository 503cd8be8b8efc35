"""The reference program: trains on plain torch with any layout that torch itself can run.

It runs on GPUs, on CPUs, or as one emulated rank of a larger world.
"""

VERSION = "1"  # raised when the program changes what it measures
