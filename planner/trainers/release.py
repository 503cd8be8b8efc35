"""A trainer's release, parsed once: what a person writes, and which release that we know it stands
for.

People write a number ("0.2.2", "v0.3.0", "core_v0.14.0"), a date or a month ("2025-11-04", "2023"),
a commit, or a distribution ("NeMo 25.04"). Rules ask for a release that we know: of a number we do
not know the newest before it, of a date the newest before that day, of anything else the default.
What was not taken as written is said (`Release.note`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from packaging.version import InvalidVersion, Version

DISTRIBUTIONS = ("NeMo",)
CENTURY = "20"

_NUMBER = re.compile(
    r"(?:[a-z]+(?:[-_ ](?:lm|core))?[-_ ]+)?(?:core[-_ ])?v?(\d+\.\d[\w.+]*)", re.I
)
_ERA = re.compile(r"(\d+\.\d+)-era")
_MONTH = re.compile(r"(?<![\w.])20\d\d(-\d\d)?(?![\da-f])")  # not within a commit, not .dev20251001
_DAY = re.compile(r"20\d\d-\d\d-\d\d")
_DISTRIBUTED = re.compile(r"\d\d\.\d\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A release that the rules know.  day: when it came out, to the month where that is all we
    know.
    """

    number: str
    day: str


