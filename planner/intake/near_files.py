"""What a person may have meant by a path at which there is no file."""

import difflib
from pathlib import Path

MOST_LISTED = 10_000  # entries of a folder that are looked at


def near_file(path: Path) -> str | None:
    """The file in the same folder whose name is nearest, or that the folder does not exist, in
    words; None where nothing is near.
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
    """A remedy that begins with what is near."""
    near = near_file(path)
    return (
        remedy
        if near is None
        else f"{near} Or {remedy}"
        if near.endswith("?")
        else f"{near}; {remedy}"
    )
