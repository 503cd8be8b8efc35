"""Reads a function of TorchTitan 0.3's config_registry.py as syntax, without running it.

It follows assignments, calls of other configurations and literals. Whatever else decides a setting
that is priced is refused with its line: a default in its place would be another run.
Source: torchtitan 0.3.0 config/manager.py (`getattr(module, config_name)()`), models/*/
    config_registry.py.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.errors import Fault, SpecError, fault
from planner.intake.trainer_files.titan_module import flavor_of
from planner.precision import PRECISIONS
from planner.trainers.titan_settings import DEFAULTS, KEYS, configs_03

PRICED = frozenset(
    {"training", "parallelism", "activation_checkpoint", "compile", "checkpoint", "optimizer"}
)
_MODES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
_BRANCHES = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
Flat = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Module:
    """Functions, classes and constants of the module, by name."""

    functions: Mapping[str, ast.FunctionDef]
    classes: Mapping[str, ast.ClassDef]
    constants: dict[str, object]


class _Unread:
    """A value that only running the module tells."""

    def __init__(self, node: ast.AST) -> None:
        self.node = node


def is_registry(text: str) -> bool:
    return "Trainer.Config(" in text and "def " in text


def config_names(source: str) -> list[str]:
    """Functions of the module that return a configuration, in its order."""
    return [node.name for node in _functions(_parsed(source)) if _is_config(node)]


def only(source: str, name: str) -> str:
    """The module without the configurations that this one does not use."""
    functions = {node.name: node for node in _functions(_parsed(source))}
    used = {name}
    waiting = [name]
    while waiting:
        node = functions.get(waiting.pop())
        called = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node else set()
        waiting += [one for one in functions if one in called - used]
        used |= called
    lines = source.splitlines()
    for node in functions.values():
        if node.name not in used and _is_config(node):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or first) - first + 1)
    return "\n".join(lines)


def read_registry(source: str, name: str) -> Flat:
    """Dotted settings that a configuration sets.

    Raises SpecError where the module has no such function, or where only running it would tell
    what it sets.
    """
    tree = _parsed(source)
    functions = {node.name: node for node in _functions(tree)}
    if name not in functions:
        listed = ", ".join(config_names(source)) or "none"
        rule = f"is no configuration of the module, which has {listed}"
        raise fault("current", f"--config {name}", rule, "give one that it has")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    module = _Module(functions, classes, {})
    for node in tree.body:
        if isinstance(node, ast.Assign):
            _assign(node, module.constants, module)
    config = _call(functions[name], module, ())
    if isinstance(optimizer := config.get("optimizer"), _Unread):
        config = {**config, "optimizer": None, "optimizer.name": ast.unparse(optimizer.node)}
    found = {key: value for key, value in config.items() if key.partition(".")[0] in PRICED}
    found.pop("optimizer", None)
    spec = config.get("model_spec")
    if isinstance(spec, str) or (isinstance(spec, _Unread) and flavor_of(spec.node)):
        text = spec if isinstance(spec, str) else ast.get_source_segment(source, spec.node)
        found["model_spec"] = text
    faults = [
        _unread(key, value.node) for key, value in found.items() if isinstance(value, _Unread)
    ]
    faults += [
        Fault(key, value, "is no field of its class, where TorchTitan 0.3 stops", "correct it")
        for key, value in found.items()
        if key.startswith(("training.", "parallelism.")) and key not in KEYS["0.3"]
    ]
    if faults:
        raise SpecError(faults)
    return found


def _unread(key: str, node: ast.AST) -> Fault:
    rule = f"is {ast.unparse(node)[:80]!r}, which only running the Python module tells"
    return Fault(key, None, rule, "write it as a literal, or give a layout in JSON")


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        rule = f"is no Python that can be read ({error})"
        raise fault("current", None, rule, "correct the file") from None


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _is_config(node: ast.FunctionDef) -> bool:
    returns = "" if node.returns is None else ast.unparse(node.returns)
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    calls = any(
        isinstance(one, ast.Call) and ast.unparse(one.func).endswith("Trainer.Config")
        for one in ast.walk(node)
    )
    return len(arguments) == 0 and (calls or returns.endswith("Trainer.Config"))


def _call(function: ast.FunctionDef, module: _Module, outer: tuple[str, ...]) -> Flat:
    """Dotted settings that a configuration's function returns."""
    if function.name in outer:
        raise fault("current", function.name, "calls itself", "correct the module")
    scope = dict(module.constants)
    for node in function.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            _assign(node, scope, module, (*outer, function.name))
        elif isinstance(node, ast.Return) and node.value is not None:
            found = _value(node.value, scope, module, (*outer, function.name))
            if isinstance(found, dict):
                return found
            raise SpecError(_unread(function.name, node.value))
        elif isinstance(node, _BRANCHES):
            rule = f"branches in line {node.lineno}, and only running it tells which way"
            raise fault("current", function.name, rule, "write it out, or give a layout in JSON")
    raise fault("current", function.name, "returns no configuration", "correct it")


