"""Reads a user's trainer config from disk, with the files that it names; no other module does."""

from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from planner.errors import fault
from planner.intake.current import REMEDY, UNREAD, complete, format_of, named_files
from planner.intake.jobs import read_job
from planner.intake.trainer_files.config_files import read_config
from planner.intake.trainer_files.megatron_log import measured_by
from planner.intake.trainer_files.shell import ARGUMENTS
from planner.specs.job import MAX_TEXT, Job


def with_arguments(path: str) -> tuple[str, str]:
    """A script's path, and the parameters behind it: `run.sh 8B 1 8`."""
    script, _, arguments = path.partition(" ")
    try:
        whole, first = (Path(one).expanduser().is_file() for one in (path, script))
    except OSError:  # too long for a name
        whole, first = False, True
    known = script.endswith((".toml", ".json", ".yaml", ".yml", ".py", ".log"))
    return (script, arguments) if first and not whole and not known else (path, "")


def gather(
    name: str, text: str, lookup: Callable[[str], str | None], arguments: str = ""
) -> dict[str, object] | None:
    """The job's `current` for a text and the files it names; None where the text is no trainer's.

    lookup: the text of a named file, or None where there is no such file.
    arguments: parameters of a script, as a shell would read them.
    """
    kind = format_of(text, name)
    if kind is None or kind == "torchtitan-log":
        return None
    if kind == "megatron-log":
        measured = measured_by(text)
        head: dict[str, object] = {"name": name, "format": kind, "text": text[:MAX_TEXT]}
        return {**head, **({"measured": measured} if measured else {})}
    files = {ARGUMENTS: arguments} if arguments else {}
    waiting = list(named_files(name, text))
    while waiting:
        wanted = waiting.pop()
        found = None if wanted in files else lookup(wanted)
        if found is not None:
            files[wanted] = found
            waiting += named_files(wanted, found)
    return {"name": name, "format": kind, "text": text, **({"files": files} if files else {})}


def beside(path: Path) -> Callable[[str], str | None]:
    """A lookup of named files: by the path as written, else from the folders of the file on."""

    def lookup(name: str) -> str | None:
        above = (folder / name.lstrip("/") for folder in path.absolute().parents)
        for place in (Path(name), *above, path.parent / Path(name).name):
            try:
                if place.is_file() and place.stat().st_size <= MAX_TEXT:
                    return place.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
        return None

    return lookup


def read_file(path: str) -> dict[str, object]:
    """The job's `current` for a file.

    Raises SpecError where the file cannot be read or is no trainer's.
    """
    path, arguments = with_arguments(path)
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise fault("current", path, rule, REMEDY) from None
    found = gather(place.name, text, beside(place), arguments)
    if found is None and place.suffix in (".json", ".yaml", ".yml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            raise fault("current", path, "is not valid YAML", "correct the file") from None
        if isinstance(values, Mapping):
            found = read_config(place.name, values, text, beside(place))
    if found is None:
        raise fault("current", path, UNREAD, REMEDY)
    return found


def read_current(path: str | Path, **given: object) -> Job:
    """Reads the job and layout that a trainer's script, command or configuration runs.

    given: parts of the job (model, cluster, training, ...) that complete or override the file.
        A TOML, for example, names no GPU.
    Raises SpecError naming everything that neither the file nor `given` says. TorchTitan's logs are
    for `planner-cli recommend --current`.
    """
    return read_job(complete({**given, "current": read_file(str(path))}))
