"""A trainer's release is parsed once, and what is not known is taken for what came before it."""

import pytest

import planner
from planner.trainers.registry import TRAINERS, release_of, resolve_layout
from planner.trainers.release import Releases, named
from tests.conftest import job_values


@pytest.mark.parametrize(("text", "number", "exact"), [
    (None, "0.2.2", True), ("", "0.2.2", True), ("0.2", "0.2.2", True), ("0.2.1", "0.2.1", True),
    ("v0.3.0", "0.3.0", True), ("torchtitan 0.2.0", "0.2.0", True), ("0.3.0rc1", "0.3.0", True),
    ("0.2.1+cu128", "0.2.1", True), ("0.2.3", "0.2.2", False), ("0.4", "0.3.0", False),
    ("9.9", "0.3.0", False), ("0.0.1", "0.1.0", False), ("2025-11-04", "0.2.0", False),
    ("2025-10-18", "0.2.0", False), ("2025-10-17", "0.1.0", False), ("2027-01", "0.3.0", False),
    ("torchtitan 2024-05..08", "0.1.0", False), ("9dec370", "0.2.2", False),
    ("12", "0.3.0", False), ("2025.08", "0.1.0", False), ("our own fork", "0.2.2", False),
    # a nightly build comes before the release whose number it has
    ("0.3.0.dev20260601", "0.2.2", False),
    ("torch 2.9.0.dev20250815+cu128, torchao 0.13.0, torchtitan 6fc499f6", "0.1.0", False),
    ("torch 2.9.0.dev20250815, torchtitan 2025-12-30", "0.2.1", False),
    ("torch 2.11.0 / torchtitan 0.2.1", "0.2.1", True), ("TE 2.11.0", "0.2.2", False),
    ("820504e / torch 38410cf9 2025-06-14 / torchao 6243040", "0.1.0", False),
])  # fmt: skip
def test_torchtitan(text: str | None, number: str, exact: bool) -> None:
    found = release_of("torchtitan", text)
    assert (found.number, found.exact) == (number, exact)
    assert (found.note is None) == exact
    assert exact or (str(text) in str(found.note) and number in str(found.note))


@pytest.mark.parametrize(("text", "number", "exact"), [
    (None, "0.19", True), ("core_v0.14.0", "0.14", True), ("0.14.1", "0.14", True),
    ("core 0.16.0rc1", "0.16", True), ("Megatron-LM 23e00ed0 (0.14-era) / TE 2.11.0", "0.14", True),
    ("3.0", "3.0", True), ("2.4.1", "2.4", True), ("NeMo 25.04", "0.12", False),
    ("NeMo 24.07 (first)", "0.8", False), ("NeMo 24.11", "0.9", False),
    ("NeMo 25.12", "0.15", False), ("NeMo 25.09 (MLPerf Training v5.1 submission)", "0.14", False),
    ("2022", "3.0", False), ("4.0", "0.20", False), ("0.99", "0.20", False),
    ("Megatron-Core main 2026-08", "0.19", False), ("our own fork", "0.19", False),
])  # fmt: skip
def test_megatron(text: str | None, number: str, exact: bool) -> None:
    found = release_of("megatron", text)
    assert (found.number, found.exact) == (number, exact)


def test_order_is_that_of_time() -> None:
    assert release_of("torchtitan", "0.3").since("0.2")
    assert release_of("torchtitan", "0.2.3").before("0.3")
    assert not release_of("torchtitan", "0.2").before("0.2.0")
    assert release_of("megatron", "3.0").before("0.13")  # numbers fell once
    with pytest.raises(ValueError, match="no known release"):
        release_of("torchtitan", "0.2").since("0.7")


def test_a_date_is_compared_with_the_repository_and_a_number_with_the_release() -> None:
    range_ = Releases(since="0.3", since_day="2026-08-01")
    before = Releases(before="0.3", before_day="2026-08-01")
    inside = ("0.3.0", "torchtitan 2026-08", "0.3.0.dev20260802")
    for text in (*inside, "0.2.2", "2026-07-31", "abc1234"):
        release = release_of("torchtitan", text)
        assert range_.hold(release) == (text in inside), text
        assert before.hold(release) == (text not in inside), text


