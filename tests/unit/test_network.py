"""A network beyond its shapes, in config.json: read, kept, no part of a job's name."""

import pytest

from planner.catalog.models import model_names
from planner.errors import SpecError
from planner.intake.huggingface.model_document import inline_keys
from planner.intake.jobs import read_job
from planner.intake.models import load_model, read_model
from planner.specs.measurement import question_hash
from planner.specs.model import ModelSpec
from planner.trainers.megatron_models import lacking as megatron_lacks
from planner.trainers.registry import release_of
from planner.trainers.titan_models import FLAVORS, lacking
from tests.conftest import JOB, job_values

SHAPES = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000,
    "intermediate_size": 4096,
}  # fmt: skip


def published(**keys: object) -> ModelSpec:
    return read_model({**SHAPES, "architectures": ["X"], "model_type": "llama", **keys})


@pytest.mark.parametrize("name", model_names())
def test_the_catalogue_knows_each_models_positions(name: str) -> None:
    model = load_model(name)
    assert (model.rope_theta is not None) == (model.position_embedding == "rope")


def test_both_forms_of_a_config_mean_the_same() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    old = published(rope_theta=1e6, rope_scaling={**scaling, "type": "yarn"})
    new = published(rope_parameters={**scaling, "rope_theta": 1e6})
    assert old == new
    assert (new.rope_theta, new.rope_scaling.factor) == (1e6, 4.0)


def test_a_class_default_holds_for_a_published_config_and_not_for_a_persons_shapes() -> None:
    assert published().rope_theta == 10_000.0
    assert read_model(SHAPES).rope_theta is None
    assert read_model({**SHAPES, "model_type": "llama"}).rope_theta is None


def test_a_scaling_that_lacks_its_numbers_is_a_fault() -> None:
    with pytest.raises(SpecError, match=r"rope_scaling\.low_freq_factor"):
        published(rope_scaling={"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0})
    with pytest.raises(SpecError, match=r"rope_scaling\.factor"):
        published(rope_scaling={"rope_type": "linear", "factor": -1})


def test_keys_that_we_do_not_know_are_remembered() -> None:
    found = published(wonder_factor=3, another=None, use_something=False)
    assert found.unread_keys == ("wonder_factor",)


def test_a_network_does_not_change_what_a_job_is_found_by() -> None:
    name = "llama3.1-8b"
    other = {**inline_keys(load_model(name)), "rope_theta": 777.0, "norm_eps": 1e-3}
    assert len({question_hash(read_job({**JOB, "model": model})) for model in (name, other)}) == 1


@pytest.mark.parametrize(("model", "gpu", "known"), [
    ("llama3-8b", "h100-sxm-80gb", "067194e9ab48a262"),
    ("deepseek-v3", "h200-sxm-141gb", "67a2a906ef76d97a"),
])  # fmt: skip
def test_a_question_is_found_under_the_name_it_had(model: str, gpu: str, known: str) -> None:
    """A field that came later goes into `measurement.ADDED_LATER`: stored runs stay known."""
    assert question_hash(read_job(job_values(model, gpu, 8, 4096, 64))).startswith(known)


def test_an_activation_that_no_class_has_is_kept_and_refused() -> None:
    model = published(hidden_act="xielu")
    assert model.hidden_act == "xielu"
    assert "xielu activation" in lacking(model, "0.2")
    assert "xielu activation" in megatron_lacks(model, release_of("megatron", None))


def test_an_alias_may_differ_in_a_number() -> None:
    assert read_model("Qwen/Qwen3-235B-A22B-Instruct-2507").rope_theta == 5e6
    assert read_model("Qwen/Qwen3-235B-A22B").rope_theta == 1e6
    # not confirmed, so not said
    assert read_model("moonshotai/Kimi-K2-Thinking").rope_theta is None


def test_every_shipped_flavor_has_its_facts() -> None:
    for flavor in FLAVORS.values():
        assert {"rope_theta", "norm_eps", "rope_scaling"} <= flavor.facts.keys()


def test_a_variant_with_experts_that_the_bases_groups_do_not_divide_has_no_groups() -> None:
    base = read_model({"base": "deepseek-v3"})
    same = read_model({"base": "deepseek-v3", "n_routed_experts": 64})
    assert (same.n_group, same.topk_group) == (base.n_group, base.topk_group) == (8, 4)
    few = {"base": "deepseek-v3", "n_routed_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(SpecError, match="does not divide 4 experts"):
        read_model({**few, "n_group": 8})
    assert read_model(few).n_group == 0
