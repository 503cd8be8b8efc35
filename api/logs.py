"""The log of a long-running process: a line an event, for people or as JSON for machines.

What a line says may come from a request or a file. So control characters are escaped: no line can
pretend to be another, or move a terminal's cursor.
"""

import logging
import re
import sys
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
FIELDS = ("asctime", "levelname", "name", "message")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
# of the request that is being answered; empty outside of one
request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_up(form: LogFormat, level: LogLevel) -> None:
    """Sends every logger of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json() if form == "json" else OneLine(TEXT))
    handler.addFilter(_with_request)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class OneLine(logging.Formatter):
    """One line a message, whatever is in it; a traceback follows, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the request that it belongs to."""
        line = escaped(super().formatMessage(record))
        request = getattr(record, "request_id", "")
        return f"{line} [{request}]" if request else line

    def format(self, record: logging.LogRecord) -> str:
        head, *rest = super().format(record).split("\n")
        return "\n".join([head, *(f"    {escaped(line)}" for line in rest)])


def escaped(text: str) -> str:
    """The text with control characters as code writes them, such as a backslash and n."""
    return CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def _json() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        FIELDS, rename_fields={"asctime": "at", "levelname": "level", "name": "logger"}
    )


def _with_request(record: logging.LogRecord) -> bool:
    request = request_id.get()
    if request:
        record.request_id = request
    return True
