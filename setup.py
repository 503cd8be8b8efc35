"""The one thing pyproject.toml cannot say: alembic/ travels in the wheel as
planner/api/storage/migrations.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithMigrations(build_py):
    """Copies the migrations beside the code that runs them. A checkout (editable install) reads
    alembic/ itself.
    """

    def run(self) -> None:
        """Builds, then copies."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "planner", "api", "storage", "migrations")
            shutil.copytree(
                "alembic", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )


setup(cmdclass={"build_py": BuildWithMigrations})
