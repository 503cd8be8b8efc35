"""GET and POST /catalog/{kind}, GET /catalog/{kind}/{name}."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from planner.api.catalog import Entry, catalog_entry, catalog_list, kind_of
from planner.api.errors import UnknownEntryError
from planner.api.http.bodies import JSON, CheckedByPlanner
from planner.api.http.routes.parameters import Cursor, PageSize, answers, with_etag
from planner.api.http.routing import Wired, strict_route
from planner.api.http.schemas import CatalogList, EntryBody
from planner.api.http.security import Planner, Reader
from planner.api.own_entries import KINDS, add_entry, full_name, named_entry, own_entry, own_line
from planner.api.storage.common import MAX_PAGE, decoded, encoded, unknown_cursor
from planner.errors import Fault, UnknownNameError, fault

router = APIRouter(tags=["catalog"], route_class=strict_route())
EntryJson = Annotated[Any, CheckedByPlanner(EntryBody), Body()]


@router.get("/catalog/{kind}")
def get_list(
    wiring: Wired, kind: str, _: Reader, cursor: Cursor = None, limit: PageSize = MAX_PAGE
) -> CatalogList:
    """One line an entry of models, gpus, clusters, schedules or defaults.

    Entries of your own come first, each in its newest version.
    """
    packaged = _found(catalog_list, kind)
    lines = [*map(own_line, wiring.own_entries.list(kind)), *packaged]
    items, next_cursor = _page_of(lines, cursor, limit)
    return CatalogList(kind=kind, items=items, next_cursor=next_cursor)


@router.get("/catalog/{kind}/{name:path}", responses=answers(dict[str, Any], etag=True))
def get_entry(request: Request, wiring: Wired, kind: str, name: str, _: Reader) -> Response:
    """One entry in full, with its sources. Aliases such as Hugging Face ids are names too.

    `own/NAME` is the newest version of an entry of your own, `own/NAME@2` the second.
    """
    own = named_entry(wiring, kind, name)
    entry = _found(catalog_entry, kind, name) if own is None else own_entry(own)
    return with_etag(request, json.dumps(entry, default=str))


@router.post("/catalog/{kind}", status_code=201, responses=answers(dict[str, Any], 503, code=201))
def post_entry(wiring: Wired, kind: str, key: Planner, entry: EntryJson = None) -> Response:
    """Adds a model, GPU or cluster of your own, which jobs then mean as `own/NAME`.

    Another POST of the name is its next version, which the older ones and what was planned with
    them outlive; one that says the same is the version that is there. A name is its owner's.
    """
    if kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise UnknownEntryError(Fault("kind", kind, "takes no entries", f"use {kinds}"))
    if not isinstance(entry, Mapping) or set(entry) != {"name", "spec"}:
        rule, remedy = "must have name and spec, and nothing else", 'send {"name":, "spec":}'
        raise fault("body", None, rule, remedy)
    stored = add_entry(wiring, kind, entry["name"], entry["spec"])
    headers = {"location": f"/catalog/{kind}/{full_name(stored)}"}
    return Response(json.dumps(own_entry(stored)), 201, headers, media_type=JSON)


def _found(read: Any, kind: str, *names: str) -> Any:
    """Over HTTP a path that names nothing is 404."""
    try:
        kind_of(kind)
        return read(kind, *names)
    except UnknownNameError as error:
        raise UnknownEntryError(error.faults) from None


def _page_of(
    lines: Sequence[Entry], cursor: str | None, limit: int
) -> tuple[list[Entry], str | None]:
    """(lines of the page, cursor of the next one; None on the last).

    A cursor is the name of the line before the page. Raises SpecError for one of no line.
    """
    names = [str(line["name"]) for line in lines]
    start = 0
    if cursor is not None:
        before = decoded(cursor)
        if before not in names:
            raise unknown_cursor(cursor)
        start = names.index(before) + 1
    end = start + limit
    return list(lines[start:end]), encoded(names[end - 1]) if end < len(lines) else None
