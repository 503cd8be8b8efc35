"""Jobs priced together get the answers that each gets alone, to the last letter."""

import json
from typing import Any

import numpy as np
import pytest

from planner import estimates
from planner.api.input.text import read_json
from planner.api.service import Estimates, Refusal
from planner.cost.pipeline import simulate as simulating
from planner.cost.pipeline.stage_costs import StageCosts
from planner.cost.price import Pricer
from planner.errors import Fault, SpecError
from planner.estimates import Estimator, estimate_job
from planner.intake.jobs import JobReader, read_job
from planner.schedules import SCHEDULES

TITAN = {"seq_len": 8192, "global_batch_size": 256}
MEGATRON = {**TITAN, "trainer": "megatron", "global_batch_size": 1024}


def job(layout: object, **parts: Any) -> dict[str, Any]:
    """A job as a line has it; unless said otherwise, of Llama 3 8B on 64 H100."""
    cluster = {"gpu": parts.pop("gpu", "h100-sxm-80gb"), "num_gpus": parts.pop("num_gpus", 64)}
    return {"model": "llama3-8b", "cluster": cluster, "training": TITAN, "layout": layout, **parts}


EXPERTS: dict[str, Any] = {"model": "mixtral-8x7b"}
JOBS = [
    job({"tp": 2}, id="a"), job({"tp": 2, "ac": "full", "compile": True}, id=2),
    job({"tp": 8, "pp": 4}, id="interleaved"), job({"tp": 3, "pp": 64}, id="several rules broken"),
    job({"pp": 4, "pp_schedule": "1F1B", "layers_per_stage": [9, 8, 8, 7]}),
    job({"pp": 4, "pp_schedule": "ZBVZeroBubble"}), job({"ep": 8}, **EXPERTS),
    job({"ep": 8, "pp": 2, "cp": 2, "ac": "selective-op"}, **EXPERTS),
    job({"ep": 8}, gpu="a100-sxm-80gb", **EXPERTS),
    job({"tp": 4, "pp": 4, "ac": "block-2"}, training=MEGATRON),
    job({"tp": 4, "pp": 8, "virtual_stages": 2, "ac": "none"}, training=MEGATRON),
    job({"tp": 2, "pp": 2, "ac": "uniform-2"}, training=MEGATRON),
    job({"ep": 4, "pp": 2}, training=MEGATRON, **EXPERTS),
    job({"tp": 8}, num_gpus=8, training={**TITAN, "precision_of_moon": 1}), job({"tp": 1}, id=7),
    job({"precision": "float8-rowwise", "compile": True, "tp": 2}, id="a"),
]  # fmt: skip
MALFORMED: list[object] = [
    {"id": "no layout", **{k: v for k, v in JOBS[0].items() if k not in ("layout", "id")}},
    {**JOBS[0], "model": "llama9", "id": "unknown model"},
    {**JOBS[0], "layout": {"tp": "two"}, "id": "no number"},
    [1, 2],
    None,
    job({"tp": 2}, num_gpus=[8, 16], id="two sizes"),
]


def alone(values: object) -> str:
    """The line that one job gets from a service that has priced nothing before."""
    (answer,) = Estimates(allow_files=False).of([values])
    return line_of(answer)


def line_of(answer: Any) -> str:
    """An answer as it is printed."""
    if isinstance(answer, Refusal):
        return json.dumps(answer.as_dict(), default=str)
    return str(answer.model_dump_json())


def test_a_batch_answers_each_job_as_if_it_were_alone() -> None:
    lines = [value for pair in zip(JOBS, MALFORMED * 3, strict=False) for value in pair]
    together = Estimates(allow_files=False)
    expected = [alone(value) for value in lines]
    assert [line_of(answer) for answer in together.of(lines)] == expected
    again = [line_of(answer) for answer in together.of(lines[::-1])]  # units are known by now
    assert again == expected[::-1]
    valid = [json.loads(line).get("valid") for line in expected]
    assert valid.count(True) >= 10
    assert valid.count(False) >= 1


