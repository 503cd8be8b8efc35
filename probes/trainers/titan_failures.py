"""Why a TorchTitan run gave no numbers.

Recognises errors that only TorchTitan prints, before `planner.probes.failures` ranks all errors.
"""

import re
from dataclasses import replace

from planner.probes.evidence import Evidence, RankError, raised
from planner.probes.failures import classify, known_cause
from planner.probes.protocol import Failed, FailureKind, OutOfMemory
from planner.probes.trainers.titan_log import ANSI, TitanLog

_FRAME = re.compile(r'^\s+File "([^"]+)", line \d+')
# what tyro prints for a flag that it does not know or cannot read, and TorchTitan 0.2 for an
# unknown key in its TOML
_REFUSED = re.compile(
    r"Unrecognized[^\n]*|invalid choice[^\n]*|Parsing error[^\n]*|Invalid field names in [^\n]*"
)
_RULES = frozenset({"AssertionError", "ValueError", "NotImplementedError", "TypeError", "KeyError"})
_TORCH_LACKS = re.compile(r"module 'torch[\w.]*' has no attribute")
_SHOWN_LINES, _SHOWN_CHARACTERS = 8, 500


def failure(log: TitanLog, evidence: Evidence) -> Failed | OutOfMemory:
    """The failure that the log of an incomplete run shows."""
    plain = ANSI.sub("", evidence.log)
    refused = None if log.started else _REFUSED.search(plain)
    if refused is not None:
        return Failed(
            kind=FailureKind.INVALID_LAYOUT, rank=None, message=_unboxed(plain[refused.start() :])
        )
    errors = evidence.errors or tuple(
        replace(error, kind=_kind(error, log)) for error in raised(plain)
    )
    found = classify(replace(evidence, errors=errors, log=plain))
    if isinstance(found, Failed) and found.kind == FailureKind.IMPORT:
        said = (
            f"torchtitan {log.version or '(unknown version)'} does not run with what is "
            f"installed: {found.message}"
        )
        return found.model_copy(update={"message": said})
    return found


def _kind(error: RankError, log: TitanLog) -> str | None:
    """The failure class, if TorchTitan's own code or its clash with torch decides it.

    None leaves it to the common rules, which go first.
    """
    if known_cause(error) is not None:
        return None
    name = error.type.rpartition(".")[2]
    if name == "AttributeError" and _TORCH_LACKS.search(error.message):
        return FailureKind.IMPORT
    frames = [frame[1] for line in error.traceback.splitlines() if (frame := _FRAME.match(line))]
    own = bool(frames) and "torchtitan" in frames[-1]
    return (
        FailureKind.INVALID_LAYOUT
        if not log.steps and (name in _RULES or (name == "RuntimeError" and own))
        else None
    )


def _unboxed(text: str) -> str:
    """The text inside tyro's box, on one line."""
    words = [
        re.sub(r"^\s*(?:\[[A-Za-z_]+\d+\]:)?|[│╭╮╰╯─|]+", " ", line).strip()
        for line in text.splitlines()[:_SHOWN_LINES]
    ]
    return " ".join(" ".join(words).split())[:_SHOWN_CHARACTERS]
