"""Hook of mkdocs: the marks of `benchmarks.documents` on fences, as a reader sees them.

`not-run` becomes a note under the block; the other marks are the tests' alone. A title stays.
"""

import re
from typing import Any

FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r'not-run="([^"]*)"')
TITLE = re.compile(r'title="[^"]*"')


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain fences."""
    return FENCE.sub(_plain, markdown)


def _plain(found: re.Match[str]) -> str:
    language, marks, text = found.groups()
    title = TITLE.search(marks)
    reason = REASON.search(marks)
    note = f"\n\n*Not run by this page's test: {reason[1]}.*" if reason else ""
    return f"```{language}{' ' + title[0] if title else ''}\n{text}```{note}"
