"""Small parts of the edges: ids, hashes, settings, keys, the error table, bars."""

import hashlib
import inspect
import re

import pytest

from planner import errors
from planner.api import errors as edge_errors
from planner.api.cli.output import as_text
from planner.api.errors import TABLE, codes_of, lines_of
from planner.api.http.security import is_loopback, refuse_open_door
from planner.api.identity import TimeOrderedIds, hash_of, hash_of_job
from planner.api.render.bars import BarPart, legend, stacked_bar
from planner.api.render.estimate import basis_line, key_figures
from planner.api.render.launch import continued
from planner.api.render.plan import energy, mass, money, plan_view
from planner.api.settings import Settings, load_settings, parse_api_keys
from planner.api.storage.engine import normalise_url
from planner.specs.plan import Plan
from planner.specs.plan_comparisons import SensitivityStep

DIGEST = hashlib.sha256(b"secret").hexdigest()


def test_later_ids_sort_after_earlier_ones_and_none_repeats() -> None:
    ids = [TimeOrderedIds().new_id("plan") for _ in range(2000)]
    assert len(set(ids)) == len(ids)
    assert [i[:14] for i in ids] == sorted(i[:14] for i in ids)


def test_equal_questions_have_equal_hashes() -> None:
    a = {"id": 1, "model": "m", "training": {"x": 1, "y": 2}, "notes": "n"}
    b = {"training": {"y": 2, "x": 1}, "model": "m"}
    assert hash_of_job(a) == hash_of_job(b) != hash_of_job({**b, "model": "n"})
    assert hash_of(b"ab", b"c") != hash_of(b"a", b"bc")


def test_every_error_has_a_row() -> None:
    for module in (errors, edge_errors):
        for _, found in inspect.getmembers(module, inspect.isclass):
            assert not issubclass(found, errors.PlannerError) or {*found.__mro__} & TABLE.keys()
    several = errors.SpecError(
        [errors.Fault("a", "x\ny", "r", "m"), errors.Fault("b", 2, "r", "m\nn")]
    )
    infeasible = errors.InfeasibleError("no", remedy="more")
    for error, status, code in (
        (several, 422, 2),
        (errors.UnknownNameError("f", "v", ["a"], "thing"), 422, 2),
        (infeasible, 409, 3),
        (errors.ProbeError("x"), 502, 4),
        (errors.StoreError("x"), 503, 4),
        (errors.NotFoundError("x"), 404, 2),
    ):
        assert (codes_of(error).status, codes_of(error).exit_code) == (status, code)
    assert lines_of(infeasible) == ["no; more"]
    assert lines_of(several) == ["a='x\\ny': r; m", "b=2: r; m n"]


def test_keys() -> None:
    (one, two) = parse_api_keys(f" ci:read+plan:{DIGEST.upper()},\n boss:admin:{'0' * 64} ")
    assert (one.name, one.may("plan"), one.may("probe")) == ("ci", True, False)
    assert (one.secret_sha256, two.may("probe")) == (DIGEST, True)


@pytest.mark.parametrize("wrong", [
    "x", "x:read:secret", f":read:{DIGEST}", f"x:write:{DIGEST}", f"x::{DIGEST}",
    f"x:read:{DIGEST},x:plan:{DIGEST}"])  # fmt: skip
def test_wrong_keys_are_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(errors.SpecError) as caught:
        parse_api_keys(wrong)
    assert "secret" not in str(caught.value).lower().replace("sha256-of-the-secret", "")
    assert DIGEST not in str(caught.value)


@pytest.mark.parametrize(("host", "inside"), [
    ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False),
])  # fmt: skip
def test_only_loopback_is_open_without_keys(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
    refuse_open_door(Settings(host=host, api_keys=f"a:read:{DIGEST}", database_url="sqlite://"))
    if not inside:
        with pytest.raises(errors.SpecError, match="PLANNER_API_KEYS"):
            refuse_open_door(Settings(host=host, database_url="sqlite://"))


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANNER_DATABASE_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert load_settings().database_url.endswith("planner/planner.db")
    wrong = {"PLANNER_PORT": "99999", "PLANNER_MAX_BODY_BYTES": "none"}
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.SpecError) as caught:
        load_settings()
    assert {fault.field for fault in caught.value.faults} == wrong.keys()


def test_database_urls() -> None:
    for text in ("postgresql://u:pw@h/d", "postgres://u:pw@h/d", "postgresql+psycopg://u:pw@h/d"):
        url = normalise_url(text)
        assert (url.drivername, url.password) == ("postgresql+psycopg", "pw")
    for text in ("mysql://u:hunter2@h/d", "nonsense hunter2", "", "sqlite+aiosqlite:///x"):
        with pytest.raises(errors.SpecError, match=r"^(?!.*hunter2)"):
            normalise_url(text)


