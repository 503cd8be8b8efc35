"""Rows far from what is predicted are asked about, and a row is its owner's."""

from typing import Any

import pytest

from planner.api.calibration.read import learned
from planner.api.calibration.update import update_from_measurements
from planner.api.input.belief import believe
from planner.api.input.measurements import Stored, of_rows, store_new
from planner.api.wiring import Wiring
from planner.errors import ConflictError
from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from tests.conftest import job_values

GPU = "h100-pcie-80gb"
VALUES = job_values("llama3-8b", GPU, 8, 8192, 16, layout={"dp_shard": 8, "ac": "full"})
JOB = read_job(VALUES)


def seconds_of(wiring: Wiring, owner: str = "") -> float:
    return estimate_job(JOB, learned(wiring, JOB, owner)).step_seconds or 0.0


def imported(
    wiring: Wiring, seconds: float, name: str = "m", owner: str = "root", **more: Any
) -> Stored:
    shared = owner == "root"
    row = {**VALUES, **more, "id": name, "measured": {"rung": "probed", "step_seconds": seconds}}
    rows = of_rows(wiring, [("row 1", row)], allow_files=False)
    stored = store_new(wiring, rows, asked_by=owner, shared=shared)
    update_from_measurements(wiring, stored.new)
    return stored


def described(**figures: Any) -> dict[str, Any]:
    """The catalogue's name on a GPU of the row's own."""
    gpu: dict[str, Any] = JOB.cluster.gpu.model_dump(mode="json", exclude={"aliases"})
    return {"cluster": {"gpu": {**gpu, **figures}, "num_gpus": 8}}


@pytest.mark.parametrize("figures", [
    {"vendor": "cpu", "family": "cpu"},
    {"peak_flops_per_second": {"fp32": 1.0e12}},
    {"peak_flops_per_second": {"bf16": 1e12}, "memory_bandwidth_bytes_per_second": 1e10},
])  # fmt: skip
def test_a_catalogue_name_takes_the_catalogues_gpu(wiring: Wiring, figures: dict[str, Any]) -> None:
    before = seconds_of(wiring)
    assert "faster than" in imported(wiring, 1e-3, **described(**figures)).refused["m"]
    imported(wiring, 1.2 * before, "n", **described(**figures))
    assert wiring.measurements.get("n").job.cluster.gpu == JOB.cluster.gpu
    assert seconds_of(wiring) == pytest.approx(1.2 * before, rel=0.05)


@pytest.mark.parametrize("factor", [1006.0, 1e30, 40.0])
def test_what_is_far_off_is_asked_about_until_vouched_for(wiring: Wiring, factor: float) -> None:
    before = seconds_of(wiring)
    stored = imported(wiring, factor * before)
    words = "is it in seconds, and of this job? `planner-cli measurements believe m`"
    assert words in stored.refused["m"]
    assert seconds_of(wiring) == before
    found = believe(wiring, "m", "root")
    update_from_measurements(wiring, [found])
    assert (found.refused, found.confirmed) == (None, "root")
    assert seconds_of(wiring) > 10 * before


def test_what_is_far_too_fast_is_asked_about_where_no_peak_forbids_it(wiring: Wiring) -> None:
    """A job that is bound by its network can be off by ten times without passing any peak."""
    slow = {"gpu": GPU, "num_gpus": 64, "fabric": [
        {"gpus": 1, "bandwidth": "1 Gb/s", "latency": "5 us", "topology": "switch"},
        {"bandwidth": "1 Gb/s", "latency": "5 us", "topology": "switch"}]}  # fmt: skip
    values = {**VALUES, "cluster": slow, "layout": {"dp_shard": 64, "ac": "full"}}
    values["training"] = {**VALUES["training"], "global_batch_size": 64}
    predicted = estimate_job(read_job(values)).step_seconds or 0.0
    more = {key: values[key] for key in ("cluster", "layout", "training")}
    assert "is it in seconds" in imported(wiring, predicted / 30, **more).refused["m"]


def test_what_an_owners_machine_explains_is_not_asked_about_again(wiring: Wiring) -> None:
    before = seconds_of(wiring)
    imported(wiring, 30 * before, owner="ann")
    update_from_measurements(wiring, [believe(wiring, "m", "ann")])
    assert imported(wiring, 31 * before, "again", owner="ann").refused == {}
    assert set(imported(wiring, 31 * before, "b", owner="bob").refused) == {"b"}


def test_rows_from_before_the_question_are_asked_about_when_they_are_read(wiring: Wiring) -> None:
    before = seconds_of(wiring)
    row = {**VALUES, "id": "m", "measured": {"rung": "probed", "step_seconds": 1000 * before}}
    old = of_rows(wiring, [("row 1", row)], allow_files=False)
    wiring.measurements.add(old)
    assert update_from_measurements(wiring, old) == []
    assert "is it in seconds" in (wiring.measurements.get("m").refused or "")
    probe = old[0].model_copy(update={"id": "p", "source": "probe p"})
    wiring.measurements.add([probe])
    assert update_from_measurements(wiring, [probe]) != [], "the planner timed that one itself"


def test_what_cannot_be_true_is_not_believed_whoever_vouches(wiring: Wiring) -> None:
    imported(wiring, 1e-6)
    with pytest.raises(ConflictError, match="cannot be true: a step of 1e-06 s is faster"):
        believe(wiring, "m", "root")


def test_a_rows_identity_is_its_owner_and_its_id(wiring: Wiring) -> None:
    before = seconds_of(wiring)
    assert [one.id for one in imported(wiring, 1.2 * before, owner="ann").new] == ["m"]
    assert seconds_of(wiring, "bob") == before
    (same,) = imported(wiring, 1.2 * before, owner="bob").new
    assert same.id.startswith("m~")
    assert seconds_of(wiring, "bob") == pytest.approx(1.2 * before, rel=0.05)
    assert imported(wiring, 1.2 * before, owner="bob").known == (same.id,)
    assert imported(wiring, 1.1 * before, owner="eve").known == (), "nor is a name squatted"
    with pytest.raises(ConflictError):
        imported(wiring, 1.3 * before, owner="bob")
    assert seconds_of(wiring, "ann") == pytest.approx(1.2 * before, rel=0.05)
