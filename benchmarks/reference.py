"""What `benchmarks.documents` writes into pages: tables of what the code declares, by name."""

import ast
import inspect
import json
import pathlib
import re
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from planner.api.docstrings import NOTE
from planner.api.job_schema import meanings

ROOT = pathlib.Path(__file__).parents[1]
POINTS = ROOT / "docs" / "extension-points.yaml"
GROUPS = ROOT / "docs" / "measured-groups.yaml"
ROWS = ROOT / "benchmarks" / "measured" / "public.jsonl"
PLACE = re.compile(r"(?<![`\w/])(?:planner|probes|api|benchmarks|tests)/[\w./:]*[\w/]")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |\n"
        for line in lines
    )


# ---- where each kind of change goes --------------------------------------------------------------


def extension_points() -> str:
    """What to add, its file, its line, the test that fails until it is right."""
    rows = []
    for point in yaml.safe_load(POINTS.read_text(encoding="utf-8")):
        held = "; ".join(point[name] for name in ("test", "also") if name in point)
        cells = (point["add"], point["file"], point.get("line", "-"), held)
        rows.append([PLACE.sub(r"`\g<0>`", cell) for cell in cells])
    return table(("to add", "file", "and one line", "held by"), rows)


# ---- accuracy ------------------------------------------------------------------------------------


def accuracy() -> str:
    """The figures a reader wants first, from the report that ships."""
    from planner.calibration.comparison import shipped_comparison
    from planner.calibration.report import report

    found = report(shipped_comparison())
    units, all_units = found.complete["group"].units, found.left_out["group"].units
    timed = found.complete["group"].time
    after = {one.runs: one.error for one in found.own_runs}
    assert units is not None
    assert all_units is not None
    assert timed is not None
    text = (
        f"On a cluster that it has never seen, step time is off by **{units.mape:.1%}** (median "
        f"{units.median:.1%}) and **{units.coverage:.0%}** of the measured steps lie inside the "
        f"90% interval: means over {units.units} units of source, trainer, GPU and number format, "
        f"{timed.rows} published runs whose publishers state the whole configuration. With runs "
        f"that leave something out it is {all_units.mape:.1%} over {all_units.units} units; after "
        f"one run of your own {after[1]:.1%}, after three {after[3]:.1%}."
    )
    return textwrap.fill(text, width=100) + "\n"


def measured_groups() -> str:
    """Who published each group of rows, on what."""
    about = yaml.safe_load(GROUPS.read_text(encoding="utf-8"))
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["group"], []).append(row)
    missing = set(rows) ^ set(about)
    if missing:
        raise SystemExit(f"{GROUPS.name} and {ROWS.name} differ in {sorted(missing)}")
    lines = []
    for name, found in sorted(rows.items(), key=lambda item: -len(item[1])):
        run = Counter((row["training"]["trainer"], row["cluster"]["gpu"]) for row in found)
        what = ", ".join(f"{trainer} on {gpu} ({n})" for (trainer, gpu), n in run.most_common())
        complete = sum(bool(row["complete"]) for row in found)
        lines.append((f"`{name}`", about[name], what, str(len(found)), str(complete)))
    return table(("group", "published by", "runs of", "rows", "complete"), lines)


def peers() -> str:
    """Published predictions of other tools beside ours, on the same rows."""
    from planner.calibration.comparison import shipped_comparison

    found = shipped_comparison()
    unseen = {row.id: row for row in found.left_out["group"]}
    seen = {row.id: row for row in found.rows}
    by_peer: dict[str, list[Mapping[str, Any]]] = {}
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "peer" in row:
            by_peer.setdefault(row["peer"]["name"], []).append(row)
    lines = []
    for name, rows in sorted(by_peer.items()):
        errors: dict[str, list[float]] = {}
        for row in rows:
            for what in ("step_seconds", "peak_allocated_bytes"):
                kind = what.removeprefix("step_").removeprefix("peak_")
                truth = row["measured"][what]
                ours = f"predicted_{kind}"
                errors.setdefault(f"peer {kind}", []).append(_off(row["peer"][what], truth))
                errors.setdefault(f"unseen {kind}", []).append(
                    _off(getattr(unseen[row["id"]], ours), truth)
                )
                errors.setdefault(f"seen {kind}", []).append(
                    _off(getattr(seen[row["id"]], ours), truth)
                )
        whose = f"{name}, {len(rows)} rows of `{rows[0]['group']}`"
        for label, key in (
            (whose, "peer"),
            ("planner, without that source", "unseen"),
            ("planner, as shipped", "seen"),
        ):
            time, memory = errors[f"{key} seconds"], errors[f"{key} allocated_bytes"]
            lines.append(
                (label, f"{sum(time) / len(time):.1%}", f"{sum(memory) / len(memory):.1%}")
            )
    return table(("predicted by", "step time off by", "allocated memory off by"), lines)


