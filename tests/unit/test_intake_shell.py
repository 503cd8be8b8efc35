"""Launch scripts read as text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.intake.trainer_files.shell import read_script


def words(text: str) -> list[list[str]]:
    return [[field.text for field in command] for command in read_script(text).commands]


@pytest.mark.parametrize(("text", "want"), [
    ("run --a 1 \\\n  --b '2 3'  # c\n", [["run", "--a", "1", "--b", "2 3"]]),
    ('A=1; export B="$A x"\nrun $B "$B" ${C:-d} ${A:+e}', [["run", "1", "x", "1 x", "d", "e"]]),
    ("X=(a 'b c' # no\n d)\nX+=(e)\nrun \"${X[@]}\" f", [["run", "a", "b c", "d", "e", "f"]]),
    ('A="--x 1"\nA="$A --y 2"\nA+=" --z"\nrun $A', [["run", "--x", "1", "--y", "2", "--z"]]),
    ('N=4\nM=$((N * 8 / (1 + 1)))\nrun $M $(nproc) `id` "$@" $1', [["run", "16"]]),
    ("if [ $A = 1 ]; then\n run a\nelse\n run b\nfi", [["run", "b"]]),
    ("P=2\nif [[ $P -gt 1 ]]; then run a; elif true; then run c; fi; run d",
        [["run", "a"], ["run", "d"]]),
    ("case $x in\n a) run a;;\nesac\nrun b > log 2>&1 | tee x", [["run", "b"], ["tee", "x"]]),
    ("cat <<EOF\nrun $a\nEOF\nE=5 srun run $E", [["cat"], ["srun", "run", "5"]]),
    ("for i in 3 4; do run $i; done", [["run", "3"]]),
    ("if [ a = b ]; then X=1; else X=2; fi; run $X", [["run", "2"]]),
    ("X=1;[ a = b ] && X=2\n[ a = b ] || Y=3; run $X $Y", [["run", "1", "3"]]),
    ("[ a = b ] && { X=1; run a; }\nrun b $X", [["run", "b"]]),
    ("if [ a = a ] && [ 1 -gt 2 ]; then run a; elif [[ a == b || c == c* ]]; then run b; fi",
        [["run", "b"]]),
    ("M=8B; case $M in 7B) run a;; 1B|8*) run b\n run c;; *) run d;; esac; run e",
        [["run", "b"], ["run", "c"], ["run", "e"]]),
    ('C="run --a 1 \\\n --b"; srun -N 2 bash -xc "X=1 $C \\$Q"; eval $C 2 > log',
        [["srun", "-N", "2", "run", "--a", "1", "--b"], ["run", "--a", "1", "--b", "2"]]),
    ('C="run ${1:-4} $2"\nsbatch <<EOF\n#SBATCH --nodes=2\nsh -c "$C"\nEOF', [["run", "4"]]),
    ('for C in "1,2" "3,4"; do IFS="," read -r A B <<< "$C"; run $B; done', [["run", "2"]]),
    ('run --a="b c" --d=$Z\\\n-e', [["run", "--a=b c", "--d=-e"]]),
])  # fmt: skip
def test_words_of_commands(text: str, want: list[list[str]]) -> None:
    assert words(text) == want


@pytest.mark.parametrize("holds", list(itertools.product("01", repeat=3)), ids="".join)
@pytest.mark.parametrize("outer", ["1", "0"], ids=["read", "skipped"])
def test_of_if_elif_else_the_first_that_holds_is_read(holds: tuple[str, ...], outer: str) -> None:
    named = list(zip(holds, "abc", strict=True))
    tests = " elif ".join(f"[ {one} = 1 ]; then run {name};" for one, name in named)
    text = f"if [ {outer} = 1 ]; then if {tests} else run d; fi; run e; else run f; fi; run g"
    first = next((name for one, name in named if one == "1"), "d")
    inside = [["run", first], ["run", "e"]] if outer == "1" else [["run", "f"]]
    assert words(text) == words(text.replace(";", "\n")) == [*inside, ["run", "g"]]


def test_slurm_sets_its_own_variables_and_what_nobody_sets_is_named() -> None:
    text = "#SBATCH --nodes=4 --gres=gpu:h100:8\nrun $SLURM_NNODES $SLURM_GPUS_ON_NODE $MINE"
    assert (words(text), read_script(text).unset) == ([["run", "4", "8"]], ["MINE"])


def test_a_file_that_reads_itself_in_is_read_once() -> None:
    found = read_script(". a.sh; source b.sh; run $A", {"b.sh": "A=1; source b.sh"})
    assert (found.commands[0][1].text, found.sourced) == ("1", ["a.sh", "b.sh"])


def test_only_branches_that_a_running_shell_might_take_are_named() -> None:
    text = "A=1; if [ $A = 2 ]; then run --a; fi; if [ -f x ]; then run --b; fi; "
    assert read_script(f"{text}[ $Z = 1 ] && X=--c").skipped == ["run --b", "--c"]


def test_every_word_knows_where_it_stands() -> None:
    text = "TP=8\nARGS=(--tp ${TP} --name 'x')\nrun ${ARGS[@]} -v"
    fields = read_script(text).commands[0]
    spans = [text[slice(*field.span)] for field in fields if field.span is not None]
    assert spans == ["run", "--tp", "8", "--name", "x", "-v"]
    assert text.index("8") == (fields[2].span or (0, 0))[0]
    assert text[slice(*(fields[2].reference or (0, 0)))] == "${TP}"


@pytest.mark.parametrize("text", [
    "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60, "A=(b c)\n" + "A=(${A[@]} ${A[@]})\n" * 60,
    "${a:-" * 1000 + "}" * 1000, "x" * 300_000,
])  # fmt: skip
def test_a_script_that_grows_without_end_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        read_script(text)


@settings(max_examples=300)
@given(st.text(alphabet="ab =$\"'\\{}()[]#;|&<>\n-1@:+`!", max_size=60))
def test_any_text_ends(text: str) -> None:
    for field in itertools.chain(*read_script(text).commands):
        assert field.span is None or text[slice(*field.span)] == field.text
