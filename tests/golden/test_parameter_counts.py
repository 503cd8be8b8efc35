"""Published parameter counts against our shapes': exact where the weights' total is published."""

import pytest

from planner.catalog.models import model_entry, model_names
from planner.intake.models import load_model, read_model

PUBLISHED = [name for name in model_names() if model_entry(name).published_parameters is not None]
# billions of parameters a token meets, as their publishers round them
ACTIVE = {
    "mixtral-8x7b": (12.9e9, 0.05e9),  # arXiv 2401.04088: 13B active
    "mixtral-8x22b": (39e9, 0.5e9),
    "deepseek-v2": (21e9, 0.5e9),  # arXiv 2405.04434
    # arXiv 2412.19437: 37B of 671B; ours counts the input embedding too
    "deepseek-v3": (37e9, 1e9),
    # its report leaves out embedding and head
    # its report: 13B and 49B; ours counts embedding and head, 1.1B and 1.9B
    "deepseek-v4-flash": (13e9 + 0.8e9, 0.5e9),
    "deepseek-v4-pro": (49e9 + 1e9, 1e9),
    "moonlight-16b-a3b": (2.24e9 + 2 * 163840 * 2048, 0.005e9),
    "kimi-k2": (32e9, 1e9),  # arXiv 2507.20534
    "qwen3-30b-a3b": (3.3e9, 0.1e9),  # model card
    "qwen3-235b-a22b": (22e9, 0.5e9),
    "llama4-scout": (17e9, 0.5e9),
    "llama4-maverick": (17e9, 0.5e9),
    # model card counts 3.61B without the embedding
    "gemma4-26b-a4b": (3.8e9, 0.05e9),  # model card
    "k-exaone-2": (37e9, 0.5e9),
    "minimax-m3": (23e9, 3.5e9),  # ours counts embedding and head, 2.5B
    "gpt-oss-20b": (3.61e9 + 201088 * 2880, 0.01e9),
    "gpt-oss-120b": (5.13e9 + 201088 * 2880, 0.01e9),
}


def rounding(figure: int) -> float:
    """Half a unit of the last digit that is not zero: 174600000000 -> 5e7."""
    return 0.5 * 10 ** (len(str(figure)) - len(str(figure).rstrip("0")))


def test_most_of_the_catalogue_has_a_published_figure():
    assert len(PUBLISHED) >= 70
    assert sum(model_entry(name).exact for name in PUBLISHED) >= 65


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_parameters_match_the_published_figure(name):
    entry, computed = model_entry(name), load_model(name).total_parameters()
    if entry.exact:
        assert computed == entry.published_parameters
    else:
        published = entry.published_parameters
        assert computed == pytest.approx(published, abs=rounding(published))


def test_a_layer_that_predicts_more_chooses_its_own_tokens():
    """Megatron-Bridge 0.6 examples/model_verification_cards/glm5-2: every tensor was compared."""
    model = read_model({"base": "glm5.2", "mtp_num_layers": 1})
    assert model.total_parameters() == 753_329_940_480


def test_step_with_its_layers_of_mtp_is_what_nvidia_counts():
    """Card step35-flash: 199,997,706,240, with a gate for each element and no router biases."""
    model = read_model({"base": "step35-flash", "mtp_num_layers": 3})
    gates = sum(
        count * model.at(kind.window).num_attention_heads * (model.head_dim - 1)
        for kind, count in model.distinct_layers()
    )
    biases = model.num_experts * model.num_moe_layers
    assert model.total_parameters() + gates * model.hidden_size - biases == 199_997_706_240


def test_k_exaone_with_its_layer_of_mtp_is_the_hubs_count():
    model = read_model({"base": "k-exaone-2", "mtp_num_layers": 1})
    predicting = next(kind for kind, _ in model.distinct_layers() if kind.mtp)
    assert (predicting.moe, predicting.window) == (False, 128)
    assert round(model.total_parameters() / 1e9) == 749


def test_lightning_is_nemotron_3_nano_with_a_prediction_of_two_letters():
    """Card nemotron-3.5-lightning: 32,913,266,240, with attention and experts of MTP."""
    model = load_model("nemotron-3-nano-30b-a3b")
    kinds = model.layer_kinds()
    attention = next(kind for kind in kinds if kind.mixer == "attention")
    experts = next(kind for kind in kinds if kind.moe)
    more = sum(model.parameters.layer(kind) for kind in (attention, experts))
    hidden = model.hidden_size
    assert model.total_parameters() + more + 2 * hidden**2 + 3 * hidden == 32_913_266_240


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters_match_the_published_figure(name):
    figure, tolerance = ACTIVE[name]
    assert load_model(name).active_parameters() == pytest.approx(figure, abs=tolerance)


@pytest.mark.parametrize("name", model_names())
def test_parts_sum_to_the_total(name):
    model = load_model(name)
    layers = sum(model.parameters.layer(kind) for kind in model.layer_kinds())
    layers += sum(
        n * model.parameters.layer(kind) for kind, n in model.distinct_layers() if kind.mtp
    )
    ends = model.parameters.embedding() + model.parameters.final_norm + model.parameters.head()
    assert layers + ends == model.total_parameters()
    all_layers = model.num_hidden_layers + model.mtp_num_layers
    assert sum(count for _, count in model.distinct_layers()) == all_layers
    active = model.active_parameters()
    assert 0 < model.matmul_parameters_per_token() < active <= model.total_parameters()


def test_torchtitan_flops_of_llama3_8b():
    """6 x (8030261248 - 128256 x 4096) + 12 x 32 x 32 x 128 x 8192: TorchTitan's for its 8B."""
    assert load_model("llama3-8b").torchtitan_flops_per_token(8192) == 6 * 7504924672 + 12884901888


def test_torchtitan_flops_of_mla_use_the_mean_head_width():
    model = load_model("deepseek-v2-lite")
    attention = 6 * 27 * 16 * (192 + 128) * 4096
    multiplied = 6 * model.matmul_parameters_per_token()
    assert model.torchtitan_flops_per_token(4096) == multiplied + attention
