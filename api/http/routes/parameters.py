"""What several routes take and answer alike: short texts, pages, errors."""

from typing import Annotated, Any

from fastapi import Query

from api.http.schemas import Problem
from api.storage.paging import MAX_PAGE

Text = Annotated[str | None, Query(max_length=200)]
Cursor = Annotated[str | None, Query(max_length=400)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of these errors."""
    return {status: {"model": Problem} for status in statuses}
