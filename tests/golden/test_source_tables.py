"""Every number or statement of the project's source documents, one TOML each in facts/: reproduced,
or a disagreement on record.

A fact: `quotes`, whole statements of source_tables.md word for word (the project's own summary of
its documents), from the section that `source` names; `statement`, what of them is checked and
where; `verdict` ("reproduced" | "documented disagreement"), for a disagreement `why` and `ours`,
and [check]: kind "row" (quantity of a published row), "quantity" (of
`job`), "ratio", "saving" or "difference" (of `job` against the same job with the changes in
`versus`, or of `row` against `versus_row`), "formula" (`tests.golden.source_formulas`), "refused"
or "recommended".
stated: a number or [low, high]; tolerance: relative. A disagreement has to persist: when the model
    comes to agree, change its verdict.
"""

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.estimates import estimate_job
from planner.intake.jobs import read_job
from planner.plan.recommend import recommend
from planner.specs.estimate import Estimate
from planner.specs.job import Job
from planner.specs.plan import RankedLayout
from tests.conftest import fixed_now
from tests.golden.rows import row
from tests.golden.source_formulas import FORMULAS

FOLDER = Path(__file__).parent / "facts"


def without_nulls(value: Any) -> Any:
    """TOML has no null; facts write "null"."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items()}
    return None if value == "null" else value


TABLES = Path(__file__).parent / "source_tables.md"
UNCHECKED = {  # statements without a figure of the planner's, and where their subject is tested
    "Fit first: TP inside a node (to 8), then PP or FSDP across nodes": "test_sharding_reasons.py",
    "then DP for scale": "test_sharding_reasons.py",
    "accumulate when the batch allows": "every divisor of the batch is tried (test_space.py)",
    "beyond the critical batch size more DP stops paying": "the job states its batch",
    "large scale: over 30% of interruptions are GPU faults, so checkpoint and recover": (
        "test_goodput_golden.py"
    ),
    "TPU tori scale nearest-neighbour collectives well": "test_collectives_golden.py",
    "GPU fabrics are flat to about 256, then leaf-spine": "a cluster's fabric is stated",
    "communication high / very high between them": "by layout in test_communication.py",
    'Float8 scale "255 / max" (E4M3\'s maximum is 448: wrong in the document)': (
        "no price depends on what a scale is made of"
    ),
}


def statements() -> dict[str, list[str]]:
    """Statements by section: what stands between full stops and semicolons, outside brackets."""
    parts = re.split(r"\*\*(.+?)\.\*\*", " ".join(TABLES.read_text().split()))
    found = {}
    for section, text in zip(parts[1::2], parts[2::2], strict=True):
        depth = np.cumsum([(mark == "(") - (mark == ")") for mark in text])
        ends = [
            at
            for at, mark in enumerate(text)
            if depth[at] == 0 and (mark == ";" or text[at : at + 2] in (". ", "."))
        ]
        starts = [0, *(end + 1 for end in ends)]
        found[section] = [text[a:b].strip() for a, b in zip(starts[:-1], ends, strict=True)]
    return found


TEXTS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.toml"))}
FACTS = {name: without_nulls(tomllib.loads(text)) for name, text in TEXTS.items()}
VERDICTS = ("reproduced", "documented disagreement")
DRIFT = 0.15  # how far our side of a disagreement may move before its record is out of date
PARTS = ("activations", "gradients", "optimizer", "parameters", "logits")
IN_WORST_STAGE = {f"{part}_bytes" for part in PARTS}
EXPOSED = "exposed "


def quantity(estimate: Estimate, name: str, job: Job) -> float:
    """A field, a part of the worst stage's memory, "exposed fsdp", "state bytes a parameter"."""
    assert estimate.valid, estimate.violations
    stage = estimate.memory.stages[estimate.memory.worst_stage]
    exposed = estimate.time.exposed_communication_seconds
    if name in IN_WORST_STAGE:
        return float(getattr(stage, name))
    if name == "exposed share":
        return sum(exposed.values()) / estimate.step_seconds
    if name.startswith(EXPOSED):
        return sum(exposed[axis] for axis in name.removeprefix(EXPOSED).split("+"))
    if name.startswith("state bytes"):
        states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
        return states / (job.model.total_parameters() if name.endswith("a parameter") else 1)
    return float(getattr(estimate, name))


