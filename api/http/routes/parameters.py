"""Parameters and answers that several routes share: short texts, pages, errors."""

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
