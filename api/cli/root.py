"""The commands in one tree, and the one place where an error becomes text and an exit code."""

import errno
import gc
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from api.cli.output import error_line, flush_output
from planner.errors import PlannerError
from planner.version import VERSION

PROGRAM = "planner-cli"
COMPLETING = "_PLANNER_CLI_COMPLETE"
EXIT_BUG, EXIT_USAGE, EXIT_BACKEND, EXIT_INTERRUPTED = 1, 2, 4, 130
# of stdout; artefacts and databases have errors of their own
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
ClickError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)

# (function, module of `api.cli`) by the word that names it, in the order of `--help`
COMMANDS = {
    **{
        name: ("command", name)
        for name in (
            "recommend",
            "estimate",
            "explain",
            "simulate",
            "collective",
            "probe",
            "calibrate",
            "catalog",
            "export",
            "study",
            "accuracy",
            "serve",
            "worker",
            "doctor",
            "audit",
        )
    },
    "plans": ("list_plans", "plans"),
    "show": ("show_plan", "plans"),
}
SHORT = ("recommend",)  # one answer: to look for cycles costs more than it frees
GROUPS = ("measurements", "sweep", "queue", "db")


def tree(arguments: Sequence[str] = ()) -> typer.Typer:
    """All commands; where the first argument names one, that one alone: importing takes time."""
    app = typer.Typer(
        name=PROGRAM,
        help="Finds the parallel layout that trains a large model fastest on a given cluster, and "
        "says how sure it is.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(invoke_without_command=True)(_root)
    known = (*COMMANDS, *GROUPS)
    for name in arguments[:1] if arguments and arguments[0] in known else known:
        if name in GROUPS:
            app.add_typer(import_module(f"api.cli.{name}").app, name=name)
        else:
            function, module = COMMANDS[name]
            app.command(name)(getattr(import_module(f"api.cli.{module}"), function))
    return app


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
    completing = COMPLETING in os.environ  # what could come next may be any command
    command = typer.main.get_command(tree(() if completing else arguments))
    try:
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
        return _told(error, as_json="--json" in arguments)
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
            error_line(
                f"output cannot be written ({error.strerror}); make room, or send it elsewhere"
            )
            return EXIT_BACKEND
        return _bug(error, as_json="--json" in arguments)


def _told(error: PlannerError, *, as_json: bool) -> int:
    from api.errors import codes_of, lines_of

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
        _error_object(
            {"type": "usage", "field": field, "value": value, "message": message, "remedy": remedy}
        )
    return EXIT_USAGE


def _mistyped(error: Exception, arguments: Sequence[str]) -> tuple[str | None, str | None]:
    """(option or argument that a usage error is about, what was given for it).

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
        _error_object(
            {
                "type": "bug",
                "field": None,
                "value": None,
                "message": message,
                "remedy": "run with PLANNER_DEBUG=1 and report it",
            }
        )
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
        import traceback

        traceback.print_exc()
