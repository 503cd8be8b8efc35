"""Parameters and answers that several routes share: short texts, pages, errors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import Query

from planner.api.http.schemas import Problem
from planner.api.storage.paging import MAX_PAGE

Text = Annotated[str | None, Query(max_length=200)]
Cursor = Annotated[str | None, Query(max_length=400)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of these errors. What is not found (404) may be there unreadable (410)."""
    also = (410,) if 404 in statuses else ()
    return {status: {"model": Problem} for status in sorted({*statuses, *also})}


def answers(
    model: Any,
    *statuses: int,
    code: int = 200,
    also: Mapping[int | str, Any] = MappingProxyType({}),
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of an answer and of these errors, and of a key that is missing or too weak.

    code: of the answer. also: further entries, such as `NOT_MODIFIED`.
    """
    return {code: {"model": model}, **also, **problems(401, 403, *statuses)}
