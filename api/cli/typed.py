"""Values of flags as people type them, read when the command line is parsed."""

import re
from collections.abc import Callable, Iterable

import typer

MOST_OFFERED = 20  # ids at once
NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def tokens_typed(text: str | int) -> int:
    """8192 from "8192" or "8k". Raises BadParameter."""
    from planner.units import parse_tokens

    if isinstance(text, int) or NUMBER.fullmatch(text):
        return int(text)
    try:
        return int(str(parse_tokens(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None


def complete_plan(incomplete: str) -> list[str]:
    """Ids of stored plans that begin so, newest first; none where the database does not answer."""
    return _offered(lambda: _plans(incomplete))


def complete_sweep(incomplete: str) -> list[str]:
    """Ids of sweeps that begin so."""
    return _offered(lambda: _sweeps(incomplete))


def complete_model(incomplete: str) -> list[str]:
    """Names of models in the catalogue."""
    return _offered(lambda: _beginning(_models(), incomplete))


def complete_gpu(incomplete: str) -> list[str]:
    """Names of GPUs in the catalogue."""
    return _offered(lambda: _beginning(_gpus(), incomplete))


def complete_cluster(incomplete: str) -> list[str]:
    """Names of clusters in the catalogue."""
    return _offered(lambda: _beginning(_clusters(), incomplete))


def complete_pool(incomplete: str) -> list[str]:
    """Names of pools, with a colon where an option has to follow."""
    return _offered(lambda: _beginning(_pools(), incomplete))


def complete_trainer(incomplete: str) -> list[str]:
    """Names of trainers."""
    return _offered(lambda: _beginning(_trainers(), incomplete))


def complete_sampler(incomplete: str) -> list[str]:
    """Names of samplers."""
    from planner.samplers import SAMPLERS

    return _offered(lambda: _beginning(SAMPLERS.names, incomplete))


def _offered(find: Callable[[], list[str]]) -> list[str]:
    """What was found. A shell that completes shows no errors, so an error offers nothing."""
    from planner.errors import PlannerError

    try:
        return find()
    except PlannerError:
        return []


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete.lower())]


def _models() -> list[str]:
    from planner.catalog.models import model_names

    return model_names()


def _gpus() -> list[str]:
    from planner.catalog.clusters import gpu_names

    return list(gpu_names())


def _clusters() -> list[str]:
    from planner.catalog.clusters import cluster_names

    return list(cluster_names())


def _pools() -> list[str]:
    from probes.pools import pool_forms

    return [form.partition(":")[0] + ":" * (":" in form) for form in pool_forms()]


def _trainers() -> list[str]:
    from planner.trainers.registry import TRAINERS

    return list(TRAINERS)


def _plans(incomplete: str) -> list[str]:
    from api.storage.common import ids_starting
    from api.storage.tables import PlanRow
    from api.wiring import wire

    return ids_starting(wire().store.engine, PlanRow, incomplete.lower(), MOST_OFFERED)


def _sweeps(incomplete: str) -> list[str]:
    from api.storage.common import ids_starting
    from api.storage.tables import SweepRow
    from api.wiring import wire

    return ids_starting(wire().store.engine, SweepRow, incomplete.lower(), MOST_OFFERED)