def merged(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return job | {
        key: (job.get(key, {}) | value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }


def of_job(values: dict[str, Any], name: str) -> float:
    job = read_job(values)
    return quantity(estimate_job(job), name, job)


def of_row(row_id: str, name: str) -> float:
    return quantity(row(row_id).estimate, name, row(row_id).job)


def pair(check: dict[str, Any]) -> tuple[float, float]:
    """The quantity of the subject and of what it is compared with."""
    name = check["quantity"]
    if "row" in check:
        return of_row(check["row"], name), of_row(check["versus_row"], name)
    other = merged(check["job"], check["versus"])
    return of_job(check["job"], name), of_job(other, check.get("versus_quantity", name))


def recommended(check: dict[str, Any]) -> float:
    """Step of the best layout with the stated degrees over the step of our winner."""
    job = check["job"]
    estimate = estimate_job(read_job(job))
    assert estimate.valid, estimate.violations
    assert estimate.fits == check["fits"], estimate.device_bytes
    own = {name: job["layout"][name] for name in check["degrees"]}
    return winner(job, own).estimate.step_seconds / winner(job, {}).estimate.step_seconds


def winner(job: dict[str, Any], fix: dict[str, Any]) -> RankedLayout:
    search = {"top_k": 1, "fix": fix, "prefer": "fastest"}
    return recommend(read_job({**job, "search": search}), now=fixed_now).ranked[0]


def refused(check: dict[str, Any]) -> float:
    """1 where the layout breaks a rule on this field that says so; 0 where nothing is broken."""
    estimate = estimate_job(read_job(check["job"]))
    at = [v for v in estimate.violations if v.field == check["field"]]
    found = [v for v in at if check["says"] in v.rule]
    assert bool(found) == (not estimate.valid), estimate.violations
    return float(bool(found))


@cache
def ours(name: str) -> float:
    check = FACTS[name]["check"]
    kind = check["kind"]
    if kind == "row":
        return of_row(check["row"], check["quantity"])
    if kind == "quantity":
        return of_job(check["job"], check["quantity"])
    if kind in ("ratio", "saving", "difference"):
        subject, other = pair(check)
        values = {"ratio": subject / other, "saving": 1.0 - subject / other}
        return {**values, "difference": other - subject}[kind]
    if kind == "formula":
        return FORMULAS[check["formula"]](**check["arguments"])
    return {"refused": refused, "recommended": recommended}[kind](check)


def agrees(value: float, check: dict[str, Any]) -> bool:
    """Inside the stated number or range, widened by the tolerance; recommended: near the winner."""
    low, high = check["stated"] if isinstance(check["stated"], list) else (check["stated"],) * 2
    within = check["tolerance"]
    return bool(low * (1 - within) - 1e-12 <= value <= high * (1 + within) + 1e-12)


@pytest.mark.parametrize("name", FACTS)
def test_fact(name: str) -> None:
    fact = FACTS[name]
    value, check = ours(name), fact["check"]
    if fact["verdict"] == "reproduced":
        assert agrees(value, check), (
            f"{fact['statement']} We say {value:.4g}, stated {check['stated']} within "
            f"{check['tolerance']:.0%}."
        )
        return
    assert not agrees(value, check), f"we now say {value:.4g}, which agrees: change the verdict"
    assert value == pytest.approx(fact["ours"], rel=DRIFT, abs=1e-9), (
        "our side has moved: look again and record it"
    )


def test_facts_quote_their_table_whole() -> None:
    """Each quote is one statement, or some in a row, neither shortened nor in other words; and each
    statement of the table has a fact.
    """
    told, quoted = statements(), set()
    for name, fact in FACTS.items():
        file, section = fact["source"].split(", ", 1)
        assert file == "SOURCE_TABLES.md", name
        (whole,) = (every for title, every in told.items() if title.startswith(section))
        for quote in fact["quotes"]:
            parts = [quote] if quote in whole else quote.split("; ")
            places = range(len(whole))
            assert any(whole[at : at + len(parts)] == parts for at in places), (name, quote)
            quoted |= set(parts)
    assert {one for whole in told.values() for one in whole} == quoted | set(UNCHECKED)
    assert not quoted & set(UNCHECKED)


def test_facts_are_complete() -> None:
    for name, fact in FACTS.items():
        assert fact["verdict"] in VERDICTS, name
        assert fact["statement"].endswith("."), name
        assert fact["source"], name
        assert 0 <= fact["check"]["tolerance"] <= 0.15, name
        reproduced = fact["verdict"] == "reproduced"
        assert reproduced == ("why" not in fact) == ("ours" not in fact), name
    assert len(FACTS) >= 100
    assert Counter(fact["verdict"] for fact in FACTS.values())["documented disagreement"] <= 14
