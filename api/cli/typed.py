"""Values of flags as people type them, read when the command line is parsed."""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from planner.api.storage.common import TableStore
from planner.api.wiring import wire
from planner.catalog.clusters import cluster_names, gpu_names
from planner.catalog.models import model_names
from planner.errors import PlannerError
from planner.probes.pools import pool_forms
from planner.samplers import SAMPLERS
from planner.trainers.registry import TRAINERS
from planner.units import parse_tokens

Json = Annotated[bool, typer.Option(help="Machine output on stdout alone.")]
Limit = Annotated[int, typer.Option(help="At most so many, newest first.")]
Cursor = Annotated[str | None, typer.Option(help="Where the page before ended.")]
MOST_OFFERED = 20  # ids at once
NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def tokens_typed(text: str | int) -> int:
    """8192 from "8192" or "8k". Raises BadParameter."""
    if isinstance(text, int) or NUMBER.fullmatch(text):
        return int(text)
    try:
        return int(str(parse_tokens(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None


def complete_plan(incomplete: str) -> list[str]:
    """Ids of stored plans that begin so, newest first; none where the database does not answer."""
    return _stored(lambda: wire().store, incomplete)


def complete_sweep(incomplete: str) -> list[str]:
    return _stored(lambda: wire().sweeps, incomplete)


def _offering(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion by the names that begin so."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete.lower())]

    return complete


def _pools() -> Iterable[str]:
    """Names of pools, with a colon where an option has to follow."""
    return (form.partition(":")[0] + ":" * (":" in form) for form in pool_forms())


complete_model, complete_gpu = _offering(model_names), _offering(gpu_names)
complete_cluster, complete_pool = _offering(cluster_names), _offering(_pools)
complete_trainer, complete_sampler = _offering(lambda: TRAINERS), _offering(lambda: SAMPLERS.names)


def _stored(open_store: Callable[[], TableStore[Any]], incomplete: str) -> list[str]:
    """Ids that begin so. A shell that completes shows no errors, so an error offers nothing."""
    try:
        return [*open_store().ids_starting(incomplete.lower(), MOST_OFFERED)]
    except PlannerError:
        return []