def parts(*sizes: float) -> list[BarPart]:
    named = zip("abc", sizes, strict=False)
    return [BarPart(name, name.upper(), size, f"{size:g}") for name, size in named]


@pytest.mark.parametrize(("sizes", "total", "width", "bar"), [
    ((1, 1, 2), 8, 16, "AABBCCCC........"), ((1, 1, 1), 3, 10, "AAABBBBCCC"),
    ((5, 5), 5, 10, "AAAAA|BBBB"), ((), 0, 4, "....")])  # fmt: skip
def test_bars_fill_their_width_and_round_without_drift(
    sizes: tuple[float, ...], total: float, width: int, bar: str
) -> None:
    assert stacked_bar(parts(*sizes), total, width, letters=True).plain == bar


def test_legends_break_between_parts() -> None:
    assert legend(parts(1, 2, 3), 18, letters=True).plain == "A a 1   B b 2\nC c 3"


def test_commands_are_continued_to_be_pasted() -> None:
    words = [f"word{i}" for i in range(12)]
    lines = continued(words, 30)
    assert max(map(len, lines)) <= 30
    assert " ".join(lines).replace("\\", " ").split() == words
    assert all(line.endswith(" \\") for line in lines[:-1])


@pytest.mark.parametrize(("shown", "expected"), [
    (money(2.5), "$2.50"), (money(487_738.2), "$487,738"), (money(1.2e9), "$1,200,000,000"),
    (energy(3.6e6), "1 kWh"), (energy(7.9e11), "219 MWh"), (energy(7.9e12), "2,190 MWh"),
    (mass(97_980_000.0), "98 t"), (mass(900.0), "0.9 kg"),
])  # fmt: skip
def test_money_energy_and_mass(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_plan_says_what_its_run_rests_on(plan: Plan) -> None:
    text = as_text(plan_view(plan, 110, letters=True), 110)
    example = "tokens, an example; training.total_tokens sets yours"
    for words in (example, "GPU-hours at $", "W a GPU", "(the others cannot win)"):
        assert words in text
    assert text.count("compute-bound") == 1


def test_a_utilisation_above_one_is_explained(plan: Plan) -> None:
    estimate = plan.ranked[0].estimate
    for hfu, explained in ((0.7, False), (1.1, True)):
        text = as_text(key_figures(estimate.model_copy(update={"hfu": hfu}), 110), 110)
        assert ("over the bf16 peak" in " ".join(text.split())) == explained


@pytest.mark.parametrize(("learnt", "said"), [
    ("", ""),
    ("+4-b8ce", ", taught by 4 layouts measured in this database"),
    ("+0-b8ce", ", taught by kernels timed in this database"),
])  # fmt: skip
def test_an_answer_says_what_has_taught_it(plan: Plan, learnt: str, said: str) -> None:
    estimate = plan.ranked[0].estimate.model_copy(update={"calibration_id": f"shipped{learnt}"})
    assert basis_line(estimate).plain.endswith(f"calibration shipped{learnt}{said}.")


@pytest.mark.parametrize(("load", "words", "need", "why"), [
    (2.0, "learnt routing", 90.0, "does not fit"), (1.0, "balanced routing", 70.0, "too close"),
])  # fmt: skip
def test_a_plan_of_experts_shows_what_another_routing_does(
    plan: Plan, load: float, words: str, need: float, why: str
) -> None:
    """The step that moves most: the other one is what the numbers take already."""
    first = plan.ranked[0]
    step = SensitivityStep(
        field="training.moe_imbalance", old=1.5, new=load, layout=first.layout, fits=False,
        step_seconds=1.0, step_ratio=1.25, device_bytes=need * 2**30,
    )  # fmt: skip
    same = step.model_copy(update={"new": 1.5, "step_ratio": 1.0})
    shown = plan.model_copy(update={"sensitivity": [*plan.sensitivity, same, step]})
    text = " ".join(as_text(plan_view(shown, 200, letters=True), 200).split())
    tokens = (first.estimate.tokens_per_second_per_gpu or 0.0) / 1.25
    assert f"{words} {tokens:,.0f} tokens/s/GPU" in text
    assert re.search(rf"{need} GiB \({why}.*\) where the busiest expert rank takes {load:g}", text)
    assert "routing" not in as_text(plan_view(plan, 200, letters=True), 200)
