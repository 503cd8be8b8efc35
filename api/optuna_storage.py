"""Writes the Optuna study of a plan where Optuna's own tools read it: a database or a journal."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from planner.errors import ConflictError, StoreError, fault

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

OPTUNAS = "studies"  # a table that every database of Optuna has


def open_storage(url: str | None, journal: Path | None) -> "BaseStorage":
    """The storage to write to.

    Raises SpecError unless exactly one is given and can hold Optuna's studies.
    """
    if (url is None) == (journal is None):
        rule = "exactly one of --storage and --journal is needed"
        raise fault("--storage", url, rule, "give --storage sqlite:///study.db or --journal FILE")
    return _database(url) if url is not None else _journal(Path(str(journal)))


def without_password(url: str) -> str:
    """A database's URL as it may be shown."""
    return make_url(url).render_as_string(hide_password=True)


def _database(url: str) -> "BaseStorage":
    from optuna.storages import RDBStorage

    remedy = "give one such as sqlite:///study.db or postgresql+psycopg://user@host/name"
    try:
        shown = without_password(url)
    except ArgumentError:
        raise fault("--storage", url, "is no database URL", remedy) from None
    try:
        engine = create_engine(url)
        tables = set(inspect(engine).get_table_names())
        engine.dispose()
        if tables and OPTUNAS not in tables:
            rule = "holds another program's tables"
            raise fault("--storage", shown, rule, "give a database of its own for studies")
        return RDBStorage(url)
    except (NoSuchModuleError, ImportError) as error:
        raise fault("--storage", shown, f"has no driver here ({error})", remedy) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise fault("--storage", shown, f"cannot be opened ({reason})", remedy) from None
    except RuntimeError as error:  # Optuna's: tables of another release
        raise fault("--storage", shown, f"cannot be used ({error})", remedy) from None


def _journal(path: Path) -> "BaseStorage":
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = path.expanduser()
    remedy = "give a new file in a folder that exists"
    if path.is_dir() or not path.parent.is_dir():
        rule = "is a folder" if path.is_dir() else "is in no folder that exists"
        raise fault("--journal", str(path), rule, remedy)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        rule = f"cannot be opened ({error.strerror})"
        raise fault("--journal", str(path), rule, remedy) from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise fault("--journal", str(path), "is no journal of Optuna", remedy) from None


def write_study(study: "optuna.Study", storage: "BaseStorage", *, overwrite: bool) -> None:
    """Copies a study; what was written of one that could not be finished is removed.

    Raises ConflictError where one of its name is there, unless it is to be overwritten, and
    StoreError where the storage does not take it.
    """
    import optuna

    name = study.study_name
    if overwrite and name in {one.study_name for one in storage.get_all_studies()}:
        optuna.delete_study(study_name=name, storage=storage)
    try:
        optuna.copy_study(from_study_name=name, from_storage=study._storage, to_storage=storage)
    except optuna.exceptions.DuplicatedStudyError:
        there = f"a study {name} is there already; --overwrite replaces it"
        raise ConflictError(there) from None
    except BaseException as error:
        with suppress(KeyError, OSError, optuna.exceptions.OptunaError):
            optuna.delete_study(study_name=name, storage=storage)
        if isinstance(error, OSError | optuna.exceptions.OptunaError):
            reason = " ".join(str(error).split())
            raise StoreError(f"the study cannot be written ({reason})") from error
        raise


def counts_of(study: "optuna.Study") -> dict[str, int]:
    """Trials of a study by how they ended; complete ones by whether they fit."""
    trials = study.get_trials(deepcopy=False)
    ended = Counter(one.state.name for one in trials)
    complete = (one for one in trials if one.state.name == "COMPLETE")
    fitting = sum(all(value <= 0.0 for value in one.constraints.values()) for one in complete)
    return {
        "fitting": fitting,
        "not_fitting": ended["COMPLETE"] - fitting,
        "pruned": ended["PRUNED"],
        "failed": ended["FAIL"],
    }
