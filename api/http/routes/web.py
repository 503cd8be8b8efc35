"""GET /: the web page; GET /docs: every route, to try out. All their files come from here.

The pages hold no data of their own: they ask the service, with the key that their user types.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from planner.api.errors import need
from planner.api.http.routes.parameters import problems, with_etag
from planner.api.http.routing import ThreadRoute
from planner.charts.chart import javascript

FOLDER = Path(__file__).parents[2] / "web"
STRICT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Swagger UI writes styles into its elements
WITH_STYLES = STRICT.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
SWAGGER = "fastapi_offline"  # a package that carries its files
router = APIRouter(tags=["web"], route_class=ThreadRoute)
_vega = cache(javascript)  # bundling takes a while


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """The page that lists plans, studies, sweeps, accuracy and calibrations."""
    return _html("index.html", STRICT)


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """Swagger UI on this service's OpenAPI document."""
    need(SWAGGER, extra="server")
    return _html("docs.html", WITH_STYLES)


@router.get(
    "/web/vega.js",
    response_class=Response,
    responses={200: {"content": {"text/javascript": {}}}, **problems(503)},
)
def vega(request: Request) -> Response:
    """Vega, Vega-Lite and Vega-Embed, which draw the charts of the page."""
    script = with_etag(request, _vega(), "text/javascript")
    script.headers["x-content-type-options"] = "nosniff"
    return script


def mount_files(app: FastAPI) -> None:
    """Serves the scripts and styles of both pages; their routes come first."""
    found = find_spec(SWAGGER)
    if found is not None and found.origin is not None:
        swagger = Path(found.origin).parent / "static"
        app.mount("/web/swagger", StaticFiles(directory=swagger), name="swagger")
    app.mount("/web", StaticFiles(directory=FOLDER), name="web")


def _html(name: str, policy: str) -> HTMLResponse:
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse((FOLDER / name).read_text(encoding="utf-8"), headers=headers)