def _off(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1.0)


# ---- fields of a job -----------------------------------------------------------------------------


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        kinds = [_type(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "mapping"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}".removesuffix(" of anything")
    names = {"object": "mapping", "boolean": "bool", "string": "text", "number": "number"}
    kind = names.get(schema.get("type", ""), schema.get("type", "anything"))
    limits = [
        f"{word} {schema[key]:,}"
        for key, word in (
            ("minimum", "at least"), ("exclusiveMinimum", "above"), ("gt", "above"),
            ("maximum", "at most"), ("exclusiveMaximum", "below"), ("le", "at most"),
        )
        if key in schema and abs(schema[key]) < 1_000_000
    ]  # fmt: skip
    return ", ".join([kind, *limits])


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "empty"
    if isinstance(field.default, BaseModel):
        return "each field's own"
    if field.default is None:
        return "-"
    return f"`{json.dumps(field.default)}`"


def fields(
    model: type[BaseModel], *, defaults: str | None = None, leave_out: Sequence[str] = ()
) -> str:
    """One row a field. defaults: what to say of all fields instead of each one's own default."""
    said = meanings(model)
    schema = model.model_json_schema()["properties"]
    rows = [
        (
            f"`{name}`",
            _type(schema[name]),
            defaults if defaults is not None else _default(model, name),
            said.get(name, ""),
        )
        for name in model.model_fields
        if name not in leave_out
    ]
    silent = [row[0] for row in rows if not row[3]]
    if silent:
        raise SystemExit(f"{model.__name__} says nothing of {', '.join(silent)} in its docstring")
    if defaults is None:
        return table(("field", "values", "default", "meaning"), rows)
    return table(("field", "values", "meaning"), [(a, b, d) for a, b, _, d in rows])


def job_fields() -> dict[str, Callable[[], str]]:
    from planner.specs.cluster import ClusterRequest
    from planner.specs.fabric import LevelRequest
    from planner.specs.job import ProbeSpec, SearchSpec
    from planner.specs.layout import Layout
    from planner.specs.sweep import Measure, SweepBudget, SweepSpec
    from planner.specs.training import Checkpointing, Overlap, TrainingSpec

    return {
        "job-cluster": lambda: fields(ClusterRequest),
        "job-fabric": lambda: fields(LevelRequest),
        "job-training": lambda: fields(TrainingSpec),
        "job-checkpoint": lambda: fields(Checkpointing),
        "job-overlap": lambda: fields(Overlap),
        "job-layout": lambda: fields(Layout, defaults=""),
        "job-search": lambda: fields(SearchSpec),
        "job-probe": lambda: fields(ProbeSpec),
        "sweep": lambda: fields(SweepSpec),
        "sweep-measure": lambda: fields(Measure),
        "sweep-budget": lambda: fields(SweepBudget),
    }


def model_fields() -> str:
    """Fields of an inline model, in the words of Hugging Face's config.json."""
    from planner.specs.model import ModelSpec
    from planner.specs.network import Network

    said = meanings(ModelSpec)
    schema = ModelSpec.model_json_schema()["properties"]
    rows = [
        (f"`{name}`", _type(schema[name]), _default(ModelSpec, name), said.get(name, ""))
        for name in sorted(ModelSpec.model_fields, key=Network.model_fields.__contains__)
        if name not in ("unread_keys", "left_out")
    ]
    return table(("field", "values", "default", "meaning"), rows)


def settings() -> str:
    from planner.api.settings import Settings

    said = meanings(Settings)
    kept = {
        "lease_folder": "`planner-leases` in `XDG_RUNTIME_DIR`, else `planner-leases-UID` in /tmp"
    }
    own = {
        "database_url": "SQLite in the user's data folder",
        "probe_folder": "a folder in the user's cache",
        "probe_python": "the one that runs planner-cli",
        "api_keys": "none",
        "webhook_secret": "none",
    }
    rows = []
    for name in Settings.model_fields:
        default = {**kept, **own}.get(name) or _default(Settings, name)
        rows.append((f"`PLANNER_{name.upper()}`", default, said[name]))
    return table(("variable", "default", "meaning"), rows)


# ---- command line --------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its options, as typer declares them."""
    import typer

    from planner.api.cli.root import tree

    root: Any = typer.main.get_command(tree())
    return "\n".join(_commands(root, root.context_class(root, info_name="planner-cli"), 0))


def _commands(command: Any, context: Any, depth: int) -> Iterator[str]:
    if depth:
        yield f"{'#' * (depth + 1)} `{context.command_path}`\n\n{_prose(command.help or '')}\n"
    records = [
        record
        for param in command.params
        if not param.hidden and param.opts != ["--help"]
        for record in [param.get_help_record(context)]
        if record is not None
    ]
    if depth:
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"Usage: `{context.command_path} {usage}`\n"
    if records:
        yield table(("option", "meaning"), [(f"`{name}`", text) for name, text in records])
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(
            child, child.context_class(child, info_name=name, parent=context), depth + 1
        )


def _prose(text: str) -> str:
    """A docstring as Markdown: its paragraphs, one line each."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


# ---- REST ----------------------------------------------------------------------------------------


def rest() -> str:
    """Every route of the OpenAPI document."""
    from planner.api.http.app import create_app
    from planner.api.settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/planner.db"
        document = create_app(Settings(database_url=url)).openapi()
    lines: list[str] = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines.append(f"## `{method.upper()} {path}`\n")
            lines.append(_prose(route.get("description", "")) + "\n")
            scopes = [
                scope
                for one in route.get("security", [])
                for scopes in one.values()
                for scope in scopes
            ]
            lines += [f"Scope of the key: `{'`, `'.join(scopes)}`.\n"] if scopes else []
            parameters = [
                (f"`{one['name']}`", one["in"], _type(one["schema"]), one.get("description", ""))
                for one in route.get("parameters", [])
            ]
            if parameters:
                lines.append(table(("parameter", "in", "values", "meaning"), parameters))
            body = route.get("requestBody", {}).get("content", {})
            for kind, content in body.items():
                schema = content.get("schema", {})
                named = document["components"]["schemas"].get(
                    schema.get("$ref", "").rpartition("/")[2], schema
                )
                lines.append(f"Body, `{kind}`: {_body(named)}.\n")
            lines.append(_answers(route["responses"]))
    return "\n".join(lines)


def _body(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_body(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"a list of {_body(schema.get('items', {}))}"
    names = list(schema.get("properties", {}))
    return f"a mapping of {', '.join(f'`{name}`' for name in names)}" if names else "text"


def _answers(responses: Mapping[str, Any]) -> str:
    """What a route answers, and the codes of its problem documents."""
    good, problems = [], []
    for code, answer in sorted(responses.items()):
        if int(code) >= 400:
            problems.append(code)
            continue
        bodies = [_media(*one) for one in answer.get("content", {}).items()]
        good.append(f"{code} with {', '.join(bodies) if bodies else 'no body'}")
    told = f"Problems: {', '.join(problems)}." if problems else ""
    return f"Answers {'; '.join(good)}. {told}".strip() + "\n"


def _media(kind: str, content: Mapping[str, Any]) -> str:
    schema = content.get("schema", {})
    if "$ref" in schema or "anyOf" in schema:
        return _body(schema) + ("" if kind == "application/json" else f" (`{kind}`)")
    return f"`{kind}`"


# ---- Python --------------------------------------------------------------------------------------


def python() -> str:
    """What `import planner` offers, from its docstrings."""
    import planner

    lines = []
    for name in planner.__all__:
        value = getattr(planner, name)
        if inspect.isfunction(value):
            lines.append(f"## `planner.{name}`\n\n```text\n{_signature(value)}\n```\n")
        elif inspect.isclass(value):
            lines.append(f"## `planner.{name}`\n")
        else:
            continue
        lines.append(_docstring(inspect.cleandoc(value.__doc__ or "")) + "\n")
    return "\n".join(lines)


def _signature(function: Callable[..., Any]) -> str:
    """The header as it is written, one parameter a line."""
    tree = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert tree.returns is not None
    return (
        f"{tree.name}("
        + "".join(f"\n    {one}," for one in _parameters(tree.args))
        + f"\n) -> {ast.unparse(tree.returns).strip(chr(39))}"
    )


def _parameters(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for place, (one, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield ast.unparse(one) + (f" = {ast.unparse(default)}" if default else "")
        if place == len(given.posonlyargs):
            yield "/"
    if given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield ast.unparse(one) + (f" = {ast.unparse(default)}" if default else "")


def _docstring(text: str) -> str:
    """A docstring as Markdown: notes of names as a list, other paragraphs as they are."""
    parts = []
    for part in re.split(r"\n\s*\n", text):
        found = NOTE.findall(part)
        if found and NOTE.match(part):
            parts.append(
                "\n".join(f"- `{names}`: {' '.join(said.split())}" for names, said in found)
            )
        else:
            parts.append(" ".join(part.split()))
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "extension-points": extension_points,
    "accuracy": accuracy,
    "measured-groups": measured_groups,
    "peers": peers,
    "job-model": model_fields,
    "settings": settings,
    "command-line": command_line,
    "rest": rest,
    "python": python,
    **job_fields(),
}