# torchtitan: days on which the files in its wheels on PyPI were written. Megatron: months of its
# tags (github.com/NVIDIA/Megatron-LM/releases; core_v0.2 on, and v2.x to v3.0 before), as its
# wheels say from 0.12 on; the months of 2020 to 2022 are judgements that nothing but their order
# rests on.
RELEASES: Mapping[str, tuple[Known, ...]] = {
    "torchtitan": tuple(
        Known(number=number, day=day)
        for number, day in (
            ("0.1.0", "2025-06-18"), ("0.2.0", "2025-10-18"), ("0.2.1", "2025-12-26"),
            ("0.2.2", "2026-02-20"), ("0.3.0", "2026-09-03"),
        )
    ),
    "megatron": tuple(
        Known(number=number, day=day)
        for number, day in (
            ("2.0", "2020-12"), ("2.1", "2021-01"), ("2.2", "2021-03"), ("2.3", "2021-04"),
            ("2.4", "2021-05"), ("2.5", "2021-07"), ("2.6", "2021-11"), ("3.0", "2022-09"),
            ("0.2", "2023-08"), ("0.3", "2023-10"), ("0.4", "2023-12"), ("0.5", "2024-01"),
            ("0.6", "2024-04"), ("0.7", "2024-06"), ("0.8", "2024-08"), ("0.9", "2024-10"),
            ("0.10", "2025-02"), ("0.11", "2025-03"), ("0.12", "2025-05"), ("0.13", "2025-07"),
            ("0.14", "2025-10"), ("0.15", "2025-12"), ("0.16", "2026-02"), ("0.17", "2026-04"),
            ("0.18", "2026-06"),
        )
    ),
}  # fmt: skip
DEFAULTS: Mapping[str, str] = {"torchtitan": "0.2.2", "megatron": "0.14"}
UNRELEASED = Known(number="0", day="")
"""Of a trainer whose releases do not matter: its repository is what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a text names, each part "" or None where it does not.

    number: a release.  day: YYYY-MM-DD, often that of a commit.  month: YYYY-MM or YYYY.
    distribution: one that ships the trainer with defaults of its own.
    """

    text: str
    number: Version | None
    day: str
    month: str
    distribution: str

    @property
    def year(self) -> str:
        """The year it starts with, "" where it starts otherwise."""
        return self.text[:4] if _MONTH.match(self.text) else ""

    def not_before_month(self, month: str) -> bool:
        """Whether nothing it names says that it is older than this month (YYYY-MM)."""
        return not self.month or self.month >= month


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The release that the rules take for a job.  exact: whether it is what was written, or a whole
    line of releases.
    """

    trainer: str
    named: Named
    known: Known
    exact: bool

    @property
    def number(self) -> str:
        """As its makers write it: "0.2.2"."""
        return self.known.number

    @property
    def line(self) -> str:
        """Its line of releases: "0.2"."""
        return ".".join(self.number.split(".")[:2])

    def since(self, number: str) -> bool:
        """Whether it is this release or a later one. Raises ValueError for one that is not
        known.
        """
        return self._place(self.known.number) >= self._place(number)

    def before(self, number: str) -> bool:
        """Whether it is earlier than this release. Raises ValueError for one that is not known."""
        return not self.since(number)

    def not_after(self, number: str, month: str) -> bool:
        """Whether it is known to be of this release, or of this month (YYYY-MM), or earlier; a date
        outranks a number.
        """
        if len(self.named.month) > len("2025"):
            return self.named.month <= month
        return self.named.number is not None and Version(self.number) <= Version(number)

    def _place(self, number: str) -> int:
        """Place in order of time; a line counts from its first release. Megatron's 3.0 is before
        its 0.2.
        """
        releases = RELEASES.get(self.trainer, (UNRELEASED,))
        found = (
            place for place, known in enumerate(releases) if _within(Version(known.number), number)
        )
        place = next(found, None)
        if place is None:
            raise ValueError(f"{number} is no known release of {self.trainer}")
        return place

    @property
    def note(self) -> str | None:
        """What a reader must know: the release that was taken in place of the one named. None where
        it is the one.
        """
        if self.exact:
            return None
        return (
            f"training.trainer_version {self.named.text!r} is no release of {self.trainer} that we "
            f"know: the rules of {self.number} ({self.known.day}) are taken"
        )


def _within(release: Version, line: str) -> bool:
    """Whether a release belongs to a line, or is that release."""
    wanted = Version(line).release
    return release.release[: len(wanted)] == wanted


@lru_cache(maxsize=1024)
def named(text: str | None) -> Named:
    """What a `trainer_version` names; every part empty for None."""
    text = (text or "").strip()
    distribution = next((name for name in DISTRIBUTIONS if text.startswith(name)), "")
    era = _ERA.search(text)
    found = None if distribution else _NUMBER.match(text) or era
    day, month = _DAY.search(text), _MONTH.search(text)
    named_month = "" if month is None else month[0]
    if distribution and not named_month and (short := _DISTRIBUTED.search(text)):
        named_month = CENTURY + short[0].replace(".", "-")
    return Named(
        text=text,
        number=None if found is None else _version(found[1]),
        day="" if day is None else day[0],
        month=named_month,
        distribution=distribution,
    )


def _version(text: str) -> Version | None:
    try:
        return Version(text.rstrip("."))
    except InvalidVersion:
        return None


@lru_cache(maxsize=1024)
def release_of(trainer: str, text: str | None) -> Release:
    """The release that a job's rules take: by number, else by date, else the trainer's default."""
    said = named(text)
    releases = RELEASES.get(trainer)
    if releases is None:
        return Release(trainer=trainer, named=said, known=UNRELEASED, exact=True)
    default = next(known for known in releases if known.number == DEFAULTS[trainer])
    if said.number is not None:
        known, exact = _numbered(releases, Version(said.number.base_version))
        return Release(trainer=trainer, named=said, known=known, exact=exact)
    if said.month:
        when = said.day or said.month
        earlier = [known for known in releases if known.day[: len(when)] <= when]
        found = earlier[-1] if earlier else releases[0]
        return Release(trainer=trainer, named=said, known=found, exact=False)
    return Release(trainer=trainer, named=said, known=default, exact=not said.text)


def _numbered(releases: tuple[Known, ...], number: Version) -> tuple[Known, bool]:
    """The release of a number, and whether that is what the number says; else the newest before
    it.
    """
    same = [
        known
        for known in releases
        if _within(Version(known.number), str(number)) or _within(number, known.number)
    ]
    if same:
        return same[-1], True
    earlier = [known for known in releases if Version(known.number) < number]
    if earlier and number < max(Version(known.number) for known in releases):
        return max(earlier, key=lambda known: Version(known.number)), False
    return (releases[-1] if earlier else releases[0]), False
