"""What tests of this ring share: the command line in their own process, and what is refused."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from planner.api.cli.root import run
from planner.errors import Fault, SpecError


class Told(NamedTuple):
    """What a command printed, and what it complained of."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Say = Callable[..., Told]


def faults_of(read: Callable[..., object], *given: Any, **named: Any) -> list[Fault]:
    """Faults for which these arguments are refused. Each has a rule, and what would pass."""
    with pytest.raises(SpecError) as caught:
        read(*given, **named)
    assert all(fault.rule and fault.remedy for fault in caught.value.faults)
    return [*caught.value.faults]


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Runs a command on a database of the test's own. code: what it ends with."""
    monkeypatch.setenv("PLANNER_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("PLANNER_DEBUG", raising=False)

    def told(*arguments: object, code: int = 0) -> Told:
        ended, found = run([*map(str, arguments)]), Told(*capsys.readouterr())
        assert ended == code, found
        return found

    return told
