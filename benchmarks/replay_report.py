"""Tables and plot of the replay: means with confidence intervals over runs.

The intervals come from drawing the hidden truths again.
"""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from replay_runs import KNOWING, OURS, TRIVIAL, Run

SHOWN = (1, 2, 3, 5, 8, 12)
MOST_REGRET = 1.0  # regret before the first measurement, and the largest that counts
RESAMPLES = 1000
COVERAGE = (5.0, 95.0)
Figure = Callable[[Sequence[Run]], float]


def regret_at(probes: int) -> Figure:
    """Mean regret after this many probes."""
    return lambda runs: float(np.mean([min(run.regret[probes - 1], MOST_REGRET) for run in runs]))


def quantile_to_goal(share: float) -> Figure:
    """Probes after which this share of the runs is within the goal."""
    return lambda runs: float(
        np.sort([run.to_goal for run in runs])[int(np.ceil(share * len(runs))) - 1]
    )


def within(probes: int) -> Figure:
    """Share of runs within the goal after this many probes."""
    return lambda runs: float(np.mean([run.to_goal <= probes for run in runs]))


def out_of_memory(runs: Sequence[Run]) -> float:
    """Share of all probes that ran out of memory."""
    return sum(run.oom for run in runs) / sum(run.probes for run in runs)


def gpu_hours(runs: Sequence[Run]) -> float:
    """Mean GPU-hours until the goal, or until the last probe if it was missed."""
    return float(np.mean([run.gpu_seconds for run in runs]) / 3600.0)


def interval(runs: Sequence[Run], figure: Figure) -> tuple[float, float]:
    """90% interval of a figure, by drawing the hidden truths again with replacement.

    All runs on one truth are drawn together.
    """
    rng = np.random.default_rng(0)
    by_truth: dict[str, list[Run]] = {}
    for run in runs:
        by_truth.setdefault(f"{run.truth} {run.seed if run.generated else ''}", []).append(run)
    truths = list(by_truth.values())
    drawn = [
        figure(
            [run for place in rng.integers(len(truths), size=len(truths)) for run in truths[place]]
        )
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, COVERAGE)
    return float(low), float(high)


def summary_lines(runs: Sequence[Run]) -> list[str]:
    """The summary for the terminal."""
    lines = []
    for kind, by_strategy in _grouped(runs).items():
        lines.append(kind)
        for name, mine in by_strategy.items():
            regrets = " ".join(f"@{n} {regret_at(n)(mine):.3f}" for n in SHOWN)
            reached = (
                f"median {quantile_to_goal(0.5)(mine):.0f} ninth {quantile_to_goal(0.9)(mine):.0f}"
            )
            shares = f"<=3 {within(3)(mine):.0%} <=5 {within(5)(mine):.0%}"
            lines.append(
                f"  {name:25s} {len(mine):4d} runs  regret {regrets}  to 2%: {reached} {shares}  "
                f"oom {out_of_memory(mine):.1%}"
            )
    return lines


def _grouped(runs: Sequence[Run]) -> dict[str, dict[str, "list[Run]"]]:
    grouped: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        grouped.setdefault(run.kind, {}).setdefault(run.strategy, []).append(run)
    return grouped


# ---- docs/replay.md ------------------------------------------------------------------------------

HEAD = """# Replay: what strategies reach with few probes

Written by `python benchmarks/replay.py --write`; every figure follows from the published rows, the cost model and seeds.

A strategy sees the cost model's predictions and the results of its own probes. **Regret**: how much slower the best layout that it has
measured is than the best one that fits; {most:.0%} where nothing has been measured yet, and at most. **To 2%**: probes until the regret is
at most 2%; more than {probes} is written >{probes}. **OOM**: share of all probes that ran out of memory. **GPU-hours**: until 2%, or spent
in vain, at 60 s to start and 13 steps a probe. Brackets: 90% intervals by drawing the hidden truths again.

- *measured sweeps*: published rows of one job with at least three layouts, predicted by a calibration that was fitted without their source.
- *own GPU grid*: the same of the runs that `benchmarks/gpu_survey.py` left in `benchmarks/measured/`, where there are any.
- *generated*: the legal layouts (the 20,000 fastest at most) of six jobs; the truth is another kind of model (`benchmarks/landscapes.py`)
  with random coefficients, at the stated root mean square error of ours, half of its variance common to all layouts as on the published
  sweeps.
- `cost-model, family known` is no planner's: it is given the covariance of the truth's own family. What it misses is out of reach.
- `as-shipped`: Optuna's sampler with its defaults and none of our predictions, each proposal mapped to the nearest legal layout.
- `history-pruning`: after PaddlePaddle's auto_tuner. `random, what fits`: our study with the `random` sampler.

![Regret against number of probes](replay.svg)

"""  # noqa: E501