def _assign(
    node: ast.Assign | ast.AnnAssign,
    scope: dict[str, object],
    module: _Module,
    outer: tuple[str, ...] = (),
) -> None:
    if node.value is None:
        return
    value = _value(node.value, scope, module, outer)
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        name, _, key = ast.unparse(target).partition(".")
        config = scope.get(name)
        if isinstance(target, ast.Name):
            scope[name] = value
        elif key and isinstance(config, dict):
            scope[name] = {
                **{old: one for old, one in config.items() if not f"{old}.".startswith(f"{key}.")},
                **_nested(key, value),
            }


def _nested(key: str, value: object) -> Flat:
    """The dotted settings of a field that is given a value, or an object with fields."""
    if isinstance(value, dict):
        return {f"{key}.{name}" if name else key: one for name, one in value.items()}
    if key == "activation_checkpoint" and value is None:
        return {f"{key}.mode": "none"}
    return {key: value}


def _value(
    node: ast.expr, scope: Mapping[str, object], module: _Module, outer: tuple[str, ...]
) -> object:
    """A literal, an object's fields as dotted settings, or _Unread."""
    if isinstance(node, ast.Name):
        return scope.get(node.id, _Unread(node))
    if isinstance(node, ast.Attribute):
        name, _, key = ast.unparse(node).partition(".")
        config = scope.get(name)
        if not isinstance(config, dict):
            return _Unread(node)
        inside = {
            old.removeprefix(f"{key}."): one
            for old, one in config.items()
            if old.startswith(f"{key}.")
        }
        return config.get(key, DEFAULTS["0.3"].get(key, inside or _Unread(node)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = [_value(one, scope, module, outer) for one in (node.left, node.right)]
        if all(isinstance(one, int | float) for one in sides):
            return _OPERATORS[type(node.op)](*sides)  # type: ignore[arg-type]
        return _Unread(node)
    if isinstance(node, ast.Call):
        return _called(node, scope, module, outer)
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError):
        return _Unread(node)
    return value


def _called(
    node: ast.Call, scope: Mapping[str, object], module: _Module, outer: tuple[str, ...]
) -> object:
    name = ast.unparse(node.func)
    if name in module.functions and not node.args and not node.keywords:
        return _call(module.functions[name], module, outer)
    if name.rpartition(".")[2] in configs_03() and not node.args and not node.keywords:
        config = configs_03()[name.rpartition(".")[2]]
        converter = PRECISIONS[config.precision].titan_converters.get("0.3", "")
        return {**config.sets, "model_spec": f'model_registry("{config.flavor}", {converter})'}
    if name.endswith("deepcopy") and node.args:
        return _value(node.args[0], scope, module, outer)
    if name.endswith("default_adamw"):  # its arguments are AdamW's numbers
        return {"name": "AdamW"}
    own = module.classes.get(name)  # a class of settings that the module extends
    unnamed = node.args or any(one.arg is None for one in node.keywords)
    if unnamed or not (own or name.endswith("Config")):
        return _Unread(node)
    found: Flat = {}
    for line in own.body if own else ():
        if isinstance(line, ast.AnnAssign) and line.value is not None:
            value = _value(line.value, scope, module, outer)
            found |= _nested(ast.unparse(line.target), value)
    for keyword in node.keywords:
        found |= _nested(str(keyword.arg), _value(keyword.value, scope, module, outer))
    mode = _MODES.get(name.partition(".")[0])
    return {"mode": mode, **found} if mode else found