def test_an_answer_of_a_batch_is_that_of_a_single_job() -> None:
    for values in JOBS[:3]:
        (batched,) = Estimates(allow_files=False).of([values])
        assert batched == estimate_job(read_job(values))


def test_parts_are_priced_in_small_portions_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [line_of(answer) for answer in Estimates(allow_files=False).of(JOBS)]
    monkeypatch.setattr(estimates, "MOST_RANKS", 3)
    monkeypatch.setattr(estimates, "MOST_PRICERS", 1)
    assert [line_of(answer) for answer in Estimates(allow_files=False).of(JOBS)] == whole


def test_jobs_in_the_same_words_are_read_and_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(*parts: Any, **more: Any) -> Pricer:
        built.append(parts[0].name)
        return original(*parts, **more)

    original = Pricer.build
    monkeypatch.setattr(estimates.Pricer, "build", build)
    estimator, reader, first = Estimator(), JobReader(), 0
    for turn in range(2):
        jobs = [reader.read(job({"tp": tp})) for tp in (1, 2, 4)]
        assert len({id(one.model) for one in jobs}) == 1
        estimator.estimates(jobs)
        first = len(built) if turn == 0 else first  # with those of moved calibrations
    assert len(built) == first
    other = reader.read(job({"tp": 1}, training={**TITAN, "seq_len": 4096}))
    estimator.estimates([other, jobs[0]])
    assert len(built) == 2 * first


def test_a_reader_tells_numbers_from_truths() -> None:
    reader = JobReader()
    reader.read(job({"tp": 1}))
    with pytest.raises(SpecError, match="seq_len"):
        reader.read(job({"tp": 1}, training={**TITAN, "seq_len": True}))


def test_one_job_that_cannot_be_priced_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [alone(value) for value in JOBS[:2]]

    def fails(pricer: Pricer, layouts: Any, *more: Any) -> Any:
        if any(layout.tp == 8 for layout in layouts):
            raise SpecError(Fault("layout.tp", 8, "cannot be priced", "take another"))
        return original(pricer, layouts, *more)

    original = estimates.estimate_layouts
    monkeypatch.setattr(estimates, "estimate_layouts", fails)
    answers = Estimates(allow_files=False).of([JOBS[0], JOBS[2], JOBS[1]])
    assert isinstance(answers[1], Refusal)
    assert answers[1].id == "interleaved"
    assert [line_of(answers[0]), line_of(answers[2])] == expected


def test_steps_continued_along_a_line_do_not_depend_on_other_candidates() -> None:
    """Even where some of them have not settled, which takes a longer replay."""
    schedule, shape, rng = SCHEDULES["1F1B"], (8, 1, 2048), np.random.default_rng(0)
    forward, send = rng.uniform(1.0, 1.05, (20, 8)), rng.uniform(0.0, 0.5, (20, 8))
    backward = {"input_grad_seconds_CS": 0.9 * forward, "weight_grad_seconds_CS": 1.1 * forward}
    sent = {"send_seconds_CS": send, "saved_bytes_CS": forward}
    costs = StageCosts(forward_seconds_CS=forward, **backward, **sent)
    together = simulating.simulate(schedule, shape, costs)
    for row in range(20):
        one = simulating.simulate(schedule, shape, costs.take(np.array([row])))
        for name in ("makespan_seconds_C", "span_seconds_CR", "peak_saved_bytes_CR"):
            assert np.array_equal(getattr(together, name)[row : row + 1], getattr(one, name)), name


def test_plain_lines_are_read_as_they_stand() -> None:
    for value in (JOBS[0], {"a": "\u00e9"}, [[[1.5, True, None]]], "\\", 7):
        assert read_json(json.dumps(value), "line 1") == value
        assert read_json(json.dumps(value, ensure_ascii=False).encode(), "line 1") == value
