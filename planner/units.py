"""The only place where 1024 and 1e9 appear: it parses quantities of users and formats them again.

Inside the planner every quantity is SI: bytes, seconds, bytes per second, FLOP, watts.
GB is 10^9 bytes and GiB is 2^30 bytes. Bandwidth in bits ("400 Gb/s") is divided by eight.
"""

import math
import re
from collections.abc import Mapping

KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
BITS_PER_BYTE = 8
HOUR, DAY = 3600.0, 86400.0
SAME_SPEED = 0.005  # a ratio of speeds this near to one counts as no difference
RARE = 0.001  # a share: below it one digit of its percentage says too little
ROUNDS_UP = 0.9995  # of a power of ten: from here three digits read as the power itself

_DECIMAL = {"": 1.0, "k": KILO, "K": KILO, "M": MEGA, "G": GIGA, "T": TERA, "P": PETA}
_COUNTS = {"": 1.0, "k": KILO, "K": KILO, "M": MEGA, "B": GIGA, "G": GIGA, "T": TERA}
_LENGTHS = {"k": KIB, "K": KIB, "Ki": KIB, "m": MIB, "M": MIB, "Mi": MIB}
_BINARY = {"Ki": float(KIB), "Mi": float(MIB), "Gi": float(GIB), "Ti": float(TIB)}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": HOUR, "d": DAY}
_NUMBER_AND_UNIT = re.compile(
    r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*$"
)
_BYTES = {
    f"{prefix}{unit}": size * scale
    for prefix, size in {**_DECIMAL, **_BINARY}.items()
    for unit, scale in (("B", 1.0), ("b", 1.0 / BITS_PER_BYTE))
}
# kind of a quantity -> SI value of each of its units; a bare number is SI
_UNITS = {
    "bytes": {"": 1.0, **_BYTES},
    "bytes_per_second": {
        "": 1.0, **{f"{unit}{per}": size for unit, size in _BYTES.items() for per in ("/s", "ps")}
    },
    "seconds": {"": 1.0, **_TIME},
    "watts": {"": 1.0, **{f"{prefix}W": size for prefix, size in _DECIMAL.items()}},
    "flops_per_second": {
        "": 1.0, **{f"{prefix}FLOP/s": size for prefix, size in _DECIMAL.items()}
    },
}  # fmt: skip
EXAMPLES = {
    "bytes": '"80 GiB"',
    "bytes_per_second": '"400 Gb/s" or "50 GB/s"',
    "seconds": '"5 us"',
    "watts": '"700 W"',
    "flops_per_second": '"989 TFLOP/s"',
}


def _amount(text: str, units: Mapping[str, float]) -> float | None:
    """The number before a unit, in SI; None for a text that is no such amount."""
    match = _NUMBER_AND_UNIT.match(text)
    factor = units.get(match[2]) if match else None
    return float(match[1]) * factor if match and factor else None


def parse_quantity(value: object, kind: str) -> float:
    """SI number from a bare number or a string with a unit.

    value: 50e9, "50e9", "400 Gb/s", "80 GiB", "700 W", "5 us".
    kind: a key of EXAMPLES.
    Raises ValueError with the rule when the text is no number, the unit does not fit, or the number
    is not finite.
    """
    number = _amount(value, _UNITS[kind]) if isinstance(value, str) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = to_float(value)
    if number is None:
        raise ValueError(f"must be a number in SI units or a text such as {EXAMPLES[kind]}")
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def to_float(value: float) -> float:
    """The number; infinite where a whole number has more digits than a float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_count(value: object) -> object:
    """15e12 from "15T", "15 T" or "15e12"; a value that is not text is returned as it is.

    Suffixes are k, M, B (or G) and T.
    Raises ValueError with the rule and remedy when the text is no number.
    """
    if not isinstance(value, str):
        return value
    count = _amount(value, _COUNTS)
    if count is None:
        raise ValueError('must be a number; give for example 2e12 or "15T"')
    return count


def parse_tokens(value: object) -> object:
    """Length of a sequence: 8192 from "8k", "8K" or "8 K", 1048576 from "1M".

    A value that is not text is returned as it is. The suffixes are powers of two, because lengths
    of sequences are: nobody who writes 8k means 8000. (Tokens of a whole run are decimal:
    `parse_count`.)
    Raises ValueError with the rule and remedy when the text is no whole number with such a suffix.
    """
    if not isinstance(value, str):
        return value
    length = _amount(value, _LENGTHS)
    if length is None or not length.is_integer():
        raise ValueError(
            "must be a whole number, or one with k or M; give for example 8192, or 8k for the same"
        )
    return int(length)


def format_bytes(num_bytes: float) -> str:
    """Binary units, as GPU tools print memory: 85899345920 -> "80.0 GiB"."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three significant digits in the unit that fits: 0.00123 -> "1.23 ms"."""
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.1f} d"
    if seconds >= 2 * HOUR:
        return f"{seconds / HOUR:.1f} h"
    if seconds >= ROUNDS_UP * KILO:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= ROUNDS_UP * size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_bandwidth(bytes_per_second: float) -> str:
    """Decimal units, as network datasheets print: 50e9 -> "50 GB/s"."""
    return f"{bytes_per_second / GIGA:.4g} GB/s"


def format_count(count: float) -> str:
    """1234567 -> "1.23M", 8030261248 -> "8.03B"."""
    for suffix, size in (("T", TERA), ("B", GIGA), ("M", MEGA), ("k", KILO)):
        if abs(count) >= ROUNDS_UP * size:
            return f"{three_digits(count / size)}{suffix}"
    return f"{count:.0f}"


def format_risk(probability: float) -> str:
    """A probability as percent, a small one as a bound: 0.0312 -> "3.1%", 0.0 -> "under 0.1%"."""
    return f"{probability:.1%}" if probability >= RARE else f"under {RARE:.1%}"


def counted(count: int, noun: str) -> str:
    """A number of things: (1, "probe") -> "1 probe", (2000, "batch") -> "2,000 batches"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """More than one of it: "probe" -> "probes", "microbatch" -> "microbatches"."""
    return f"{noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{noun}s"


def times_as_fast(speedup: float) -> str:
    """How fast one thing is against another, by the ratio of rates: 1.17 -> "1.17 times as fast".

    Gains and losses (0.95 is a loss) share one wording, because a share of time saved reads like a
    share of speed gained: a step 50% shorter is twice as fast. Within SAME_SPEED it says so.
    """
    if abs(math.log(speedup)) < SAME_SPEED:
        return "as fast within 0.5%"
    return f"{times(speedup)} as fast"


def times(ratio: float) -> str:
    """A ratio: 1.168 -> "1.17 times", 0.0123 -> "0.012 times", 12.34 -> "12.3 times"."""
    if ratio >= 10:
        return f"{three_digits(ratio)} times"
    return f"{ratio:.2f} times" if ratio >= 0.1 else f"{ratio:.2g} times"


def three_digits(value: float) -> str:
    """Three significant digits, thousands grouped, never an exponent: 1234.5 -> "1,230".

    0.1234 -> "0.123".
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= ROUNDS_UP * 100 else f"{value:.3g}"
