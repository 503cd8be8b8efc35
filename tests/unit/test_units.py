"""Units: what a person types in, what a person reads out."""

import math
from typing import Any

import pytest

from planner.units import (
    counted,
    format_bandwidth,
    format_bytes,
    format_count,
    format_seconds,
    parse_count,
    parse_quantity,
    parse_tokens,
    three_digits,
    times_as_fast,
)


@pytest.mark.parametrize(("count", "text"), [
    (0, "0"), (999, "999"), (999.7, "1k"), (1000, "1k"), (999_400, "999k"), (999_600, "1M"),
    (1_234_567, "1.23M"), (999.9e9, "1T"), (1e12, "1T"), (8_030_261_248, "8.03B"),
    (1.5e15, "1,500T"), (12_345_678, "12.3M"),
])  # fmt: skip
def test_counts_have_no_exponents(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(("count", "noun", "text"), [
    (0, "probe", "0 probes"), (1, "probe", "1 probe"), (2000, "probe", "2,000 probes"),
    (2, "batch", "2 batches"), (1, "batch", "1 batch"), (2, "GPU", "2 GPUs"),
    (2, "process", "2 processes"), (1, "process", "1 process"),
    (2, "legal layout", "2 legal layouts"),
])  # fmt: skip
def test_one_thing_is_not_several(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


@pytest.mark.parametrize(("speedup", "text"), [
    (1.168, "1.17 times as fast"), (0.953, "0.95 times as fast"), (1.004, "as fast within 0.5%"),
    (0.996, "as fast within 0.5%"), (12.34, "12.3 times as fast"), (1234.0, "1,230 times as fast"),
    (0.0123, "0.012 times as fast"),
])  # fmt: skip
def test_speeds_are_compared_as_ratios(speedup: float, text: str) -> None:
    """14.6% less time is 1.17 times as fast: a share of time reads like one of speed."""
    assert times_as_fast(speedup) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.00123, "1.23 ms"), (0.9996, "1 s"), (999.6e-6, "1 ms"), (999.9e-9, "1 us"), (1e-9, "1 ns"),
    (0.0, "0 ns"), (59.96, "60 s"), (999.4, "999 s"), (999.6, "1000 s"), (7199, "7199 s"),
    (7200, "2.0 h"), (2 * 86400, "2.0 d"), (0.1, "100 ms"),
])  # fmt: skip
def test_seconds_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_no_number_is_shown_with_an_exponent() -> None:
    shown = [
        show(10.0**power * lead)
        for power in range(-8, 14)
        for lead in (1.0, 9.994, 9.996)
        for show in (format_count, format_seconds)
    ]
    assert not [text for text in shown if "e" in text]


@pytest.mark.parametrize(("value", "text"), [
    (1234.5, "1,230"), (99.96, "100"), (100.4, "100"), (0.1234, "0.123"), (7.0, "7")])  # fmt: skip
def test_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(("typed", "count"), [
    ("15T", 15e12), ("15 T", 15e12), ("300B", 300e9), ("2e12", 2e12), ("7k", 7e3)])  # fmt: skip
def test_counts_are_read_with_their_suffix(typed: str, count: float) -> None:
    assert parse_count(typed) == count


@pytest.mark.parametrize(("typed", "tokens"), [
    ("8k", 8192), ("8K", 8192), ("8 K", 8192), ("128K", 131_072), ("1M", 1_048_576), ("1.5k", 1536),
    (8192, 8192),
])  # fmt: skip
def test_lengths_of_sequences_are_powers_of_two(typed: object, tokens: int) -> None:
    assert parse_tokens(typed) == tokens


@pytest.mark.parametrize(("parse", "typed", "words"), [
    *((parse_tokens, typed, r"must be a whole number.*; give for example 8192")
        for typed in ("8x", "k", "1.3k", "", "8192", "8 GiB")),
    *((parse_count, typed, "must be a number; give")
        for typed in ("15X", "T", "1,000", "", "15 GB")),
])  # fmt: skip
def test_what_is_no_length_or_count_is_refused(parse: Any, typed: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(typed)


@pytest.mark.parametrize(("typed", "kind", "value"), [
    ("400 Gb/s", "bytes_per_second", 50e9), ("50 GB/s", "bytes_per_second", 50e9),
    ("400 Gbps", "bytes_per_second", 50e9), ("80 GiB", "bytes", 80 * 2**30),
    ("80 GB", "bytes", 80e9), ("5 us", "seconds", 5e-6), ("5 \u00b5s", "seconds", 5e-6),
    ("700 W", "watts", 700.0), ("0.7 kW", "watts", 700.0), (7, "bytes", 7.0),
    ("989 TFLOP/s", "flops_per_second", 989e12),
])  # fmt: skip
def test_quantities(typed: object, kind: str, value: float) -> None:
    assert parse_quantity(typed, kind) == pytest.approx(value)


@pytest.mark.parametrize(("typed", "kind"), [
    ("5 GB", "watts"), ("fast", "seconds"), (True, "bytes"), (math.inf, "bytes"),
    ("1 GiB", "seconds"), (None, "bytes"),
])  # fmt: skip
def test_what_is_no_quantity_is_refused(typed: object, kind: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_quantity(typed, kind)


def test_bytes_and_bandwidth() -> None:
    shown = [format_bytes(size) for size in (80 * 2**30, 1536, 12)]
    assert [*shown, format_bandwidth(50e9)] == ["80.0 GiB", "1.5 KiB", "12 B", "50 GB/s"]
