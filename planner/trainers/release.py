"""A trainer's release, parsed once: what a person writes, and which known release it stands for.

People write a number ("0.2.2", "v0.3.0", "core_v0.14.0"), a date or a month ("2025-11-04", "2023"),
a commit, or a distribution ("NeMo 25.04"), and beside it the releases of other libraries
("6fc499f6 / torch 2.9.0.dev20250815"). Rules need a release that we know. For an unknown number it
is the newest before it, for a date the newest before that day, for anything else the default.
`Release.note` says where it is not the release that was written.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from packaging.version import InvalidVersion, Version

NEMO, GRAPH_TRAINER, LLM_FOUNDRY = "NeMo", "graph_trainer", "llm-foundry"
# the first word by which people name it, which mosaicml publishes
_LLM_FOUNDRY = (LLM_FOUNDRY, "composer", "mosaic")
CENTURY = "20"

_NUMBER = re.compile(
    r"(?:[a-z]+(?:[-_ ](?:lm|core))?[-_ ]+)?(?:core[-_ ])?v?(\d+\.\d[\w.+]*)", re.I
)
_WHOLE = re.compile(r"v?(\d{1,3})")
_ERA = re.compile(r"(\d+\.\d+)-era")
# a nightly build, whose number is that of the release to come: "0.3.0.dev20260601"
_NIGHTLY = re.compile(r"\.dev(20\d\d)(\d\d)(\d\d)")
_PARTS = re.compile(r"\s*[/,;]\s*|\s+\+\s+|\s*[()]\s*")
_LIBRARY = re.compile(
    r"(?:py)?torch(?:ao|vision|audio)?\b|te\b|transformer[-_ ]?engine|triton|cuda|cudnn|nccl|rocm"
    r"|flash[-_ ]?attn|apex|python|deep[-_ ]?ep\b|ngc\b",
    re.I,
)
_FIRST_YEAR = 2000  # "2025.08" is a month, no release
_MONTH = re.compile(r"(?<![\w.])20\d\d(-\d\d)?(?![\da-f])")  # not within a commit, not .dev20251001
_DAY = re.compile(r"20\d\d-\d\d-\d\d")
_DISTRIBUTED = re.compile(r"\d\d\.\d\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A release that the rules know.

    day: when it came out; only the month where we know no more.
    """

    number: str
    day: str


