"""GET /: the web page.

It holds no data of its own: it asks the service, with the key that its user types.
"""

from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).parents[2] / "web" / "index.html"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
router = APIRouter(tags=["web"])


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """A form for a job, its ranked plan with reasons and files, and the stored plans."""
    return HTMLResponse(_text(), headers=HEADERS)


@lru_cache(maxsize=1)
def _text() -> str:
    return PAGE.read_text(encoding="utf-8")
