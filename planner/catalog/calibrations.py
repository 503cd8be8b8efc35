"""The files that `benchmarks/` wrote for the package: the calibration, and how accurate it is."""

from importlib.resources import files


def calibration_text(name: str) -> str:
    """The JSON of `calibrations/<name>.json`: "shipped" or "accuracy"."""
    return (
        files("planner.catalog").joinpath(f"calibrations/{name}.json").read_text(encoding="utf-8")
    )
