"""Values of flags as people type them, read when the command line is parsed."""

import re

import typer

NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def tokens_typed(text: str | int) -> int:
    """8192 from "8192" or "8k". Raises BadParameter."""
    from planner.units import parse_tokens

    if isinstance(text, int) or NUMBER.fullmatch(text):
        return int(text)
    try:
        return int(str(parse_tokens(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None
