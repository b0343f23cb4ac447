"""Does the class travel? Into a string, through the wire, into a sandbox, and also as source."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import ProcessorLoadError, ProcessorSerializationError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor, SourceProcessor, parse
from logitship.client.serialization.syntax import parse as parse_source
from logitship.server.check.bench import Bench
from logitship.server.check.recording import Recording
from logitship.server.check.replay import alone, replay
from logitship.server.check.result import result
from logitship.server.check.wording import describe

CHECK = "travels"
_MOST_NAMES = 8


class NotSerializable(Exception):
    """There is nothing to run. `str()` of it says why, in words for the author."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.seen)
        self.finding = finding


def shipped(cls: type[CustomLogitProcessor]) -> tuple[PickledProcessor, int]:
    """The class as a server reads it off the wire.

    Returns:
        It, and the bytes of the string.

    Raises:
        NotSerializable: it cannot be serialized.
    """
    try:
        text = cls.to_str()
    except ProcessorSerializationError as error:
        raise NotSerializable(Finding(CHECK, Severity.ERROR, f"to_str() refuses it: {error}")) from error
    string = parse(text)
    assert isinstance(string, PickledProcessor)
    return string, len(text.encode())


def try_to_load(bench: Bench, string: PickledProcessor) -> None:
    """Load it in a sandbox.

    Raises:
        NotSerializable: it does not load there.
    """
    try:
        with bench.stage(string):
            pass
    except ProcessorLoadError as error:
        seen = f"a server could not load it: {error}"
        advice = "A sandbox has no files, no network and no threads of its own; what it imports must be installed."
        raise NotSerializable(Finding(CHECK, Severity.ERROR, seen, advice)) from error


def check_serializability(
    bench: Bench, string: PickledProcessor, size: int, recordings: Sequence[Recording]
) -> CheckResult:
    """What travelled, and whether its source does the same.

    Args:
        size: bytes of the whole string.
        recordings: of the pickled form; none if they could not be compared with anything.
    """
    findings = [*_too_large(bench, size), *_source_findings(bench, string, recordings)]
    others = "" if string.source is None else ", on others as source"
    loads = f"{size:,} bytes; loads on Python {PYTHON} as bytecode{others}"
    return result(CHECK, f"{loads}{_company(string.source)}", findings)


def _too_large(bench: Bench, size: int) -> list[Finding]:
    limit = bench.config.max_processor_size
    if size <= limit:
        return []
    seen = f"the string has {size:,} bytes; a server takes {limit:,} (--max-processor-size)"
    advice = "Make large tables in __init__ or at the first call, instead of carrying them."
    return [Finding(CHECK, Severity.WARNING, seen, advice, {"bytes": size, "limit": limit})]


def _source_findings(bench: Bench, string: PickledProcessor, recordings: Sequence[Recording]) -> list[Finding]:
    if string.source is None:
        seen = f"its source could not be captured: only servers with Python {PYTHON} can load it"
        advice = "Define it in a file or a notebook's cell, and all that it uses at module level."
        return [Finding(CHECK, Severity.WARNING, seen, advice)]
    for number in range(len(recordings)):
        try:
            with bench.stage(string.source) as stage:
                found = replay(stage, recordings, alone(recordings, [number]))
        except ProcessorLoadError as error:
            return [_source_differs(f"does not load: {error}")]
        if found is not None:
            return [_source_differs(f"gives something else: {describe(recordings, found)}")]
    return []


def _source_differs(what: str) -> Finding:
    advice = "Servers with another Python version run the source. Avoid what depends on when and where a module runs."
    return Finding(CHECK, Severity.WARNING, f"the source of the class, which other Python versions run, {what}", advice)


def _company(source: SourceProcessor | None) -> str:
    """What of the author's else travels with the class, as far as its source shows it."""
    if source is None:
        return ""
    names = [name for name in _bound_names(parse_source(source.source)) if name != source.class_name]
    shown = ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )
    captured = f"{len(source.captured):,} bytes of values" if source.captured else ""
    together = " and ".join(part for part in (shown, captured) if part)
    return f"; with {together}" if together else ""


def _bound_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names
