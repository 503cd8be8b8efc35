"""A scatter of text, for terminals: the ranks of a plan's layouts over throughput and memory."""

from collections.abc import Sequence

from planner.charts.pareto import Point, shown
from planner.units import GIB

HEIGHT, LEAST_WIDTH = 14, 24
LABEL = 9  # columns of the vertical axis
DOT, UNFIT, MEASURED, MANY = "·", "x", "m", "+"


def scatter(points: Sequence[Point], usable_bytes: float | None, width: int) -> list[str]:
    """Lines of text. Ranked layouts by their number (from 10 on "+"), others as dots.

    Where several fall on one place, the best ranked is shown.
    """
    points, left_out = shown(points, usable_bytes)
    columns = max(LEAST_WIDTH, width - LABEL - 2)
    x, y = _scale([p.device_bytes for p in points]), _scale(_heights(points))
    cells = [[" "] * columns for _ in range(HEIGHT)]

    def put(gib: float, rate: float, mark: str) -> None:
        column = round((gib - x[0]) / (x[1] - x[0]) * (columns - 1))
        cells[HEIGHT - 1 - round((rate - y[0]) / (y[1] - y[0]) * (HEIGHT - 1))][column] = mark

    for point in sorted(points, key=lambda p: (p.rank is not None, -(p.rank or 0))):
        put(point.device_bytes, point.tokens_per_second_per_gpu, _mark(point))
        if point.measured_tokens_per_second_per_gpu:
            put(point.device_bytes, point.measured_tokens_per_second_per_gpu, MEASURED)
    lines = [
        f"{_tick(y, row):>{LABEL}} |{''.join(cells[row]).rstrip()}".rstrip()
        for row in range(HEIGHT)
    ]
    low, high = f"{x[0] / GIB:.1f}", f"{x[1] / GIB:.1f} GiB"
    middle = "device memory".center(max(0, columns - len(low) - len(high)))
    return [
        "tokens/s/GPU",
        *lines,
        " " * LABEL + " +" + "-" * columns,
        " " * (LABEL + 2) + (low + middle + high).rstrip(),
        _legend(points, left_out),
    ]


def _mark(point: Point) -> str:
    if point.rank is not None:
        return str(point.rank) if point.rank < 10 else MANY
    return DOT if point.fits else UNFIT


def _heights(points: Sequence[Point]) -> list[float]:
    measured = [p.measured_tokens_per_second_per_gpu for p in points]
    return [p.tokens_per_second_per_gpu for p in points] + [rate for rate in measured if rate]


def _scale(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low * 0.99, low * 1.01 or 1.0)


def _tick(y: tuple[float, float], row: int) -> str:
    if row % 4 and row != HEIGHT - 1:
        return ""
    return f"{y[1] - (y[1] - y[0]) * row / (HEIGHT - 1):,.0f}"


def _legend(points: Sequence[Point], left_out: int) -> str:
    meanings = {
        DOT: any(p.rank is None and p.fits for p in points) and "considered",
        UNFIT: any(not p.fits for p in points) and "does not fit",
        MEASURED: any(p.measured_tokens_per_second_per_gpu for p in points) and "measured",
        MANY: any((p.rank or 0) >= 10 for p in points) and "number 10 or more",
    }
    said = [f"{mark} {meaning}" for mark, meaning in meanings.items() if meaning]
    far = [f"{left_out:,} that need far more left out"] if left_out else []
    return "  ".join(["1-9 rank", *said, *far])
