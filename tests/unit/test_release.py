"""A trainer's release is parsed once, and what is not known is taken for what came before it."""

import pytest

from planner.trainers.registry import TRAINERS, release_of
from planner.trainers.release import named


@pytest.mark.parametrize(
    ("text", "number", "exact"),
    [
        (None, "0.2.2", True),
        ("", "0.2.2", True),
        ("0.2", "0.2.2", True),
        ("0.2.1", "0.2.1", True),
        ("v0.3.0", "0.3.0", True),
        ("torchtitan 0.2.0", "0.2.0", True),
        ("0.3.0rc1", "0.3.0", True),
        ("0.2.1+cu128", "0.2.1", True),
        ("0.2.3", "0.2.2", False),
        ("0.4", "0.3.0", False),
        ("9.9", "0.3.0", False),
        ("0.0.1", "0.1.0", False),
        ("2025-11-04", "0.2.0", False),
        ("2025-10-18", "0.2.0", False),
        ("2025-10-17", "0.1.0", False),
        ("2027-01", "0.3.0", False),
        ("torchtitan 2024-05..08", "0.1.0", False),
        ("9dec370", "0.2.2", False),
        ("820504e / torch 38410cf9 2025-06-14 / torchao 6243040", "0.1.0", False),
    ],
)
def test_torchtitan(text: str | None, number: str, exact: bool) -> None:
    found = release_of("torchtitan", text)
    assert (found.number, found.exact) == (number, exact)
    assert (found.note is None) == exact
    assert exact or (str(text) in str(found.note) and number in str(found.note))


@pytest.mark.parametrize(
    ("text", "number", "exact"),
    [
        (None, "0.14", True),
        ("core_v0.14.0", "0.14", True),
        ("0.14.1", "0.14", True),
        ("core 0.16.0rc1", "0.16", True),
        ("Megatron-LM 23e00ed0 (0.14-era) / TE 2.11.0", "0.14", True),
        ("3.0", "3.0", True),
        ("2.4.1", "2.4", True),
        ("NeMo 25.04", "0.11", False),
        ("NeMo 24.07 (first)", "0.7", False),
        ("2022", "3.0", False),
        ("4.0", "0.18", False),
        ("0.99", "0.18", False),
        ("Megatron-Core main 2026-08", "0.18", False),
        ("our own fork", "0.14", False),
    ],
)
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
