"""What schemathesis has to be told of our media types."""

import json
from typing import Any

import schemathesis


@schemathesis.serializer("application/jsonl")
def json_lines(_: Any, value: Any) -> bytes:
    """A text as it is; anything else as one line of JSON."""
    return (value if isinstance(value, str) else json.dumps(value)).encode()


@schemathesis.serializer("text/csv")
def csv(_: Any, value: Any) -> bytes:
    """A text as it is."""
    return str(value).encode()
