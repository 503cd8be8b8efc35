"""`planner-cli study` in a process of its own: a plan on paper, one with probes, and refusals."""

import json
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from planner.study.samplers import layout_of
from tests.conftest import Cli
from tests.e2e.conftest import Say

# a pipeline that recomputes a part of each stage: splits and recomputation are sampled together
SAMPLED = ("--model", "llama3-8b", "--gpu", "l40s", "--num-gpus", "8", "--seq-len", "8192",
           "--global-batch-size", "64", "--trainer", "megatron",
           "--fix", "cpu_offload=false", "--fix", "pp=8")  # fmt: skip


def test_a_stored_plan_is_a_study_of_optuna(cli: Cli, say: Say, tmp_path: Path) -> None:
    made = say("recommend", *SAMPLED, "--top-k", "3", "--sampler", "random", "--json")
    plan, journal = json.loads(made), tmp_path / "study.log"
    name = plan["id"]
    first, then = say("study", name[:-3], "--journal", journal).splitlines()
    assert first.startswith(f"{name}: ")
    assert then == f"optuna-dashboard {journal}"

    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.load_study(study_name=name, storage=storage)
    for entry, trial in zip(plan["ranked"], study.trials, strict=False):
        layout = layout_of({**study.user_attrs["fixed"], **trial.params})
        assert layout.model_dump(mode="json") == entry["layout"]
        assert trial.values == pytest.approx([entry["estimate"]["step_seconds"]], rel=1e-12)
    assert any(trial.user_attrs.get("sampled_by") == "random" for trial in study.trials)
    assert any(trial.state is TrialState.PRUNED for trial in study.trials)

    again = cli("study", name, "--journal", journal)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: a study {name} is there already; --overwrite replaces it\n"
    count = len(study.trials)
    told = json.loads(say("study", name, "--journal", journal, "--overwrite", "--json"))
    assert (told["study"], told["storage"]) == (name, str(journal))
    assert sum(told["trials"].values()) == count

    database = f"sqlite:///{tmp_path / 'study.db'}"
    say("study", name, "--storage", database, "--values", "time-memory")
    loaded = optuna.load_study(study_name=f"{name}-time-memory", storage=database)
    ours = {point["step_seconds"] for point in plan["pareto"]}
    assert ours <= {trial.values[0] for trial in loaded.best_trials}
