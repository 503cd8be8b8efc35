"""The web page in a real browser, on the real service."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session

from planner.api.jobs.leases import new_lease
from planner.api.render import figures
from planner.api.render.plan import energy, mass, money
from planner.api.settings import Settings
from planner.api.storage.job_records import TaskRecord
from planner.api.storage.tables import PlanRow, SweepRecord
from planner.api.wiring import Wiring, wire
from planner.intake.jobs import read_job
from planner.specs.plan import Plan
from tests.conftest import JOB, ROOT, UNMEASURED_JOB, api_keys, missing, needed
from tests.served import served
from tests.stand_ins.browser import PROGRAM, Browser
from tests.stand_ins.records import task_record

if PROGRAM is None:
    missing("Chromium", "apt-get install chromium")
needed("vl_convert")
needed("fastapi_offline")

FIXED = {"pp": 4, "virtual_stages": 1, "tp": 1, "cp": 1, "dp_replicate": 1}  # few spans: svg
PIPELINE: dict[str, Any] = {**JOB, "search": {"fix": FIXED, "top_k": 3}}
DRAWN = "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg, canvas'))"
LAYOUT = "fsdp 8 · mbs 1"
TEXT = "document.querySelector('textarea')"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A service with something of everything in its database."""

    url: str
    wiring: Wiring
    plan: dict[str, Any]
    pipeline: dict[str, Any]
    unmeasured: dict[str, Any]
    sweep_id: str
    study: TaskRecord

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/{path}", timeout=300.0)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def service(folder: str, **settings: object) -> Iterator[str]:
    """The address of `planner-cli serve`, which leaves studies and probes to others."""
    own = {"task_workers": 0, "probe_workers": 0, **settings}
    with served(f"sqlite:///{folder}/x.db", Path(folder), **own) as running:
        yield running.url


