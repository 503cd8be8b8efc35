"""Writing folders of files: all into a folder beside the target, then one rename.

So nothing is half-written.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.api.cli.output import PIPED_WIDTH, as_text
from planner.api.render.current import current_files
from planner.api.render.plan import plan_view
from planner.errors import fault
from planner.specs.plan import Plan

FLAG, MARKER = "--save-dir", ".planner"


def check_target(target: Path) -> None:
    """Raises SpecError unless `target` is free, empty, or was written by us before."""
    try:
        if target.exists() and not target.is_dir():
            raise fault(FLAG, str(target), "is a file", "name a new or empty directory")
        if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
            rule = "is not empty and was not written by planner-cli"
            raise fault(FLAG, str(target), rule, "name a new or empty directory")
    except (OSError, ValueError) as error:
        rule = f"cannot be used ({getattr(error, 'strerror', None) or error})"
        raise fault(FLAG, str(target), rule, "name a new directory") from None


def write_folder(target: Path, files: Mapping[str, str]) -> None:
    """Replaces `target` by a folder with these files (relative path -> text).

    Raises SpecError; then nothing has changed.
    """
    check_target(target)
    target = target.expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
            new = Path(work) / "new"
            marker = {MARKER: "Written by planner-cli, which may replace this folder.\n"}
            for name, text in {**marker, **files}.items():
                path = new / name
                if not path.resolve().is_relative_to(new.resolve()):
                    raise fault(
                        FLAG, name, "is a file name outside the folder", "report this as a bug"
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                if name.endswith(".sh"):
                    path.chmod(0o755)
            if target.exists():
                shutil.move(target, Path(work) / "old")
            new.rename(target)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise fault(FLAG, str(target), rule, "name a directory that you may write to") from None


def save_plan(plan: Plan, target: Path) -> None:
    """plan.json, plan.txt, and one folder a rank with the files of its export. Raises SpecError."""
    files = {
        "plan.json": plan.model_dump_json(indent=2) + "\n",
        "plan.txt": as_text(
            plan_view(plan, PIPED_WIDTH, letters=True, saved=str(target)), PIPED_WIDTH
        ),
    }
    files |= current_files(plan)
    for entry in plan.ranked:
        for export in entry.export.values():
            files.update(
                {
                    f"rank-{entry.rank:02d}/{name}": text
                    for name, text in export.get("files", {}).items()
                }
            )
    write_folder(target, files)
