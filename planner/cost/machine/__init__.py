"""The machine's numbers: profile, the knobs that calibration moves, seconds of a kernel."""
