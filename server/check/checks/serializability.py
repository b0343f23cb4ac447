"""The check `serializable`: the class can be serialized and loaded in a sandbox, and its source does the same."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import LARGE_PROCESSOR_ADVICE, ProcessorLoadError, ProcessorSerializationError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor, SourceProcessor, parse
from logitship.client.serialization.syntax import parse as parse_source
from logitship.server.check.environment import CheckEnvironment
from logitship.server.check.findings import describe, result
from logitship.server.check.replayed_calls import Recording, one_by_one, replay
from logitship.server.processors.check_params import check as check_params

CHECK = "serializable"
_MAX_NAMES = 8


class NotSerializable(Exception):
    """The class cannot be serialized or loaded, so nothing can run. `str()` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.seen)
        self.finding = finding


def serialized(cls: type[CustomLogitProcessor]) -> tuple[PickledProcessor, int]:
    """Serialize a class, and parse the processor string as a server does.

    Returns:
        The parsed processor string, and its size in bytes.

    Raises:
        NotSerializable: it cannot be serialized, or its `params_schema` is invalid.
    """
    try:
        text = cls.to_str()
    except ProcessorSerializationError as error:
        raise NotSerializable(Finding(CHECK, Severity.ERROR, f"to_str() fails: {error}")) from error
    string = parse(text)
    assert isinstance(string, PickledProcessor)
    wrong = None if string.params_schema is None else check_params(json.dumps(string.params_schema), None)
    if wrong is not None:
        raise NotSerializable(Finding(CHECK, Severity.ERROR, f"a server refuses the class: {wrong[1]}"))
    return string, len(text.encode())


def require_loadable(environment: CheckEnvironment, string: PickledProcessor) -> None:
    """Load it in a sandbox.

    Raises:
        NotSerializable: it does not load there.
    """
    try:
        with environment.fresh_processor(string):
            pass
    except ProcessorLoadError as error:
        seen = f"it cannot be loaded in a sandbox: {error}"
        advice = (
            "A sandbox has no files, no network and no threads of its own; what the class imports must be installed "
            "on the server."
        )
        raise NotSerializable(Finding(CHECK, Severity.ERROR, seen, advice)) from error


def check_serializability(
    environment: CheckEnvironment, string: PickledProcessor, size: int, recordings: Sequence[Recording]
) -> CheckResult:
    """Check the size of the processor string, and that the class's source gives the same logits.

    Args:
        environment: where processors run.
        string: the parsed processor string.
        size: bytes of the processor string.
        recordings: of the pickled form; empty if its logits cannot be compared.
    """
    findings = [*_too_large(environment, size), *_source_findings(environment, string, recordings)]
    others = "" if string.source is None else ", on others as source"
    loads = f"{size:,} bytes; loads on Python {PYTHON} as bytecode{others}"
    return result(CHECK, f"{loads}{_included(string.source)}", findings)


def _too_large(environment: CheckEnvironment, size: int) -> list[Finding]:
    limit = environment.config.max_processor_size
    if size <= limit:
        return []
    seen = f"the processor string has {size:,} bytes; a server takes at most {limit:,} (--max-processor-size)"
    advice = f"Make large tables in prepare, instead of serializing them with the class; {LARGE_PROCESSOR_ADVICE}."
    return [Finding(CHECK, Severity.WARNING, seen, advice, {"bytes": size, "limit": limit})]


def _source_findings(
    environment: CheckEnvironment, string: PickledProcessor, recordings: Sequence[Recording]
) -> list[Finding]:
    if string.source is None:
        seen = f"its source could not be captured: only servers with Python {PYTHON} can load it"
        advice = "Define the class in a file or a notebook cell, and everything it uses at module level."
        return [Finding(CHECK, Severity.WARNING, seen, advice)]
    for number in range(len(recordings)):
        try:
            with environment.fresh_processor(string.source) as processor:
                found = replay(processor, recordings, one_by_one(recordings, [number]))
        except ProcessorLoadError as error:
            return [_source_differs(f"does not load: {error}")]
        if found is not None:
            return [_source_differs(f"gives different logits: {describe(recordings, found)}")]
    return []


def _source_differs(how: str) -> Finding:
    advice = "Servers with another Python version run the source. Avoid code that depends on when and where it runs."
    return Finding(CHECK, Severity.WARNING, f"the source of the class, which other Python versions run, {how}", advice)


def _included(source: SourceProcessor | None) -> str:
    """List the other parts of the author's code that are serialized with the class, according to its source."""
    if source is None:
        return ""
    names = [name for name in _bound_names(parse_source(source.source)) if name != source.class_name]
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    captured = f"{len(source.captured):,} bytes of values" if source.captured else ""
    included = " and ".join(part for part in (shown, captured) if part)
    return f"; includes {included}" if included else ""


def _bound_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names
