"""Suggests what a person may have meant by a path where there is no file."""

import difflib
from pathlib import Path

MOST_LISTED = 10_000  # entries of a folder that are compared


def near_file(path: Path) -> str | None:
    """A sentence naming the file in the same folder whose name is closest.

    Says so where the folder does not exist; None where no name is close.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            return f"the folder {folder} does not exist"
        names = [entry.name for entry, _ in zip(folder.iterdir(), range(MOST_LISTED), strict=False)]
    except OSError:
        return None
    same = [name for name in names if Path(name).stem == path.stem]
    close = same or difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean {folder / close[0]}?" if close else None


def with_near_file(remedy: str, path: Path) -> str:
    """The remedy, after the suggestion where there is one."""
    near = near_file(path)
    if near is None:
        return remedy
    return f"{near} Or {remedy}" if near.endswith("?") else f"{near}; {remedy}"
