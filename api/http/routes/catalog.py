"""GET /catalog/{kind}[/{name}]."""

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.catalog import catalog_entry, catalog_list, kind_of
from api.errors import UnknownEntryError
from api.http import etags
from api.http.etags import NOT_MODIFIED
from api.http.paging import page_of
from api.http.requests import in_thread
from api.http.routes.parameters import Cursor, PageSize, problems
from api.http.schemas import CatalogList
from api.http.security import Reader
from api.storage.paging import MAX_PAGE
from planner.errors import UnknownNameError

router = APIRouter(tags=["catalog"])


@router.get("/catalog/{kind}", responses=problems(401, 403, 404, 422))
async def get_list(
    request: Request, kind: str, _: Reader, cursor: Cursor = None, limit: PageSize = MAX_PAGE
) -> CatalogList:
    """One line an entry of models, gpus, clusters, schedules or defaults."""
    lines = await in_thread(request, lambda: _found(catalog_list, kind))
    items, next_cursor = page_of(lines, lambda line: str(line["name"]), cursor, limit)
    return CatalogList(kind=kind, items=items, next_cursor=next_cursor)


@router.get(
    "/catalog/{kind}/{name:path}",
    response_model=None,
    responses={200: {"model": dict[str, Any]}, **NOT_MODIFIED, **problems(401, 403, 404)},
)
async def get_entry(request: Request, kind: str, name: str, _: Reader) -> Response:
    """One entry in full, with its sources. Aliases such as Hugging Face ids are names too."""
    entry = await in_thread(request, lambda: _found(catalog_entry, kind, name))
    return etags.answer(request, json.dumps(entry, default=str))


def _found(read: Any, kind: str, *names: str) -> Any:
    """Over HTTP a path that names nothing is 404."""
    try:
        kind_of(kind)
        return read(kind, *names)
    except UnknownNameError as error:
        raise UnknownEntryError(error.faults) from None