@pytest.mark.parametrize(("trainer", "text", "has", "lacks"), [
    ("torchtitan", None, "float8-tensorwise", "nvfp4"),
    ("torchtitan", "torchtitan 2025-10-14", "float8-rowwise-gw-hp", "nvfp4"),
    ("torchtitan", "torchtitan 2026-05", "float8-rowwise-gw-hp", "float8-tensorwise"),
    ("torchtitan", "torchtitan 2026-07-30", "mxfp8", "nvfp4"),
    ("torchtitan", "torchtitan 2026-08", "nvfp4", "float8-tensorwise"),
    ("torchtitan", "0.3.0", "nvfp4", "float8-tensorwise"),
    ("megatron", "NeMo 25.09 (MLPerf Training v5.1 submission)", "nvfp4", "float8-rowwise"),
    ("megatron", "0.14", "mxfp8", "nvfp4"),
    ("megatron", "NeMo 25.07", "mxfp8", "nvfp4"),
])  # fmt: skip
def test_precisions_of_a_day(trainer: str, text: str | None, has: str, lacks: str) -> None:
    rules = TRAINERS[trainer].at(release_of(trainer, text))
    assert has in rules.precisions
    assert lacks not in rules.precisions


@pytest.mark.parametrize(("text", "chunked", "graphs"), [
    ("torchtitan 2026-03-12, graph_trainer", False, "none"),
    ("torchtitan 2026-06 branch, graph_trainer", False, "full"),
    ("torchtitan 2026-08-01 graph_trainer", True, "full"), ("0.3.0, graph_trainer", True, "full"),
    ("torchtitan 2026-06-11 branch", True, "none"),
])  # fmt: skip
def test_the_graph_trainer_has_rules_of_its_own(text: str, chunked: bool, graphs: str) -> None:
    release = release_of("torchtitan", text)
    at = TRAINERS["torchtitan"].at(release)
    assert (at.chunked_loss, at.default_cuda_graphs) == (chunked, graphs)
    assert (at.always_compiles, release.exact) == ("graph" in text, text.startswith("0.3.0"))


def test_an_estimate_warns_of_the_release_taken() -> None:
    job = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 8, trainer_version="9.9")
    for layout in ({"ac": "full"}, {"tp": 5}):
        answer = planner.estimate(**{**job, "layout": layout})
        assert any("0.3.0" in text and "'9.9'" in text for text in answer.warnings)


def test_other_trainers_have_no_releases() -> None:
    assert release_of("fsdp", "torch 2.x era").note is None


def test_parts_of_a_text() -> None:
    assert named("NeMo 24.09").distribution == "NeMo"
    assert named("NeMo 24.09").month == "2024-09"
    assert (named("2023-11..2024-03").year, named("main 2026-08").year) == ("2023", "")
    assert named("820504e").month == ""  # a commit, not the year 2050
    assert named("9dec370 / torch (2024-12-23)").day == "2024-12-23"


def test_defaults_are_releases() -> None:
    for trainer in TRAINERS.values():
        if trainer.history:
            assert trainer.default_release in {known.number for known in trainer.history}
        days = [known.day for known in trainer.history]
        assert days == sorted(days)


@pytest.mark.parametrize(("text", "bytes_a_logit", "reduce_dtype"), [
    (None, 12.0, "float32"),
    ("torch 2.4", 12.0, "float32"),
    ("torch 2.4, flash-attn 2", 4.0, "float32"),
    ("llm-foundry 0.15", 4.0, "bfloat16"),
    ("composer 0.22", 4.0, "bfloat16"),
    ("MosaicML", 4.0, "bfloat16"),
])  # fmt: skip
def test_plain_fsdp_has_an_eager_loss_unless_the_text_names_who_has_not(
    text: str | None, bytes_a_logit: float, reduce_dtype: str
) -> None:
    rules = TRAINERS["fsdp"].at(release_of("fsdp", text))
    assert rules.loss_bytes == rules.fused_loss_bytes == bytes_a_logit
    assert rules.ends_in_root
    layout = resolve_layout({}, trainer="fsdp", num_gpus=8, trainer_version=text)
    assert layout.reduce_dtype == reduce_dtype
