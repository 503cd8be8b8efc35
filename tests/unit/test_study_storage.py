"""Studies written to a database and to a journal, opened with Optuna's own tools."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import create_engine, text

import planner
from planner.api.optuna_storage import counts_of, open_storage, write_study
from planner.errors import ConflictError, SpecError, StoreError
from planner.specs.plan import Plan
from tests.conftest import needed, one_fast

PLOTS = ("plot_param_importances", "plot_slice", "plot_parallel_coordinate")
PARAMETERS = ["dp_shard", "pp", "micro_batch_size", "ac"]
Written = Callable[[optuna.Study], BaseStorage]


@pytest.fixture(scope="module")
def few(plan: Plan) -> Plan:
    """The plan with less that was considered: a database takes long for each trial."""
    kept = plan.considered[:8] + plan.considered[-8:]
    return plan.model_copy(update={"considered": kept, "sensitivity": []})


@pytest.fixture(params=["database", "journal"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    """Writes a study and opens it as another process would."""

    def write(study: optuna.Study) -> BaseStorage:
        if request.param == "database":
            url = f"sqlite:///{tmp_path / 'study.db'}"
            write_study(study, open_storage(url, None), overwrite=False)
            return RDBStorage(url)
        path = tmp_path / "study.log"
        write_study(study, open_storage(None, path), overwrite=False)
        return JournalStorage(JournalFileBackend(str(path)))

    return write


IN_A_JOURNAL = pytest.mark.parametrize("written", one_fast("journal", "database"), indirect=True)


def test_it_is_read_as_it_was_written(few: Plan, written: Written) -> None:
    study = planner.study_of(few)
    loaded = optuna.load_study(study_name=None, storage=written(study))
    assert loaded.study_name == few.id
    assert (loaded.user_attrs, loaded.directions) == (study.user_attrs, study.directions)
    assert loaded.metric_names == study.metric_names == ["step_seconds"]
    parts = ("number", "state", "values", "params", "distributions", "user_attrs", "constraints")
    for ours, theirs in zip(study.trials, loaded.trials, strict=True):
        assert [getattr(theirs, part) for part in parts] == [getattr(ours, part) for part in parts]
        assert theirs.datetime_complete == ours.datetime_complete


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@IN_A_JOURNAL
def test_optunas_plots_show_it(few: Plan, written: Written) -> None:
    needed("plotly")
    from optuna import visualization

    study = planner.study_of(few)
    loaded = optuna.load_study(study_name=None, storage=written(study))
    for name in PLOTS:
        figure = getattr(visualization, name)(loaded, params=PARAMETERS)
        assert len(figure.data[0].to_plotly_json()) > 1, name
    history = visualization.plot_optimization_history(loaded)
    points = {trace.name: len(trace.x) for trace in history.data if trace.name != "Best Value"}
    counts = counts_of(study)
    assert points["Objective Value"] == counts["fitting"]
    assert points["Infeasible Trial"] == counts["not_fitting"] > 0
    assert len(points) == 2
    importances = optuna.importance.get_param_importances(loaded, params=PARAMETERS)
    assert sum(importances.values()) == pytest.approx(1.0)


@IN_A_JOURNAL
def test_optuna_dashboard_answers_with_it(few: Plan, written: Written) -> None:
    dashboard = needed("optuna_dashboard")
    study = planner.study_of(few)
    app, trial = dashboard.wsgi(written(study)), study.trials[0]
    (summary,) = asked(app, "/api/studies")["study_summaries"]
    shown = asked(app, f"/api/studies/{summary['study_id']}")
    assert summary["study_name"] == shown["name"] == few.id
    assert len(shown["trials"]) == len(study.trials)
    first = shown["trials"][0]
    assert first["state"] == "Complete"
    assert first["values"] == pytest.approx(trial.values)
    assert {one["name"] for one in first["params"]} == trial.params.keys()
    assert first["constraints"] == list(trial.constraints.values())
    assert {one["key"] for one in first["user_attrs"]} == trial.user_attrs.keys()


def asked(app: Any, address: str) -> Any:
    """The JSON that a WSGI application answers to a GET."""
    from wsgiref.util import setup_testing_defaults

    parts = urlsplit(address)
    environment: dict[str, Any] = {"PATH_INFO": parts.path, "QUERY_STRING": parts.query}
    setup_testing_defaults(environment)
    status: list[str] = []
    body = b"".join(app(environment, lambda line, headers, error=None: status.append(line)))
    assert status == ["200 OK"], (status, body[:300])
    return json.loads(body)


def test_an_existing_study_is_kept_unless_it_is_to_be_replaced(few: Plan, tmp_path: Path) -> None:
    storage, study = open_storage(None, tmp_path / "study.log"), planner.study_of(few)

    def trials() -> Any:
        return storage.get_all_trials(storage.get_study_id_from_name(few.id))

    write_study(study, storage, overwrite=False)
    before = trials()
    with pytest.raises(ConflictError, match="is there already; --overwrite replaces it"):
        write_study(study, storage, overwrite=False)
    assert trials() == before
    write_study(study, storage, overwrite=True)
    write_study(planner.study_of(few, "time-memory"), storage, overwrite=False)
    names = {one.study_name for one in storage.get_all_studies()}
    assert names == {few.id, f"{few.id}-time-memory"}


@pytest.mark.parametrize(("broken", "told"), [
    (KeyboardInterrupt(), KeyboardInterrupt),
    (OSError(28, "No space left on device"), StoreError),
    (optuna.exceptions.StorageInternalError("disk is full"), StoreError),
])  # fmt: skip
def test_half_a_study_is_not_left_behind(
    few: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: BaseException,
    told: type[BaseException],
) -> None:  # fmt: skip
    storage = open_storage(None, tmp_path / "study.log")
    study = planner.study_of(few)
    added: list[int] = []
    add = JournalStorage.create_new_trial

    def breaking(self: Any, *arguments: Any, **named: Any) -> int:
        if len(added) == 3:
            raise broken
        added.append(add(self, *arguments, **named))
        return added[-1]

    monkeypatch.setattr(JournalStorage, "create_new_trial", breaking)
    with pytest.raises(told):
        write_study(study, storage, overwrite=False)
    assert storage.get_all_studies() == []


@pytest.mark.parametrize(("url", "journal", "message"), [
    (None, None, "exactly one of --storage and --journal"),
    ("sqlite:///x.db", "x.log", "exactly one of --storage and --journal"),
    ("here", None, "is no database URL"),
    ("sqlite:////no/such/folder/x.db", None, "cannot be opened"),
    ("nosql://u:secret@host/x", None, r"nosql://u:\*\*\*@host/x.*has no driver here"),
    (None, "/no/such/folder/x.log", "is in no folder that exists"),
    (None, "/", "is a folder"),
    (None, __file__, "is no journal of Optuna"),
])  # fmt: skip
def test_where_no_study_can_be_written(url: str | None, journal: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        open_storage(url, None if journal is None else Path(journal))


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'planner.db'}"
    with create_engine(url).begin() as connection:
        connection.execute(text("create table plans (id text)"))
    with pytest.raises(SpecError, match="holds another program's tables"):
        open_storage(url, None)