@pytest.fixture(scope="module")
def tab() -> "Iterator[Page]":
    """A browser that is on the service."""
    with tempfile.TemporaryDirectory() as folder, service(folder) as url, closing(Page()) as opened:
        wiring = wire(Settings(database_url=f"sqlite:///{folder}/x.db"))
        plan, pipeline, unmeasured = (
            httpx.post(f"{url}/plan", json=job, timeout=300.0).json()
            for job in (JOB, PIPELINE, UNMEASURED_JOB)
        )
        lines = (ROOT / "benchmarks" / "measured" / "public.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[:6]]
        assert httpx.post(f"{url}/measurements", json=rows).status_code == 201
        plans = {"plan": plan, "pipeline": pipeline, "unmeasured": unmeasured}
        stored = {"sweep_id": stored_sweep(wiring), "study": stored_study(wiring)}
        opened.site = Site(url=url, wiring=wiring, **plans, **stored)
        yield opened


def stored_sweep(wiring: Wiring) -> str:
    """A sweep that ran twice, the second time slower."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    wiring.sweeps.add(SweepRecord(id="sweep-1", created_at=now, name="nightly", spec={"jobs": []}))
    for day, step, change in ((1, 2.0, None), (2, 2.5, 0.25)):
        line = {
            "layout": LAYOUT, "why": "anchor", "predicted_step_seconds": 1.9, "status": "ok",
            "step_seconds": step, "change": change, "message": None,
        }  # fmt: skip
        job = {
            "model": "llama3-8b", "gpu": "l4", "num_gpus": 8, "layouts": [line],
            "winner": LAYOUT, "winner_before": None, "new_winner": False,
        }  # fmt: skip
        headline = f"1 of 1 layout measured on day {day}"
        report = {"headline": headline, "probes": 1, "gpu_seconds": 9.0, "jobs": [job]}
        due = now + timedelta(days=day)
        of = {"kind": "sweep", "parent_id": "sweep-1", "state": "done", "result": report}
        wiring.tasks.add([task_record(id=f"sweep-run-{day}", created_at=due, due_at=due, **of)])
    return "sweep-1"


def stored_study(wiring: Wiring) -> TaskRecord:
    """A study that somebody else runs."""
    record = task_record(id="plan-study", created_at=wiring.clock.now(), request=JOB, job_hash="x")
    lease = replace(new_lease(), seconds=3600.0)  # nobody renews it while the pages are looked at
    return wiring.tasks.add([record], lease=lease)[0]


class Page(Browser):
    """A tab on the service."""

    site: Site

    def go(self, route: str) -> None:
        """Opens a part of the page and waits until all of it is there."""
        self.open(f"{self.site.url}/#/{route}")
        kind = route.partition("/")[0]
        self.wait(f"document.querySelector('main').dataset.shown?.startsWith('{kind}/')")
        self.wait(DRAWN)

    def everywhere(self) -> Iterator[str]:
        """Goes to each part of the page."""
        plans = (self.site.plan, self.site.pipeline, self.site.unmeasured)
        named = [*(plan["id"] for plan in plans), self.site.study.id]
        others = ["plans", "new", "studies", "sweeps", f"sweep/{self.site.sweep_id}", "accuracy"]
        for route in (*(f"plan/{name}" for name in named), *others, "calibrations"):
            self.go(route)
            yield route

    def change(self, find: str, text: str) -> None:
        """Types into the field that a JavaScript expression finds."""
        self.value(
            f"(() => {{ const field = {find}; field.value = {json.dumps(text)};"
            "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def texts(self, selector: str, part: str = "innerText") -> list[str]:
        """Of all elements that it selects."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.value(f"{every}.map(one => one.{part})"))

    def cells(self, table: str) -> list[list[str]]:
        """Texts of a table's body, row by row."""
        rows = f"[...document.querySelectorAll('{table} tbody tr')]"
        return list(self.value(f"{rows}.map(row => [...row.children].map(one => one.innerText))"))


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    with tab as opened:
        opened.look()
        yield opened


# ---- one plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["#/plan/{}", "#{}"])
def test_a_plan_is_shown_by_its_address(page: Page, address: str) -> None:
    plan = page.site.plan
    page.open(f"{page.site.url}/{address.format(plan['id'])}")
    page.wait("document.querySelector('#ranked')")
    rows = page.cells("#ranked")
    assert [row[1] for row in rows] == [entry["label"] for entry in plan["ranked"]]
    assert len({row[1] for row in rows}) == len(rows), "no two layouts read alike"
    for row, entry in zip(rows, plan["ranked"], strict=True):
        assert row[2] == f"{round(entry['estimate']['tokens_per_second_per_gpu']):,}"
        assert row[5] == f"{entry['estimate']['device_bytes'] / 2**30:.1f} GiB"
    shown = page.text("main")
    assert all(reason in shown for reason in plan["ranked"][0]["reasons"])
    assert plan["ranked"][0]["label"] == page.text("h1")
    assert "train.toml" in page.text("#files")


def test_the_energy_of_a_token_is_shown_to_who_wants_little(page: Page) -> None:
    asked = {**JOB, "search": {"objective": "energy"}}
    frugal = httpx.post(f"{page.site.url}/plan", json=asked, timeout=300.0).json()
    page.go(f"plan/{frugal['id']}")
    joules = [f"{entry['run']['joules_per_token']:.3g}" for entry in frugal["ranked"]]
    assert [row[7] for row in page.cells("#ranked")] == joules


NUMBER = re.compile(r"\$?\d[\d,]*(?:\.\d+)?(?: ?(?:%|[TGMK]iB|ms|us|GPUs|kWh|MWh|kg|[sdhtB]\b))?")


def told(value: Any) -> Iterator[float]:
    """Every number of an answer."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from told(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def written(value: float) -> set[str]:
    """All the ways in which a screen may write a number."""
    ways: list[Callable[[Any], str]] = [
        figures.rate, figures.seconds, figures.size, figures.percent, figures.risk, money,
        energy, mass, "{:,.0f}".format, "{:.0%}".format, "{:.2%}".format, "{:g}".format,
    ]  # fmt: skip
    return {found for way in ways for found in NUMBER.findall(way(value))}


@pytest.fixture
def probed(tab: Page) -> dict[str, Any]:
    """A plan whose first two layouts ran, the first more slowly than any interval allows."""
    plan = Plan.model_validate(tab.site.plan)
    ranked = list(plan.ranked)
    for index, slower in ((0, 1.9), (1, 2.3)):
        one = ranked[index]
        step = slower * (one.estimate.step_seconds or 0.0)
        update = {
            "source": "probed", "expected_step_seconds": step,
            "measurement": {"status": "ok", "step_seconds": step, "runs": 1, "rung": "probed"},
        }  # fmt: skip
        ranked[index] = one.model_copy(update=update)
    ident = f"{plan.id[:-1]}{'0' if plan.id[-1] != '0' else '1'}"
    found = plan.model_copy(update={"id": ident, "ranked": ranked})
    tab.site.wiring.store.save_plan(found, read_job(JOB))
    return tab.site.get(f"plans/{ident}")


def test_every_number_of_a_probed_plan_is_the_answers(page: Page, probed: dict[str, Any]) -> None:
    """What is measured is shown wherever the table shows it, with no interval of a prediction."""
    page.go(f"plan/{probed['id']}")
    page.wait("document.querySelector('#compared table')")
    known = {text for value in told(probed) for text in written(value)}
    for one in probed["ranked"]:
        shown = one["shown"]
        for end in shown["step_interval"] or ():
            work = shown["tokens_per_second_per_gpu"] * shown["step_seconds"]
            known |= written(work / end)
    places = ":is(.cards, #ranked, #compared table, #communication)"
    found = page.texts(f"{places} :is(td, th, dd, dt, p, small, strong)")
    assert len(found) > 100
    numbers = {text for cell in found for text in NUMBER.findall(cell)}
    labels = " ".join(one["label"] for one in probed["ranked"])
    fields = " ".join(str(value) for one in probed["ranked"] for value in one["layout"].values())
    assert not {text for text in numbers - known if text.split()[0] not in f"{labels} {fields}"}
    first = probed["ranked"][0]
    cards = page.text(".cards")
    assert f"predicted {figures.seconds(first['estimate']['step_seconds'])}" in cards
    assert figures.seconds(first["estimate"]["interval"]["step_seconds"][1]) not in cards
    compared = {row[0]: row[1:] for row in page.cells("#compared table")}
    steps = [figures.seconds(one["expected_step_seconds"]) for one in probed["ranked"][:2]]
    assert compared["step"] == steps


def test_charts_draw_what_the_api_says(page: Page) -> None:
    page.go(f"plan/{page.site.plan['id']}")
    pareto, memory, time = (
        page.site.get(f"plans/{page.site.plan['id']}/charts/{kind}")["datasets"]
        for kind in ("pareto", "memory", "time")
    )

    def drawn(place: int, mark: str) -> list[str]:
        figure = f"document.querySelectorAll('figure')[{place}]"
        return page.value(
            f"[...{figure}.querySelectorAll('.mark-{mark}')].map(one => one.textContent)"
        )

    assert len(drawn(0, "symbol.role-mark path")) == len(pareto["points"])
    numbers = {str(entry["rank"]) for entry in page.site.plan["ranked"]}
    assert numbers <= set(drawn(0, "text.role-mark text"))
    for place, bars in ((1, memory), (2, time)):
        assert len(drawn(place, "rect.role-mark path")) == len(bars["parts"])
    assert page.messages == []


def test_a_pipeline_is_drawn_in_time(page: Page) -> None:
    page.go(f"plan/{page.site.pipeline['id']}")
    page.wait("document.querySelector('#timeline svg')")
    ranks = [entry["rank"] for entry in page.site.pipeline["ranked"] if entry["layout"]["pp"] > 1]
    spec = page.site.get(f"plans/{page.site.pipeline['id']}/charts/timeline?rank={ranks[0]}")
    drawn = page.texts("#timeline .mark-rect.role-mark path")
    assert len(drawn) == len(spec["datasets"]["spans"]) > 0


def test_any_two_layouts_are_compared(page: Page) -> None:
    page.go(f"plan/{page.site.plan['id']}")
    page.wait("document.querySelector('#compared table')")
    page.change("document.querySelectorAll('.row select')[1]", "3")
    page.wait("document.querySelector('#compared th:nth-child(3)').innerText === '#3'")
    explained = page.site.get(f"plans/{page.site.plan['id']}/explain?rank=3&versus=1")
    marked = page.texts("#compared tr.differs th")
    assert marked == [*explained["changed"]]
    assert marked, "two ranked layouts differ"
    assert all(line in page.text("#compared") for line in explained["lines"][2:])


def test_what_number_1_rests_on_stands_under_it(page: Page) -> None:
    page.go(f"plan/{page.site.unmeasured['id']}")
    assert f"It {page.site.unmeasured['rests_on']}." in page.text("#resting")
    assert page.cells("#ranked")[0][0] == "1*"


def test_an_unknown_plan_is_said(page: Page) -> None:
    page.go("plan/plan-nope")
    assert "no plan of id 'plan-nope'" in page.text("main")


# ---- the other views -----------------------------------------------------------------------------


def test_accuracy_shows_every_measured_run(page: Page) -> None:
    page.go("accuracy")
    found = page.site.get("accuracy")
    drawn = page.texts(".chart .mark-symbol.role-mark path")
    assert len(drawn) == len(page.cells("main")) == len(found["runs"]) > 3
    assert f"{found['within_band']} of {len(found['runs'])} runs" in page.text("main")
    for run in found["runs"]:
        assert run["error"] == pytest.approx(run["predicted_seconds"] / run["measured_seconds"] - 1)


def test_a_sweep_is_shown_over_time(page: Page) -> None:
    page.go("sweeps")
    assert "nightly" in page.text("main")
    page.go(f"sweep/{page.site.sweep_id}")
    shown = page.text("main")
    assert "measured on day 1" in shown
    assert "+25.0%" in shown
    spec = page.site.get(f"sweeps/{page.site.sweep_id}/chart")
    assert [row["relative"] for row in spec["datasets"]["points"]] == [1.0, 1.25]


def test_calibrations_are_listed(page: Page) -> None:
    page.go("calibrations")
    items = page.site.get("calibrations")["items"]
    assert [row[0] for row in page.cells("main > table")] == [item["id"] for item in items]


def test_a_study_is_followed_as_it_goes(page: Page) -> None:
    tasks = page.site.wiring.tasks
    page.go("studies")
    assert page.site.study.id in page.text("main")
    page.go(f"plan/{page.site.study.id}")
    body = {
        "event": "told", "layout": LAYOUT, "message": "measured 1.23 s", "probes": 1,
        "probes_left": 4, "best_step_seconds": 1.23, "expected_regret": 0.05,
        "gpu_seconds_left": 100.0,
        "gpu_seconds": 10.0, "best_rung": "probed",
    }  # fmt: skip
    tasks.add_event(page.site.study, body, page.site.wiring.clock.now())
    page.wait("document.querySelector('main').innerText.includes('measured 1.23 s')")
    assert "1 of 5" in page.text("main")
    page.wait("document.querySelector('.chart svg')")
    page.value("[...document.querySelectorAll('main button')].at(-1).click()")
    for _ in range(200):
        if not tasks.get(page.site.study.id).cancel_requested:
            page.value("new Promise(done => setTimeout(done, 50))")
    assert tasks.get(page.site.study.id).cancel_requested


def test_of_ten_thousand_plans_a_page_is_loaded_at_a_time(page: Page) -> None:
    old = datetime(2020, 1, 1, tzinfo=UTC)
    with Session(page.site.wiring.engine.execution_options(planner_writes=True)) as session:
        session.execute(
            PlanRow.__table__.insert(),
            [
                {
                    "id": f"plan-old-{number:05}", "created_at": old + timedelta(seconds=number),
                    "job_hash": "x", "model": "llama3-8b", "gpu": "l4", "num_gpus": 8,
                    "layout": LAYOUT, "tokens_per_second_per_gpu": 1.0, "status": "done",
                    "seed": 0, "model_version": "0", "calibration_id": "x", "body": {},
                }
                for number in range(10_000)
            ],
        )  # fmt: skip
        session.commit()
    page.go("plans")
    assert len(page.cells("main")) == 50
    assert page.site.plan["id"] in page.text("main"), "the newest come first"
    page.value("document.querySelector('main > button').click()")
    page.wait("document.querySelectorAll('main tbody tr').length === 100")
    assert len({row[-1] for row in page.cells("main")}) == 100
    lists = [url for url in page.requests if "/plans?" in url]
    assert len(lists) == 2, "only what is shown was asked for"


# ---- a new plan ----------------------------------------------------------------------------------


def test_every_field_of_a_job_can_be_given(page: Page) -> None:
    page.go("new")
    named = page.value(
        "[...document.querySelectorAll('details .fields')].map(part =>"
        "[...part.querySelectorAll('label')].map(label => label.firstChild.textContent))"
    )
    expected = []
    for part, shape in page.site.get("jobs/schema")["properties"].items():
        if part != "id":
            either = shape.get("anyOf", ())
            mapping = next((one for one in either if one["type"] == "object"), shape)
            own = [part] if either else []
            expected.append([name.replace("_", " ") for name in (*own, *mapping["properties"])])
    assert named == expected


def test_the_form_plans_and_the_address_is_that_of_the_plan(page: Page) -> None:
    page.go("new")
    for name, typed in (("num gpus", "8"), ("global batch size", "64")):
        labels = "[...document.querySelectorAll('form label')]"
        chosen = f"{labels}.find(label => label.firstChild.textContent === '{name}')"
        page.change(f"{chosen}.querySelector('input')", typed)
    job = json.loads(page.value(f"{TEXT}.value"))
    assert job["cluster"]["num_gpus"] == 8, "the text follows the form"
    page.value("document.querySelector('button.main').click()")
    page.wait("location.hash.startsWith('#/plan/') && document.querySelector('#ranked')")
    plan = page.site.get(f"plans/{page.value('location.hash').rpartition('/')[2]}")
    assert plan["job"]["training"] == {"seq_len": 8192, "global_batch_size": 64}
    assert [row[1] for row in page.cells("#ranked")] == [one["label"] for one in plan["ranked"]]


def test_a_job_in_yaml_and_a_trainers_file_are_read(page: Page) -> None:
    page.go("new")
    page.change(TEXT, "model: mixtral-8x7b\ncluster: {gpu: l4, num_gpus: 16}\n"
                          "training: {seq_len: 4k, global_batch_size: 32}\n")  # fmt: skip
    page.wait("document.querySelector('#job input').value === 'mixtral-8x7b'")
    page.change(TEXT, '[training]\nseq_len = 4096\n[model]\nname = "llama3"\nflavor = "8B"\n')
    page.wait("document.querySelector('#status').innerText.includes('torchtitan-toml')")
    job = json.loads(page.value(f"{TEXT}.value"))
    assert job["current"]["format"] == "torchtitan-toml"
    assert job["cluster"] == {"gpu": "l4", "num_gpus": 16}, "what was said before stays"


def test_what_is_wrong_is_said_beside_the_form(page: Page) -> None:
    page.go("new")
    page.change(TEXT, json.dumps({**JOB, "cluster": {"gpu": "h1000", "num_gpus": 8}}))
    page.value("document.querySelector('button.main').click()")
    page.wait("document.querySelector('[role=alert]').innerText.includes('h1000')")
    assert "cluster.gpu" in page.text("[role=alert]")


def test_where_there_are_keys_the_page_asks_for_one(page: Page, tmp_path: Path) -> None:
    with service(str(tmp_path), api_keys=api_keys({"reader": "read"})) as url:
        page.open(f"{url}/#/sweeps")
        page.wait("document.querySelector('h1').innerText === 'This service has keys'")
        page.change("document.querySelector('#key input')", "reader")
        page.wait("document.querySelector('h1').innerText === 'Sweeps'")
        page.open(f"{url}/#/studies")
        page.wait("document.querySelector('h1').innerText === 'Studies'")


# ---- for everyone --------------------------------------------------------------------------------


def test_nothing_is_asked_of_another_host_and_no_script_fails(page: Page) -> None:
    assert len(list(page.everywhere())) == 11
    page.open(f"{page.site.url}/docs")
    page.wait("document.querySelectorAll('.opblock').length > 20")
    outside = [url for url in page.requests
               if not url.startswith((f"{page.site.url}/", "data:", "about:"))]  # fmt: skip
    assert len(page.requests) > 30
    assert outside == []
    assert page.messages == [], "neither an exception nor a breach of the policy"


LUMINANCE = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll('main *')]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
      && !e.closest('svg, option') && e.checkVisibility())
    .map((e) => { const [a, b] = [light(parts(getComputedStyle(e).color)), light(ground(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 80)]; })
    .filter(([ratio]) => ratio < 4.5);
})()"""
# how many of a page's elements there are that a screen reader cannot name
UNNAMED = {
    "input, select, textarea": "!e.labels.length",
    "table": "!e.caption?.textContent",
    "thead th": "e.scope !== 'col'",
    "[role=img]": "!e.ariaLabel",
}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_is_read_at_any_width_in_both_schemes_and_by_a_screen_reader(
    page: Page, width: int, dark: bool
) -> None:
    """Contrast of at least 4.5:1. Source: WCAG 2.2, success criterion 1.4.3."""
    page.look(width=width, dark=dark)
    for route in page.everywhere():
        wide = page.value("document.documentElement.scrollWidth")
        assert wide <= width, f"{route} is {wide} wide and scrolls sideways"
        assert page.value(LUMINANCE) == [], route
        levels = [int(name[1]) for name in page.texts("h1, h2, h3", "tagName")]
        assert levels.count(1) == 1, route
        assert all(after - before <= 1 for before, after in pairwise(levels))
        for chosen, lacks in UNNAMED.items():
            every = f"[...document.querySelectorAll('{chosen}')]"
            assert page.value(f"{every}.filter(e => {lacks}).length") == 0, (route, chosen)
        assert page.value("document.activeElement.tagName") in ("MAIN", "BODY")
        assert len(page.texts("nav [aria-current]")) == 1, route
    page.go(f"plan/{page.site.plan['id']}")
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    ink = page.value("getComputedStyle(document.querySelector('.role-axis-label text')).fill")
    assert (max(map(int, re.findall(r"\d+", ink))) > 128) is dark
