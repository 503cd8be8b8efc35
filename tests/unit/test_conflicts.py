"""Values that no layout of a job can have: which request is at fault, and which rule."""

from typing import Any

import pytest

from planner.intake.jobs import read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.rules import Context
from planner.search.space.conflicts import binding_rule, impossible_values, refused_choices
from planner.search.space.domains import domains_of
from planner.search.space.enumerate import enumerate_space
from planner.specs.job import SearchSpec

MODEL = read_model("llama3-8b")  # 32 layers, 32 heads, 8 of keys and values


def context(num_gpus: int = 8, **training: Any) -> Context:
    given = {"seq_len": 4096, "global_batch_size": 32, **training}
    cluster = read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus})
    return Context(model=MODEL, cluster=cluster, training=read_training(given))


def faults(num_gpus: int = 8, **search: Any) -> list[tuple[str, object, str]]:
    found = impossible_values(context(num_gpus), SearchSpec(**search))
    return [(fault.field, fault.value, fault.rule) for fault in found]


@pytest.mark.parametrize(("degrees", "named", "rule"), [
    ({"pp": 3}, "pp", "pp 3 does not divide 8 GPUs"),
    ({"tp": 2, "pp": 8}, "pp", "tp 2 x pp 8 = 16 does not divide 8 GPUs"),
    ({"tp": 8, "pp": 2}, "tp", "tp 8 x pp 2 = 16 does not divide 8 GPUs"),
])  # fmt: skip
def test_degrees_that_do_not_divide_the_gpus_are_told_of_the_largest(
    degrees: dict[str, int], named: str, rule: str
) -> None:
    assert (f"search.fix.{named}", degrees[named], rule) in faults(fix=degrees)


@pytest.mark.parametrize("search", [
    {}, {"fix": {"tp": 2, "pp": 4}}, {"allow": {"tp": [3, 4]}},
    {"allow": {"tp": [4, 8], "pp": [2, 4]}}, {"fix": {"cp_method": "alltoall"}},
    {"fix": {"pp_schedule": "ZBVZeroBubble"}}, {"fix": {"pp": 2, "virtual_stages": 2}},
    {"fix": {"tp": 1, "sequence_parallel": True}},
])  # fmt: skip
def test_where_one_combination_is_left_there_is_no_fault(search: dict[str, Any]) -> None:
    assert faults(**search) == []


def test_a_value_that_matters_on_an_axis_is_asked_of_layouts_that_have_the_axis() -> None:
    """Ulysses is not TorchTitan's; layouts without context parallelism ignore the method."""
    ((field, value, _),) = faults(fix={"cp_method": "ulysses"})
    assert (field, value) == ("search.fix.cp_method", "ulysses")
    assert faults(fix={"cp_method": "ulysses", "cp": 1}) == []


def test_a_rule_on_two_fields_refuses_what_breaks_it_at_every_other_value() -> None:
    """Asynchronous TP is a pass of the compiler, whatever the degree."""
    asked = {"tp": [2, 4], "async_tp": [True]}
    found = faults(allow=asked, fix={"compile": False})
    assert [field for field, _, _ in found] == ["search.allow.async_tp"]
    assert faults(allow=asked, fix={"compile": True}) == []


def test_rules_that_only_together_leave_nothing_are_told_of_one_combination() -> None:
    """A memory budget needs the compiler, which takes no schedule that splits the backward."""
    asked = {"ac": "memory-budget-0.5", "pp": 2, "pp_schedule": "ZBVZeroBubble"}
    assert faults(fix={**asked, "pp_schedule": "1F1B"}) == []
    ((field, value, rule),) = faults(fix=asked, allow={"compile": [False, True]})
    assert (field, value) == ("search.fix.ac", "memory-budget-0.5")
    assert rule.endswith("torch.compile, which is off")


def test_only_choices_that_no_layout_can_have_are_left_out() -> None:
    search = SearchSpec(allow={"tp": [3, 4], "pp": [1, 2], "cp": [5]})
    (sentence,) = refused_choices(context(), search)
    assert sentence.startswith("search.allow.tp 3 is left out: ")


def binding(asked: Context, **search: Any) -> tuple[str, object] | None:
    """Field and value that the binding rule names."""
    spec = SearchSpec(**search)
    space = enumerate_space(asked, domains_of(asked, spec, oversized=True))
    found = binding_rule(asked, spec, space.rejected)
    return found and (found.field, found.value)


def test_the_binding_rule_is_the_one_without_which_layouts_are_left() -> None:
    """8191 tokens are not cut into 2 chunks; GPUs without nvfp4 keep nothing from running."""
    assert binding(context(seq_len=8191)) == ("cp", 1)
    whole = {"tp": 2, "pp": 1, "cp": 1, "dp_shard": 4, "dp_replicate": 1}
    assert binding(context(), fix={**whole, "zero_stage": 0}) == ("zero_stage", 0)
    for rejected in ({}, {"slower than the best": 3}):  # no rule binds where none explains it
        assert binding_rule(context(), SearchSpec(), rejected) is None
