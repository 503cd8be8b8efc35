"""Texts and numbers that were made to break a reader: one clear error each."""

import re
from pathlib import Path
from typing import Any

import pytest

from planner.api.cli.output import error_line, say
from planner.api.input.measurement_rows import csv_rows
from planner.api.input.text import read_json, read_yaml
from planner.api.render.grid import Column, grid
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.intake.machines import load_gpu, read_gpu
from planner.intake.models import read_model
from planner.probes.pools import backend_of
from tests.conftest import ROOT, job_values

HUGE = 10**400
JOB: dict[str, Any] = job_values("llama3-8b", "h100-sxm-80gb", 8, 8192, 16)
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("number", [HUGE, -HUGE], ids=["huge", "minus"])
@pytest.mark.parametrize(
    "where", ["power_limit", "mtbf_gpu_hours", "memory_fraction", "num_gpus", "pcie_bandwidth"]
)
def test_a_number_beyond_all_floats_is_a_fault_of_its_field(where: str, number: int) -> None:
    with pytest.raises(SpecError) as raised:
        read_job({**JOB, "cluster": {**JOB["cluster"], where: number}})
    assert [fault.field for fault in raised.value.faults] == [f"cluster.{where}"]


def test_so_is_one_of_a_model_or_in_a_text() -> None:
    for key in ("rope_theta", "hidden_size"):
        with pytest.raises(SpecError, match=r"model\."):
            read_job({**JOB, "model": {"base": "llama3-8b", key: HUGE}})
    for read, text in ((read_json, f'{{"notes": {HUGE}}}'), (read_yaml, f"notes: {HUGE}")):
        with pytest.raises(SpecError, match="is a whole number of 1,329 bits"):
            read(text, "--job")
    assert read_json(f'{{"notes": "{HUGE}"}}', "body")["notes"] == str(HUGE), "text is text"


def test_lines_of_csv_may_end_in_any_way() -> None:
    for end in ("\n", "\r\n", "\r"):
        found = [row for _, row in csv_rows(end.join(["id,notes", "a,1", "b,2", ""]))]
        assert found == [{"id": "a", "notes": 1}, {"id": "b", "notes": 2}]


@pytest.mark.parametrize(("text", "rule"), [
    (f"a\n{'[' * 100_000}\n", "line 2 a is nested deeper than 64 levels"),
    ('a\n"unclosed', "is not CSV"),
    ('a\n"closed"and more\n', "is not CSV"),
    ("a,b\n1\n", "has other columns than the header"),
    ("a,b\n1,2,3\n", "has other columns than the header"),
])  # fmt: skip
def test_csv_that_is_none_says_where(text: str, rule: str) -> None:
    with pytest.raises(SpecError) as raised:
        list(csv_rows(text))
    assert rule in str(raised.value)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds more than 200,000 values"):
        read_yaml(LAUGHS, "--job")
    for text in (LAUGHS, "gpu: &a [*a]\n"):
        file = tmp_path / "cluster.yaml"
        file.write_text(f"{text}num_gpus: 8\n")
        with pytest.raises(SpecError, match="what aliases repeat included"):
            read_job({**JOB, "cluster": str(file)})


def test_nothing_that_a_user_sends_is_unpickled_or_run() -> None:
    """The service's own processes pass each other pickles; no file or body is read as one."""
    patterns = (
        r"\btorch\.load\((?!.*weights_only=True)", r"\bpickle\b", r"trust_remote_code\s*=\s*True",
        r"\byaml\.(?:unsafe_load|full_load)\b",
        r"\byaml\.load\([^)]*Loader=yaml\.(?:Unsafe|Full)?Loader", r"\beval\(|\bexec\(",
        r"shell\s*=\s*True",
    )  # fmt: skip
    files = [path for room in ("planner", "api", "probes") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 300
    found = [
        f"{path}: {hit[0]}"
        for path in files
        for pattern in patterns
        if (hit := re.search(pattern, path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "./config.json", "~/x.json"])
@pytest.mark.parametrize("part", ["model", "cluster"])
def test_no_path_of_a_request_opens(path: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def opened(self: Path, *given: Any, **named: Any) -> str:
        assert self.is_relative_to(ROOT), f"{self} was opened"  # the catalogue's own
        return read_text(self, *given, **named)

    monkeypatch.setattr(Path, "read_text", opened)
    with pytest.raises(SpecError):
        read_job({**JOB, part: path}, allow_files=False)


def test_a_name_does_not_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for write in (say, error_line):
        write("a\x1b[2Jb\rc\u202ed\te")
    out, err = capsys.readouterr()
    assert (out, err) == ("a\\x1b[2Jb\\rc\\u202ed\te\n", f"error: {out}")


@pytest.mark.parametrize("name", ["a\nplan-1  x", "a\tb", "a\u2028b", "a\u200bb"])
def test_a_name_is_one_line_of_printable_text(name: str) -> None:
    figures = load_gpu("h100-sxm-80gb").model_dump(exclude={"aliases"})
    model = {"base": "llama3-8b", "name": name}
    for read, value in (
        (read_gpu, {**figures, "name": name}),
        (read_model, model),
        (backend_of, f"slurm:{name}"),
    ):
        with pytest.raises(SpecError):
            read(value)
    assert len(str(grid([Column(name="model")], [(name,)], 80)).splitlines()) == 3
