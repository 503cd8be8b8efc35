"""LongCat-Flash: experts that compute nothing, and outputs that take a shortcut over a layer."""

import pytest

from planner.columns import LayoutBatch
from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.job import Job
from planner.specs.model import ModelSpec
from planner.trainers.megatron_models import lacking
from planner.trainers.registry import TRAINERS, release_of
from planner.trainers.torchtitan import TORCHTITAN
from planner.work import axes, blocks
from tests.conftest import job_values

LONGCAT = "longcat-flash"


def job(model: object, **layout: object) -> Job:
    layout = {"ep": 64, **layout}
    return read_job(job_values(model, "h100-sxm-80gb", 512, 4096, 512, layout=layout,
        trainer="fsdp"))  # fmt: skip


def sizes(model: ModelSpec) -> dict[str, float]:
    asked = job(inline_keys(model))
    assert asked.layout is not None
    batch = LayoutBatch.from_layouts([asked.layout])
    found = axes.local_sizes(batch, model, asked.training, TRAINERS["fsdp"])
    return {name: float(size[0]) for name, size in found.items()}


def test_a_layer_is_two_of_which_one_has_experts_beside_its_mlp() -> None:
    model = load_model(LONGCAT)
    assert read_model(inline_keys(model)) == model
    assert [kind.moe for kind in model.layer_kinds()] == [True, False] * 28
    assert model.shared_expert_intermediate_size == model.intermediate_size == 12288
    assert model.parameters.router() == (512 + 256) * (6144 + 1)
    assert 26e9 < model.active_parameters() < 28.5e9  # published: 27B on average


def test_a_third_of_the_routed_rows_is_neither_computed_nor_sent() -> None:
    model = load_model(LONGCAT)
    every = model.model_copy(update={"zero_expert_num": 0})
    assert (model.num_computing_per_tok, every.num_computing_per_tok) == (8.0, 12)
    one, other = sizes(model), sizes(every)
    assert one["tokens_copied"] / other["tokens_copied"] == pytest.approx(2 / 3)
    assert one["tokens_of_mean_expert"] / other["tokens_of_mean_expert"] == pytest.approx(2 / 3)
    assert one["tokens_routed"] / other["tokens_routed"] == pytest.approx(2 / 3, rel=0.02)
    assert (one["experts"], one["experts_local"]) == (768, 8)
    few, many = (estimate_job(job(inline_keys(each))) for each in (model, every))
    assert few.time.exposed_communication_seconds["ep"] < (
        0.75 * many.time.exposed_communication_seconds["ep"]
    )
    assert few.step_seconds < many.step_seconds


def test_zero_experts_scale_the_token_and_are_not_exchanged() -> None:
    model = load_model(LONGCAT)
    kind = model.layer_kinds()[0]
    names = [op.name for op in blocks.layer_ops(model, kind, True)]
    assert names.count("zero_experts") == 1
    assert names.index("scatter") < names.index("zero_experts")
    plain = blocks.layer_ops(model.model_copy(update={"zero_expert_num": 0}), kind, True)
    assert "zero_experts" not in {op.name for op in plain}


def test_others_are_refused_by_name() -> None:
    model = load_model(LONGCAT)
    for words in (
        TORCHTITAN.lacks(model, release_of("torchtitan", None)),
        lacking(model, release_of("megatron", None)),
    ):
        assert {"experts that compute nothing", "experts on a shortcut over the next layer"} <= {
            *words
        }
    for change, match in (
        ({"num_experts": 0, "num_experts_per_tok": 0, "moe_shortcut": False}, "beside experts"),
        ({"moe_layer_freq": 1}, "without experts behind each"),
    ):
        with pytest.raises(ValueError, match=match):
            ModelSpec.model_validate({**model.model_dump(), **change})
    config = {"model_type": "longcat_flash", "architectures": [], "zero_expert_type": "constant"}
    with pytest.raises(SpecError, match="zero experts that are not their input"):
        read_model({**config, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})
