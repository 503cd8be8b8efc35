"""Notes in docstrings: of a class the meaning of its fields, of a command the help of its flags."""

import re

# names at the beginning of a line, and what they mean; further lines are indented
NOTE = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n +\S.*)*)", re.M)


def notes_in(text: str) -> dict[str, str]:
    """The meaning of each name that a docstring, without its indentation, explains."""
    return {
        name: " ".join(meaning.split())
        for names, meaning in NOTE.findall(text)
        for name in names.split(", ")
    }
