"""A line of the log is one line, whatever a request put into it."""

import json
import logging
import sys

from planner.api.logs import OneLine, escaped, request_id, set_up


def record(message: str, **changes: object) -> logging.LogRecord:
    made = logging.LogRecord("planner.x", logging.INFO, "x.py", 1, message, (), None)
    made.__dict__.update(changes)
    return made


def test_control_characters_are_written_out() -> None:
    assert escaped("a\nb\x1b[2J\x85\u2028\x7f") == r"a\nb\x1b[2J\x85\u2028\x7f"
    assert escaped("tab\tand ünï stay") == "tab\tand ünï stay"


def test_a_message_is_one_line_and_names_its_request() -> None:
    line = OneLine("%(levelname)s %(message)s").format(record("one\nERROR forged"))
    assert line == r"INFO one\nERROR forged"
    named = OneLine("%(message)s").format(record("one", request_id="a-1"))
    assert named == "one [a-1]"


def test_a_traceback_follows_indented() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("it broke", exc_info=sys.exc_info())
    head, *rest = OneLine("%(message)s").format(made).split("\n")
    assert head == "it broke"
    assert len(rest) > 2
    assert all(line.startswith("    ") for line in rest)


def test_lines_for_machines_hold_what_was_said_beside() -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level = root.level
    token = request_id.set("r-9")
    try:
        set_up("json", "info")
        (handler,) = root.handlers
        made = record("GET /", status=200)
        handler.filter(made)
        line = json.loads(handler.format(made))
    finally:
        request_id.reset(token)
        root.handlers[:] = before
        root.setLevel(level)
    assert {name: line[name] for name in ("level", "logger", "message", "status")} == {
        "level": "INFO", "logger": "planner.x", "message": "GET /", "status": 200,
    }  # fmt: skip
    assert line["request_id"] == "r-9"
