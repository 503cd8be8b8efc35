"""Reads a sweep as a person writes it, with the files it names, and checks it and all its jobs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from planner.errors import SpecError, fault
from planner.intake.jobs import read_job
from planner.specs.job import Job
from planner.specs.sweep import MOST_JOBS, SweepSpec
from planner.specs.validation import build
from planner.trainers.registry import resolve_layout
from planner.units import counted


def read_sweep(values: object, *, allow_files: bool = True) -> SweepSpec:
    """The checked sweep with all its jobs, and with the contents of the files that they name.

    Raises SpecError.
    """
    spec = build(SweepSpec, values, "sweep")
    written = list(_written(spec))
    if not 1 <= len(written) <= MOST_JOBS:
        remedy = "list jobs, or models, clusters and trainings to be crossed"
        raise fault("sweep.jobs", len(written), f"a sweep has 1 to {MOST_JOBS} jobs", remedy)
    if not (spec.measure.top_k or spec.measure.anchors or spec.measure.informative):
        raise fault("sweep.measure", None, "measures nothing", "set top_k, anchors or informative")
    parsed = [_parsed(job, places, allow_files=allow_files) for job, places in written]
    for number, anchor in enumerate(spec.measure.anchors):
        _check_anchor(anchor, f"sweep.measure.anchors.{number}", parsed)
    jobs = [dict(job.request) for job in parsed]
    return spec.model_copy(update={"jobs": jobs, "models": [], "clusters": [], "trainings": []})


def _written(spec: SweepSpec) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """(a job, and where each of its keys was written)."""
    for number, job in enumerate(spec.jobs):
        yield job, {"": f"sweep.jobs.{number}."}
    for (i, model), (j, cluster), (k, training) in product(
        *map(enumerate, (spec.models, spec.clusters, spec.trainings))
    ):
        places = {
            "model": f"sweep.models.{i}",
            "cluster": f"sweep.clusters.{j}",
            "training": f"sweep.trainings.{k}",
        }
        yield {"model": model, "cluster": cluster, "training": training}, places


def _parsed(values: Mapping[str, Any], places: Mapping[str, str], *, allow_files: bool) -> Job:
    """The job; its faults are named by where each key was written.

    places: key -> where it was written; "" gives the prefix for all other keys.
    """

    def place(field: str) -> str:
        key, dot, rest = field.partition(".")
        return f"{places[key]}{dot}{rest}" if key in places else places.get("", "") + field

    try:
        return read_job(values, allow_files=allow_files)
    except SpecError as error:
        raise error.renamed(place) from None


def _check_anchor(anchor: object, field: str, jobs: Sequence[Job]) -> None:
    """Raises SpecError for what is no layout, or a layout of a size that no job has."""
    sizes = sorted({size for job in jobs for size in job.cluster.num_gpus_choices})
    held = [
        resolve_layout(
            anchor, trainer=job.training.trainer, num_gpus=job.cluster.num_gpus, field=field
        ).num_gpus
        for job in jobs
    ]
    if not set(held) & set(sizes):
        shown = ", ".join(map(str, sizes))
        remedy = "correct its degrees: dp_replicate x dp_shard x cp x tp x pp is the number of GPUs"
        raise fault(
            field, anchor, f"takes {counted(held[0], 'GPU')}; the sweep's jobs have {shown}", remedy
        )
