"""One step in each field: every field is there, prices are the price, refusals the rules'."""

from functools import partial
from typing import Any

import pytest

from planner.columns import LayoutBatch
from planner.plan.explain import explain, step_sentence
from planner.rules import violations
from planner.search.variations.neighbours import neighbours
from planner.search.variations.sensitivity import sensitivity
from planner.specs.layout import Layout
from planner.specs.plan import Plan
from planner.specs.plan_comparisons import SensitivityStep
from tests.pricing import layout_of, pricer

# A step in one of these may take others with it.
TAKES_ALONG: dict[str, set[str]] = {
    "dp_replicate": {"dp_shard"}, "dp_shard": {"dp_replicate"}, "cp": {"dp_shard"},
    "tp": {"dp_shard", "sequence_parallel", "async_tp", "etp"},
    "pp": {"dp_shard", "virtual_stages", "pp_schedule"},
    "pp_schedule": {"virtual_stages", "layers_per_stage"}, "precision": {"float8_all_gather"},
    "cpu_offload": {"optimizer_offload_fraction"},
}  # fmt: skip


pricer_of = partial(pricer, global_batch_size=256)
CASES = [
    ("llama3-8b", 64, {},
        {"tp": 2, "cp": 2, "pp": 4, "dp_replicate": 2, "compile": True, "ac": "memory-budget-0.5",
                           "pp_schedule": "Interleaved1F1B", "virtual_stages": 2,
                           "micro_batch_size": 2}),
    ("mixtral-8x7b", 64, {}, {"tp": 2, "ep": 4, "cp": 2, "ac": "selective-layer-2"}),
    ("llama3-8b", 8, {"trainer": "megatron"}, {"tp": 2, "pp": 2, "ac": "full"}),
    ("llama3-8b", 8, {"trainer": "megatron", "trainer_version": "0.16"},
        {"tp": 2, "activation_offload_layers": 10}),
    ("llama3-8b", 8, {"trainer": "megatron"},
        {"tp": 2, "pp": 2, "cpu_offload": True, "optimizer_offload_fraction": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpus", "training", "values"), CASES)
def test_every_field_has_a_step_priced_as_the_search_prices_it_or_refused(
    model: str, gpus: int, training: dict[str, Any], values: dict[str, Any]
) -> None:
    pricer = pricer_of(model, gpus, **training)
    layout = layout_of(pricer, **values)
    assert violations(layout, pricer.model, pricer.cluster, pricer.training) == []
    steps = sensitivity(pricer, layout)
    fields = {step.field for step in steps}
    expected = set(Layout.model_fields) - (set() if pricer.model.is_moe else {"ep", "etp"})
    expected -= set() if layout.pp > 1 else {"virtual_stages", "layers_per_stage", "pp_schedule"}
    expected -= set() if layout.virtual_stages > 1 else {"virtual_stages"}
    expected -= set() if layout.cp > 1 else {"cp_method"}
    expected -= set() if layout.ep > 1 else {"moe_dispatcher"}
    expected -= set() if layout.cpu_offload else {"optimizer_offload_fraction"}
    expected -= set() if "trainer_version" in training else {"activation_offload_layers"}
    of_training = [step for step in steps if step.field.startswith("training.")]
    expected |= {"training.moe_imbalance"} if layout.ep > 1 else set()
    assert fields - {"training.cuda_graphs"} == expected
    assert {step.new for step in steps if step.field == "tp"} == {1, 4}
    for step in steps:
        if step in of_training:
            continue
        fields = Layout.model_fields
        changed = {name for name in fields if getattr(layout, name) != getattr(step.layout, name)}
        assert step.field in changed
        assert changed <= {step.field} | TAKES_ALONG.get(step.field, set())
        values = (getattr(one, step.field) for one in (layout, step.layout))
        assert (step.old, step.new) == tuple(values)
        assert step.layout.num_gpus == layout.num_gpus
        assert SensitivityStep.model_validate_json(step.model_dump_json()) == step
        broken = violations(step.layout, pricer.model, pricer.cluster, pricer.training)
        if broken:
            assert step.refused == f"{broken[0].rule}; {broken[0].remedy}"
            assert step.step_seconds is step.fits is None
    here = pricer.price(LayoutBatch.from_layouts([layout])).step_seconds[0]
    near = neighbours(pricer, layout)
    for one in (*near, *(step for step in steps if step.step_seconds and step not in of_training)):
        assert violations(one.layout, pricer.model, pricer.cluster, pricer.training) == []
        price = pricer.price(LayoutBatch.from_layouts([one.layout]))
        assert one.step_ratio == pytest.approx(price.step_seconds[0] / here)
        assert one.device_bytes == pytest.approx(price.device_bytes[0])
        assert (getattr(layout, one.field), getattr(one.layout, one.field)) == (one.old, one.new)
    assert len({(one.field, str(one.new)) for one in near}) == len(near) > 5


def test_switches_of_the_training_are_steps_where_the_trainer_has_them() -> None:
    pricer = pricer_of("mixtral-8x7b", 64, trainer="megatron")
    steps = sensitivity(pricer, layout := layout_of(pricer, ep=8, moe_dispatcher="hybridep"))
    for name, updates in (
        ("training.overlap.ep", [{"overlap": {"ep": True}}]),
        ("training.cuda_graphs", [{"cuda_graphs": kind} for kind in ("partial", "full")]),
    ):
        found = [step.step_seconds for step in steps if step.field == name]
        for seconds, update in zip(found, updates, strict=True):
            other = pricer_of("mixtral-8x7b", 64, trainer="megatron", **update)
            price = other.price(LayoutBatch.from_layouts([layout])).step_seconds[0]
            assert seconds == pytest.approx(float(price))
    fields = {step.field for step in sensitivity(pricer, layout_of(pricer, ep=8, ac="full"))}
    assert "training.overlap.ep" not in fields  # which excludes it


def test_steps_of_degrees_go_both_ways() -> None:
    pricer = pricer_of("llama3-8b", 64)
    steps = sensitivity(pricer, layout_of(pricer, tp=4, cp=2, micro_batch_size=4))
    for field, values in (("tp", {2, 8}), ("cp", {1, 4}), ("micro_batch_size", {2, 8})):
        assert {step.new for step in steps if step.field == field} == values


def test_an_uneven_load_of_experts_slows_the_step_and_takes_memory() -> None:
    pricer = pricer_of("mixtral-8x7b", 64, moe_imbalance=1.0)
    layout = layout_of(pricer, ep=8)
    steps = sensitivity(pricer, layout)
    even, doubled = (step for step in steps if step.field == "training.moe_imbalance")
    assert (even.old, even.new, doubled.new, even.step_ratio) == (1.0, 1.0, 2.0, 1.0)
    # experts and their exchange take more than half of such a step
    assert 1.5 < doubled.step_ratio < 2.0
    assert doubled.device_bytes > even.device_bytes
    stated = pricer_of("mixtral-8x7b", 64, moe_imbalance=2.0)
    assert doubled.step_seconds == pytest.approx(
        float(stated.price(LayoutBatch.from_layouts([layout])).step_seconds[0])
    )


def test_a_plan_tells_its_winners_steps(plan: Plan) -> None:
    assert {step.field for step in plan.sensitivity} >= {
        "tp", "cp", "pp", "micro_batch_size", "ac", "precision", "zero_stage", "compile",
    }  # fmt: skip
    lines = explain(plan, 1, None)
    assert lines[lines.index("one step in each field:") + 1 :] == [
        step_sentence(step) for step in plan.sensitivity
    ]
    assert "one step in each field:" not in explain(plan, 2, None)


def test_steps_in_words() -> None:
    pricer = pricer_of("llama3-8b", 8)
    layout = layout_of(pricer)
    step = SensitivityStep(
        field="tp", old=1, new=2, layout=layout, step_seconds=1.0, step_ratio=1.13,
        device_bytes=2**30, fits=False,
    )  # fmt: skip
    assert step_sentence(step) == "tp 2 instead of 1: 0.88 times as fast, 1.0 GiB, does not fit"
    refused = SensitivityStep(
        field="compile", old=True, new=False, layout=layout, refused="why; what"
    )
    assert step_sentence(refused) == "without torch.compile: refused, why; what"
