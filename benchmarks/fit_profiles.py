"""Fits named parameters of one trainer's profile to the published rows, and prints where they go and what the error becomes.

    python benchmarks/fit_profiles.py megatron compute,elementwise,tp_hidden

Least absolute error of the logarithm of the step time, each parameter held near its prior (40% is one unit of penalty).
It prints; a person decides what to keep, and writes it into `planner.cost.profile.PROFILES` with the reason.
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
from scipy.optimize import minimize

from planner.columns import LayoutBatch
from planner.cost.price import Pricer
from planner.cost.profile import PROFILES, Profile
from planner.specs.job import Job

ROWS = pathlib.Path(__file__).parent / "measured" / "public.jsonl"
LEASH = 0.4


def load(trainer: str) -> list[tuple[Job, LayoutBatch, np.ndarray]]:
    """Jobs that differ only in layout, priced together: (job, layouts, measured seconds)."""
    groups: dict[str, list[dict]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        if row["training"]["trainer"] == trainer and "step_seconds" in row["measured"]:
            groups.setdefault(json.dumps([row["model"], row["cluster"], row["training"]], sort_keys=True), []).append(row)
    loaded = []
    for rows in groups.values():
        jobs = [Job.from_user(row) for row in rows]
        seconds = np.array([row["measured"]["step_seconds"] for row in rows])
        loaded.append((jobs[0], LayoutBatch.from_layouts([job.layout for job in jobs if job.layout]), seconds))
    return loaded


def moved(prior: Profile, names: list[str], steps: np.ndarray) -> Profile:
    """The prior with each named parameter moved: shares on the logit scale, the rest on the log scale."""
    values = {}
    for name, step in zip(names, steps, strict=True):
        value = getattr(prior, name)
        if name.endswith("hidden"):
            value = min(max(value, 1e-3), 1 - 1e-3)
            values[name] = float(1 / (1 + np.exp(-(np.log(value / (1 - value)) + step))))
        else:
            values[name] = float(value * np.exp(step))
    return dataclasses.replace(prior, **values)


def log_errors(data: list[tuple[Job, LayoutBatch, np.ndarray]], profile: Profile) -> np.ndarray:
    return np.concatenate([np.log(Pricer.build(j.model, j.cluster, j.training, profile).price(b).step_seconds / s) for j, b, s in data])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=sorted(PROFILES))
    parser.add_argument("parameters", help="comma-separated fields of Profile")
    parser.add_argument("--evaluations", type=int, default=150)
    options = parser.parse_args()
    names, prior, data = options.parameters.split(","), PROFILES[options.trainer], load(options.trainer)

    def loss(steps: np.ndarray) -> float:
        errors = log_errors(data, moved(prior, names, steps))
        return float(np.abs(errors).mean() + 0.2 * ((steps / LEASH) ** 2).sum() / len(errors))

    best = minimize(loss, np.zeros(len(names)), method="Nelder-Mead", options={"maxfev": options.evaluations})
    for label, profile in (("prior", prior), ("fitted", moved(prior, names, best.x))):
        error = np.expm1(log_errors(data, profile))
        values = ", ".join(f"{name} {getattr(profile, name):.4g}" for name in names)
        print(f"{label:7s} {len(error)} rows  MAPE {np.abs(error).mean():.1%}  bias {error.mean():+.1%}  {values}")


if __name__ == "__main__":
    main()
