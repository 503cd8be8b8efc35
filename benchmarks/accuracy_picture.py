"""Draws docs/accuracy.svg from the accuracy report that ships.

    python benchmarks/accuracy_picture.py

One line for each unit (source, trainer, GPU, number format, dense or with experts): predicted over
measured step time of its runs where a calibration has not seen their source, and the mean 90%
interval around them. No pricing; a second.
"""

import argparse
import pathlib

import numpy as np

from planner.calibration.comparison import Compared, Comparison, shipped_comparison

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "accuracy.svg"


def units(found: Comparison) -> dict[str, list[Compared]]:
    """Timed rows, predicted without their source, by unit; the best predicted unit first."""
    by_unit: dict[str, list[Compared]] = {}
    for row in found.left_out["group"]:
        if row.predicted_seconds and row.measured_seconds and row.interval_seconds:
            by_unit.setdefault(row.label("unit"), []).append(row)
    return dict(sorted(by_unit.items(), key=lambda item: abs(np.mean(ratios(item[1])) - 1.0)))


def ratios(rows: list[Compared]) -> list[float]:
    """Predicted over measured seconds."""
    return [(row.predicted_seconds or 0.0) / (row.measured_seconds or 1.0) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=pathlib.Path, default=PICTURE)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "accuracy", "font.size": 7})
    found = shipped_comparison()
    drawn = units(found)
    figure, axes = pyplot.subplots(figsize=(7.5, 0.17 * len(drawn) + 1.0), layout="constrained")
    for place, rows in enumerate(drawn.values()):
        middle = float(np.exp(np.mean(np.log(ratios(rows)))))
        half = np.mean(
            [np.log(high / low) / 2.0 for low, high in (row.interval_seconds for row in rows)]
        )
        axes.plot(
            [middle * np.exp(-half), middle * np.exp(half)], [place] * 2, color="#c8d4e3", lw=4
        )
        axes.plot(ratios(rows), [place] * len(rows), "o", color="#1f4e79", ms=2.5, alpha=0.5)
    axes.axvline(1.0, color="black", lw=0.7)
    axes.set_xscale("log")
    ticks = [0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(drawn)), [f"{name} ({len(rows)})" for name, rows in drawn.items()])
    axes.invert_yaxis()
    axes.set_xlabel(
        "predicted over measured step time of runs whose source the calibration has not seen; bar: "
        "mean 90% interval"
    )
    axes.set_title(f"calibration {found.calibration_id}", fontsize=7)
    figure.savefig(options.to, metadata={"Date": None})


if __name__ == "__main__":
    main()