UNRELEASED = Known(number="0", day="")
"""For a trainer whose releases do not matter: users run its repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRelease:
    """Release that a text names; each part is "" or None where it names none.

    number: a release. A part of the text that starts with another library's name has none.
    day: YYYY-MM-DD, often that of a commit; the trainer's own where there are several, else that of
        a nightly build.
    month: YYYY-MM or YYYY.
    distribution: a program that ships the trainer with defaults of its own: NeMo, whose numbers are
        its own, or TorchTitan's graph_trainer.
    """

    text: str
    number: Version | None
    day: str
    month: str
    distribution: str

    @property
    def year(self) -> str:
        """The year that the text starts with; "" where it starts with anything else."""
        return self.text[:4] if _MONTH.match(self.text) else ""

    @property
    def launches_block(self) -> bool:
        """Whether every kernel launch of the run waited for its kernel."""
        return "CUDA_LAUNCH_BLOCKING=1" in self.text

    def names_fork(self, repository: str) -> bool:
        """Whether the text names a fork, by the first word of its repository ("owner/word-...")."""
        word = repository.partition("/")[2].partition("-")[0]
        return bool(word) and word in self.text.lower()

    @property
    def when(self) -> str:
        """The day, else the month, for a text that names no release; "" for any other."""
        return "" if self.number is not None else self.day or self.month

    def not_before_month(self, month: str) -> bool:
        """False where it names a month before this one (YYYY-MM)."""
        return not self.month or self.month >= month


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The release whose rules apply to a job.

    exact: whether it is the release, or in the line, that was written.
    history: every known release of the trainer, oldest first.
    """

    trainer: str
    named: NamedRelease
    known: Known
    exact: bool
    history: tuple[Known, ...]

    @property
    def number(self) -> str:
        """As its makers write it: "0.2.2"."""
        return self.known.number

    @property
    def line(self) -> str:
        """Line of releases that this one belongs to: "0.2"."""
        return ".".join(self.number.split(".")[:2])

    def since(self, number: str) -> bool:
        """Whether it is this release or a later one.

        Raises ValueError for a number that is not known.
        """
        return self._place(self.known.number) >= self._place(number)

    def before(self, number: str) -> bool:
        """Whether it is earlier than this release.

        Raises ValueError for a number that is not known.
        """
        return not self.since(number)

    def not_after(self, number: str, month: str) -> bool:
        """Whether it is known to be of this release or month (YYYY-MM), or earlier.

        A date that was written outranks a number.
        """
        if len(self.named.month) > len("2025"):
            return self.named.month <= month
        return self.named.number is not None and _parsed(self.number) <= _parsed(number)

    def _place(self, number: str) -> int:
        """Index in order of time, where Megatron's 3.0 comes before its 0.2.

        A line counts from its first release.
        """
        found = (
            index
            for index, known in enumerate(self.history)
            if _within(_parsed(known.number), number)
        )
        index = next(found, None)
        if index is None:
            raise ValueError(f"{number} is no known release of {self.trainer}")
        return index

    @property
    def note(self) -> str | None:
        """A sentence on the release used in place of the named one; None where they agree."""
        if self.exact:
            return None
        oldest = self.known is self.history[0] and "the oldest that we know"
        newest = self.known is self.history[-1] and "the newest that we know"
        if self.named.distribution or self.named.when:
            which = oldest or newest or "the newest by then"
        else:
            which = (
                (oldest or newest or "the newest before it") if self.named.number else "its default"
            )
        return (
            f"training.trainer_version {self.named.text!r} is no release of {self.trainer} that we "
            f"know: the rules of {self.number} ({self.known.day}), {which}, are taken"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """A range of releases: from `since` on and before `before`; "" for no limit.

    distribution: only the program of this name that ships the trainer; "" for all.
    library: only where the text names it beside the trainer; "" for all.
    since_day, before_day: the day on which the trainer's repository changed, which is before that
        release came out. A text that names a date, and no release, is compared with it.
    """

    since: str = ""
    before: str = ""
    distribution: str = ""
    since_day: str = ""
    before_day: str = ""
    library: str = ""

    def hold(self, release: Release) -> bool:
        if self.distribution and release.named.distribution != self.distribution:
            return False
        if self.library not in release.named.text.lower():
            return False
        return _reached(release, self.since, self.since_day, default=True) and not _reached(
            release, self.before, self.before_day, default=False
        )


def _reached(release: Release, number: str, day: str, *, default: bool) -> bool:
    """Whether the release has come to this number or day; `default` where neither is given.

    A month counts as its last day.
    """
    when = release.named.when
    if day and when:
        return day[: len(when)] <= when
    return release.since(number) if number else default


@lru_cache(maxsize=1024)
def _parsed(number: str) -> Version:
    """A version number. Raises InvalidVersion."""
    return Version(number)


def _within(release: Version, line: str) -> bool:
    """Whether a release belongs to a line, or is exactly that release."""
    wanted = _parsed(line).release
    return release.release[: len(wanted)] == wanted


@lru_cache(maxsize=1024)
def named(text: str | None) -> NamedRelease:
    """Release that a `trainer_version` names; every part is empty for None."""
    text = (text or "").strip()
    distribution = NEMO if text.startswith(NEMO) else ""
    if re.search(r"graph[-_ ]?trainer", text, re.I):
        distribution = GRAPH_TRAINER
    elif text.lower().startswith(_LLM_FOUNDRY):
        distribution = LLM_FOUNDRY
    own = [part for part in _PARTS.split(text) if not _LIBRARY.match(part)]
    number = None if distribution == NEMO else _number(own, text)
    day, month = _date(" ".join(own), text)
    if number is not None:
        if number.major >= _FIRST_YEAR:
            month = f"{number.major}-{number.minor:02d}"
            number = None
        elif number.is_devrelease and day:
            number = None  # a nightly build is older than the release whose number it has
    if distribution == NEMO and not month and (short := _DISTRIBUTED.search(text)):
        month = CENTURY + short[0].replace(".", "-")
    return NamedRelease(text=text, number=number, day=day, month=month, distribution=distribution)


def _number(own: list[str], text: str) -> Version | None:
    """The first release among the parts of a text that are about the trainer itself."""
    found = next((found for part in own if (found := _NUMBER.match(part))), None)
    found = found or _ERA.search(text) or _WHOLE.fullmatch(text)
    return None if found is None else _version(found[1])


def _date(own: str, text: str) -> tuple[str, str]:
    """(day, month) that a text names: in the trainer's own parts, else in others.

    Those of a nightly build count where no other date is written.
    """
    where = own if _MONTH.search(own) or _NIGHTLY.search(own) else text
    day, month, nightly = _DAY.search(text), _MONTH.search(where), _NIGHTLY.search(where)
    if month is not None:
        return (_DAY.search(where) or day or [""])[0], month[0]
    return ("-".join(nightly.groups()), "-".join(nightly.groups()[:2])) if nightly else ("", "")


def _version(text: str) -> Version | None:
    try:
        return _parsed(text.rstrip("."))
    except InvalidVersion:
        return None


@lru_cache(maxsize=1024)
def release_in(trainer: str, history: tuple[Known, ...], default: str, text: str | None) -> Release:
    """The release whose rules apply to a job: by number, else by date, else the trainer's default.

    history: the trainer's releases, oldest first; empty where releases do not matter.
    """
    said = named(text)
    if not history:
        return Release(
            trainer=trainer, named=said, known=UNRELEASED, exact=True, history=(UNRELEASED,)
        )
    if said.number is not None:
        known, exact = _numbered(history, _parsed(said.number.base_version))
    elif said.month:
        when = _month_after(said.month) if said.distribution == NEMO else said.when
        earlier = [known for known in history if known.day[: len(when)] <= when]
        known, exact = earlier[-1] if earlier else history[0], False
    else:
        known = next(known for known in history if known.number == default)
        exact = not said.text
    return Release(trainer=trainer, named=said, known=known, exact=exact, history=history)


def _month_after(month: str) -> str:
    """YYYY-MM of the next month: a distribution ships the release that is about to come out.

    NeMo 24.05, 24.07 and 24.09 have Megatron Core 0.7, 0.8 and 0.9, each a month before its tag.
    Source: docs.nvidia.com/nemo-framework/user-guide/24.09/softwarecomponentversions.html.
    """
    year, _, number = month.partition("-")
    return month if not number else f"{int(year) + int(number) // 12}-{int(number) % 12 + 1:02d}"


def _numbered(releases: tuple[Known, ...], number: Version) -> tuple[Known, bool]:
    """(the release of a number, True); (the newest before it, False) where it is not known."""
    same = [
        known
        for known in releases
        if _within(_parsed(known.number), str(number)) or _within(number, known.number)
    ]
    if same:
        return same[-1], True
    earlier = [known for known in releases if _parsed(known.number) < number]
    if earlier and number < max(_parsed(known.number) for known in releases):
        return max(earlier, key=lambda known: _parsed(known.number)), False
    return (releases[-1] if earlier else releases[0]), False


LAST_TORCH_1 = 13


def torch_release(text: str) -> tuple[int, int]:
    """(major, minor) of a release of torch, such as 2.11.0 or 2.11.0a0+nv26.01.

    Raises ValueError "rule; remedy" unless the text starts with one.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", text.strip())
    major, minor = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if major not in (1, 2) or (major == 1 and minor > LAST_TORCH_1):
        raise ValueError(
            f"is no release of torch; use 1.0 to 1.{LAST_TORCH_1} or 2.x, for example 2.11.0"
        )
    return major, minor
