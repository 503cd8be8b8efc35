"""`import planner`: the functions of the contract, with the words of a job."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import planner
from planner.cost.price import Pricer
from planner.estimates import estimate_job
from planner.intake.jobs import read_job

CLUSTER = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
TRAINING = {"seq_len": 2048, "global_batch_size": 32}
JOB = {"model": "llama3-8b", "cluster": CLUSTER, "training": TRAINING}
NARROW = {"top_k": 2, "fix": {"tp": 1, "cp": 1, "pp": 1, "precision": "bf16"}}


def test_a_plan_from_the_words_of_a_job() -> None:
    plan = planner.recommend(model="llama3-8b", cluster=CLUSTER, training=TRAINING, search=NARROW)
    again = planner.recommend({**JOB, "search": NARROW})
    assert isinstance(plan, planner.Plan)
    assert [one.layout for one in plan.ranked] == [one.layout for one in again.ranked]
    assert plan.id == again.id, "the same job has the same id"
    first = plan.ranked[0]
    assert first.estimate.fits
    alone = planner.estimate(**JOB, layout=first.layout)
    assert alone.step_seconds == pytest.approx(first.estimate.step_seconds)


def test_many_are_estimated_in_order_and_share_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings, and jobs read one by one, are priced together: 40 of them build as much as one."""
    built, build = [], Pricer.build
    monkeypatch.setattr(
        Pricer, "build", lambda *args, **kwargs: built.append(1) or build(*args, **kwargs)
    )
    layouts = [{"micro_batch_size": size, "ac": ac} for size in (1, 2) for ac in ("none", "full")]
    jobs = [{**JOB, "layout": layout} for layout in layouts * 10]
    planner.estimate_many(jobs[:1])
    of_one = len(built)
    many = planner.estimate_many(jobs)
    assert len(built) == 2 * of_one
    read = [read_job(job) for job in jobs]
    assert len({id(job.model) for job in read}) > 1 or len({id(job.training) for job in read}) > 1
    assert planner.estimate_many(read) == many
    assert len(built) == 3 * of_one
    assert many == [estimate_job(job) for job in read[: len(layouts)]] * 10, "in order"


def test_many_estimates_are_a_table_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [{"dp_shard": 8}, {"tp": 3}]
    many = planner.estimate_many([{**JOB, "layout": layout} for layout in layouts])
    columns = many.columns()
    assert str(columns["layout"][0]).startswith("fsdp 8 · ")
    assert columns["step_seconds"] == [many[0].step_seconds, None]
    assert columns["valid"] == [True, False]
    assert columns["violation"] == [None, many[1].violations[0].rule]
    page = many._repr_html_()
    for told in ("2 estimates", "fsdp 8", many[1].violations[0].rule.split(";")[0][:20]):
        assert told in page
    assert many.__rich__().row_count == 2
    assert planner.estimate_many([]).columns() == {}
    assert planner.estimate_many([]).__rich__().row_count == 0
    pandas = SimpleNamespace(DataFrame=dict)
    monkeypatch.setattr("planner.charts.table.import_module", lambda _: pandas)
    assert many.to_frame() == columns


def test_a_whole_job_and_its_parts_are_not_mixed() -> None:
    with pytest.raises(planner.SpecError, match="beside a whole job"):
        planner.recommend(JOB, model="llama3-8b")


def test_every_public_name_is_there_and_none_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, planner, json\n"
        "before = [name for name in sys.modules if name.startswith(('numpy', 'pydantic', "
        "'optuna'))]\n"
        "print(json.dumps([before, [bool(getattr(planner, name)) for name in planner.__all__]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, there = json.loads(done.stdout)
    assert before == []
    assert all(there)
    with pytest.raises(AttributeError, match="recomend"):
        planner.recomend  # type: ignore[attr-defined]  # noqa: B018
