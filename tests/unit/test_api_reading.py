"""Reading what people typed: every kind of broken file has one clear error."""

from pathlib import Path

import pytest

from planner.api.input.text import MAX_FILE_BYTES, read_json, read_mapping_file, read_yaml
from planner.errors import SpecError


@pytest.mark.parametrize("number", [".inf", ".nan"])
@pytest.mark.parametrize("within", ["", "sweep."])
def test_what_is_no_number_is_named_in_its_file(number: str, within: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"budget: {{max_gpu_seconds: {number}}}".encode())
    with pytest.raises(SpecError) as caught:
        read_mapping_file(path, "FILE", within)
    assert caught.value.faults[0].field == f"{within}budget.max_gpu_seconds"


def written(folder: Path, content: bytes) -> str:
    path = folder / "job.yaml"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(("text", "rule"), [
    ("{", "not valid YAML"), ("a: 1\na: 2", "given twice"), ("a: .nan", "finite"),
    ("a: -.inf", "finite"), ("a: &x [*x]", "nested deeper"), ("[" * 100_000, "nested deeper"),
    ("- " * 1000, "nested deeper"), ("a: !!python/object:os.system x", "not valid YAML"),
    ("a: !!set {b}", "plain value"), ("a: !!binary aGk=", "plain value"),
    ("a: 1" + "0" * 5000, "cannot be read"), ('a: "\\ud800"', "Unicode"),
    ("a: \x00", "not valid YAML"), ('a: "\\e[31m"', "control character"),
    ('"\\u202e": 1', "control character"),
    ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3", "given twice in line 5"),
    ("--- 1\n--- 2", "not valid YAML"),
])  # fmt: skip
def test_bad_yaml(text: str, rule: str) -> None:
    with pytest.raises(SpecError, match=rule) as caught:
        read_yaml(text, "job")
    assert len(str(caught.value)) < 400


def test_good_yaml() -> None:
    text = "date: 2024-12-26\nn: 8\nflag: true\nbase: &b {x: 1}\n"
    text += "other: {<<: *b, y: 2}\nname: llama3-8b\n"
    plain = {"date": "2024-12-26", "n": 8, "flag": True, "name": "llama3-8b"}
    assert read_yaml(text, "job") == {**plain, "base": {"x": 1}, "other": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", [
    "", "{", "NaN", '{"a": Infinity}', '{"a": 1e999}', "[" * 100_000, "[" * 66 + "]" * 66, b"\xff",
    '"\\udead"', "9" * 5000, '{"a": 1, "b": {"c": 1, "c": 1}}', '"\\u0000"', '{"\\u001b[2J": 1}',
    '{"a": "\\u0007"}', '{"a\x9f": 1}', "[" + "1," * 200_000 + "1]",
])  # fmt: skip
def test_bad_json(text: str | bytes) -> None:
    for written in (text, text.encode() if isinstance(text, str) else text):
        with pytest.raises(SpecError):
            read_json(written, "body")


@pytest.mark.parametrize(("content", "rule"), [
    (b"\xff\xfe\x00", "not UTF-8"), (b"", "holds nothing"), (b"[1]", "not a mapping"),
    (b"x" * (MAX_FILE_BYTES + 1), "larger than 10 MB"), (b"a: [1", "^--job='/.*is not valid YAML"),
])  # fmt: skip
def test_bad_files(tmp_path: Path, content: bytes, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        read_mapping_file(written(tmp_path, content), "--job")


def test_text_of_several_lines_is_plain() -> None:
    assert read_json('{"notes": "a\\n\\tb, 模型"}', "body") == {"notes": "a\n\tb, 模型"}


@pytest.mark.parametrize(("path", "rule"), [
    ("\0", "."), ("x" * 5000, "."), ("~nobody-of-this-name/x", "."), ("none.yaml", "no such file"),
    ("/", "is a directory")])  # fmt: skip
def test_impossible_paths(path: str, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        read_mapping_file(path, "--job")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + b'{"a": 1}')
    assert read_mapping_file(path, "--job") == {"a": 1}