def document(runs: Sequence[Run]) -> str:
    """The page docs/replay.md."""
    probes = len(runs[0].regret)
    parts = [
        HEAD.format(probes=probes, most=MOST_REGRET),
        "## What must be reached\n\n",
        *_verdicts(runs),
        "\n",
    ]
    for kind, by_strategy in _grouped(runs).items():
        columns = " | ".join(f"@{n}" for n in SHOWN)
        parts.append(f"## {kind[0].upper()}{kind[1:]}\n\n")
        parts.append(
            f"| strategy | runs | {columns} | to 2%, median | nine of ten | OOM | GPU-hours |\n"
        )
        parts.append("|---|" + "---:|" * (len(SHOWN) + 5) + "\n")
        parts += [_row(name, mine, probes) for name, mine in by_strategy.items()]
        parts.append("\n")
    return "".join(parts)


def _row(name: str, runs: Sequence[Run], probes: int) -> str:
    cells = [name, str(len(runs))]
    for shown in SHOWN:
        low, high = interval(runs, regret_at(shown))
        cells.append(f"{regret_at(shown)(runs):.1%} [{low:.1%}, {high:.1%}]")
    cells += [_count(quantile_to_goal(share)(runs), probes) for share in (0.5, 0.9)]
    cells += [f"{out_of_memory(runs):.1%}", f"{gpu_hours(runs):.1f}"]
    return "| " + " | ".join(cells) + " |\n"


def _count(value: float, probes: int) -> str:
    return f">{probes}" if value > probes else f"{value:.0f}"


def _verdicts(runs: Sequence[Run]) -> list[str]:
    """The issue's demands, kind by kind and over all kinds, with reached or missed."""
    lines = [
        "| truth | median to 2% (at most 3) | nine of ten (at most 5) | OOM (at most 5%) | regret "
        "never above best-first |\n"
    ]
    lines.append("|---|---:|---:|---:|---|\n")
    grouped = _grouped(runs)
    everything = {
        name: [run for kinds in grouped.values() for run in kinds.get(name, [])]
        for name in (OURS, TRIVIAL)
    }
    for kind, by_strategy in {**grouped, "all of them": everything}.items():
        if OURS in by_strategy and TRIVIAL in by_strategy:
            lines.append(_verdict(kind, by_strategy[OURS], by_strategy[TRIVIAL]))
    return lines


def _verdict(kind: str, ours: Sequence[Run], trivial: Sequence[Run]) -> str:
    probes = len(ours[0].regret)
    figures = ((quantile_to_goal(0.5)(ours), 3.0), (quantile_to_goal(0.9)(ours), 5.0))
    cells = [f"{_count(value, probes)} {_reached(value <= limit)}" for value, limit in figures]
    cells.append(f"{out_of_memory(ours):.1%} {_reached(out_of_memory(ours) <= 0.05)}")
    worse = [
        n
        for n in range(1, max(run.probes for run in ours) + 1)
        if regret_at(n)(ours) > regret_at(n)(trivial) + 1e-9
    ]
    cells.append(
        "reached at every number of probes"
        if not worse
        else f"missed at {', '.join(map(str, worse))} probes"
    )
    return f"| {kind} | " + " | ".join(cells) + " |\n"


def _reached(yes: bool) -> str:
    return "reached" if yes else "**missed**"


# ---- docs/replay.svg -----------------------------------------------------------------------------

COLOURS = {
    OURS: "#d62728", KNOWING: "#888888", TRIVIAL: "#1f77b4",
    "tpe": "#2ca02c", "gp-as-shipped": "#9467bd",
    "tpe-as-shipped": "#8c564b", "random": "#e377c2", "grid": "#bcbd22",
    "history-pruning": "#17becf",
}  # fmt: skip


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Plots mean regret against the number of probes, one panel per kind.

    Our strategy and the trivial baseline have a 90% band.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    matplotlib.rcParams.update({"svg.hashsalt": "replay", "font.size": 9})
    grouped = _grouped(runs)
    figure, axes = pyplot.subplots(
        1, len(grouped), figsize=(4.0 * len(grouped), 3.6), squeeze=False
    )
    for axis, (kind, by_strategy) in zip(axes[0], grouped.items(), strict=True):
        for name, colour in COLOURS.items():
            if name in by_strategy:
                _line(axis, name, colour, by_strategy[name])
        axis.axhline(0.02, color="black", linewidth=0.6, linestyle=":")
        axis.set(
            title=kind,
            xlabel="probes",
            yscale="log",
            ylim=(5e-4, 1.2),
            xlim=(1, len(runs[0].regret)),
        )
        axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100.0 * share:g}%"))
    axes[0][0].set_ylabel("mean regret")
    axes[0][-1].legend(fontsize=6.5, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _line(axis: object, name: str, colour: str, runs: Sequence[Run]) -> None:
    probes = np.arange(1, len(runs[0].regret) + 1)
    mean = np.array([regret_at(int(n))(runs) for n in probes])
    axis.plot(
        probes,
        np.maximum(mean, 1e-4),
        color=colour,
        label=name,
        linewidth=1.8 if name == OURS else 1.0,
    )  # type: ignore[attr-defined]
    if name in (OURS, TRIVIAL):
        band = np.array([interval(runs, regret_at(int(n))) for n in probes])
        axis.fill_between(
            probes,
            np.maximum(band[:, 0], 1e-4),
            np.maximum(band[:, 1], 1e-4),
            color=colour,
            alpha=0.15,
            linewidth=0,
        )  # type: ignore[attr-defined]
