"""The commands in one tree, and the one place where an error becomes text and an exit code."""

import errno
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from planner.api.cli.output import error_line, flush_output
from planner.api.docstrings import NOTE, notes_in
from planner.api.errors import (
    EXIT_BACKEND,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_REQUEST,
    codes_of,
    lines_of,
)
from planner.errors import PlannerError
from planner.version import VERSION

PROGRAM = "planner-cli"
COMPLETING = "_PLANNER_CLI_COMPLETE"
# of stdout; artefacts and databases have errors of their own
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
ClickError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)

# Lines of `--help`, in its order. Every file imports at its top what it needs; a start stays fast
# because only the named command is imported.
COMMANDS = {
    "recommend": "Rank the layouts that train MODEL fastest on this cluster.",
    "estimate": "Price layouts: time, memory, and how sure.",
    "explain": "Why this layout of a stored plan, and why not another.",
    "simulate": "Play out one step of a pipeline: who waits when, and what each stage holds.",
    "collective": "Price one collective: seconds, steps, bytes on the wire, the algorithm and why.",
    "probe": "Run layouts for a few steps and record time, memory and what went wrong.",
    "calibrate": "Make the calibration of every measured trainer and GPU anew; plans use the "
    "newest.",
    "catalog": "List what is known by name, or show one entry with its sources; "
    "keep entries of your own.",
    "export": "Write the configuration and command that run a layout.",
    "study": "Write the study of a plan for optuna-dashboard and Optuna's plots.",
    "accuracy": "Errors of time and memory on measured runs, predicted without having seen them; "
    "by trainer, GPU, model family and technique.",
    "serve": "Serve POST /plan and the rest; OpenAPI at /docs.",
    "worker": "Run probes, studies and sweeps from the database; sweeps start when their "
    "schedule says.",
    "doctor": "Check this installation part by part: ok, warn or fail, and what to do.",
    "audit": "Print who asked for, ran, cancelled and imported what, when, for how many "
    "GPU-seconds.",
    "plans": "List stored plans, and those that probes are still spent on, newest first.",
    "show": "Print a stored plan again, as `recommend` printed it.",
    "calibrations": "Calibrations learned here: list, show, revert.",
    "measurements": "Measurements: import, export, list, delete, believe, share.",
    "sweep": "Known jobs measured now, or by workers on a schedule.",
    "queue": "Probes, studies and runs of sweeps: what waits, what was given up, another try.",
    "db": "The database: bring it to the revision that this version needs, back it up, check it.",
}
GROUPS = ("calibrations", "measurements", "sweep", "queue", "db")  # of more commands
IN_PLANS = {"plans": "list_plans", "show": "show_plan"}  # the others have a file each
SHORT = ("recommend",)  # one answer: to look for cycles costs more than it frees


class _Documented(TyperCommand):
    """A command whose docstring has the help of its flags, a note `name: help` each."""

    def __init__(self, name: str | None, *, help: str | None, **given: Any) -> None:
        super().__init__(name, help=NOTE.sub("", help or "").strip(), **given)
        notes = notes_in(help or "")
        for one in self.params:
            if isinstance(one, TyperArgument | TyperOption):
                one.help = notes.get(str(one.name), one.help)
            one.secondary_opts = []  # no `--no-json`


def tree(words: Sequence[str] | None = None) -> typer.Typer:
    """All commands.

    words: of a command line; only the command that they name is imported, the others are a name
        and a line of help.
    """
    app = typer.Typer(
        name=PROGRAM,
        help="Finds the parallel layout that trains a large model fastest on a given cluster, and "
        "says how sure it is.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(invoke_without_command=True)(_root)
    named = None if words is None else next((w for w in words if not w.startswith("-")), "")
    for name, text in COMMANDS.items():
        if named not in (None, name):
            app.command(name, help=text)(_not_imported)
        elif name in GROUPS:
            group = import_module(f"planner.api.cli.{name}").app
            for one in group.registered_commands:
                one.cls = _Documented
            app.add_typer(group, name=name, help=text)
        else:
            module = import_module(f"planner.api.cli.{'plans' if name in IN_PLANS else name}")
            command = getattr(module, IN_PLANS.get(name, "command"))
            app.command(name, cls=_Documented, help=None if command.__doc__ else text)(command)
    return app


def _not_imported() -> None:
    raise AssertionError("a command that the command line does not name")


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if ctx.invoked_subcommand not in SHORT:
        gc.enable()
    if version:
        typer.echo(VERSION)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code.

    Nothing escapes as a traceback unless PLANNER_DEBUG is set.
    """
    completing = COMPLETING in os.environ
    try:
        words = _words_so_far() if completing else arguments
        command = typer.main.get_command(tree(words))
        # the shell asks what could come next; the answer ends in SystemExit
        if completing:
            command.main(list(arguments), prog_name=PROGRAM)
        with command.make_context(PROGRAM, list(arguments)) as context:
            command.invoke(context)
        flush_output()
        return 0
    except typer.Exit as done:
        return done.exit_code
    except PlannerError as error:
        return _reported(error, as_json="--json" in arguments)
    except ClickError as error:
        return _usage(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        error_line("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            _drop_output()
            why = f"output cannot be written ({error.strerror})"
            error_line(f"{why}; make room, or send it elsewhere")
            return EXIT_BACKEND
        return _bug(error, as_json="--json" in arguments)


def _words_so_far() -> list[str]:
    """Words behind the program's name on the line that a shell completes."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:]


def _reported(error: PlannerError, *, as_json: bool) -> int:
    for line in lines_of(error):
        error_line(line)
    if as_json:
        _error_object(error.as_dict())
    _raise_for_developers()
    return codes_of(error).exit_code


def _usage(error: Exception, arguments: Sequence[str]) -> int:
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    context = getattr(error, "ctx", None)
    remedy = f"see {context.command_path if context else 'planner-cli'} --help"
    error_line(f"{message} {remedy}" if message.endswith(".") else f"{message}; {remedy}")
    if "--json" in arguments:
        field, value = _mistyped(error, arguments)
        about = {"type": "usage", "field": field, "value": value}
        _error_object({**about, "message": message, "remedy": remedy})
    return EXIT_REQUEST


def _mistyped(error: Exception, arguments: Sequence[str]) -> tuple[str | None, str | None]:
    """(option or argument that a usage error is about, its value).

    None where the error does not name it.
    """
    unknown: str | None = getattr(error, "option_name", None)
    if unknown is not None:
        return unknown, None
    names: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    for index, word in enumerate(arguments):
        option, parted, value = word.partition("=")
        if option in names:
            return option, value if parted else next(iter(arguments[index + 1 : index + 2]), None)
    return next(iter(names), None), None


def _bug(error: Exception, *, as_json: bool) -> int:
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    sys.stderr.write(f"bug: {message}; PLANNER_DEBUG=1 shows where, please report it\n")
    if as_json:
        about = {"type": "bug", "field": None, "value": None, "message": message}
        _error_object({**about, "remedy": "run with PLANNER_DEBUG=1 and report it"})
    _raise_for_developers()
    return EXIT_BUG


def _error_object(error: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps({"error": error}, default=str) + "\n")
        flush_output()
    except OSError:  # a closed pipe or a full disk: stderr has said it already
        _drop_output()


def _drop_output() -> None:
    """Sends the rest of stdout nowhere, so that the interpreter's exit does not stumble over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _raise_for_developers() -> None:
    if os.environ.get("PLANNER_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
