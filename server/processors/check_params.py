"""Checks parameters against the `params_schema` of a class, in a process that can be killed.

Both come from clients, and jsonschema bounds neither time nor memory: references may double the work again and again,
and a pattern may backtrack. So this is run as a script, by `ParamsChecker`, see `CheckerProcess`. A line of stdin has a
schema, as text, and parameters, or null to check the schema alone. It is answered by null, or by the name of what is
wrong, "params_schema" or "params", and an error message.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

_MAX_DATA = 1 << 29
"""Memory limit in bytes. Parameters of a megabyte take some 10 MiB."""
_MAX_FRAMES = 4000
"""Python's recursion limit. A level of parameters takes some 5 frames, and a request has at most 512."""
_PRIORITY = 7
"""Nice value: beside a busy engine, the process gets a fifth of a core."""
_MAX_ERRORS = 100
"""Errors of which the one that says most is reported."""
_MAX_MESSAGE = 300
_MAX_REASONS = 5
_MAX_NAME = 80

_KEYWORDS = Draft202012Validator.VALIDATORS.keys() | {
    *("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "contentEncoding", "contentMediaType"),
    *("contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "else", "example"),
    *("examples", "format", "maxContains", "minContains", "readOnly", "then", "title", "writeOnly"),
}
"""Keywords of JSON Schema, pydantic and OpenAPI. Another one is refused: it would look as if it were enforced."""


class _InvalidSchema(Exception):
    """The message says where and why."""


def check(schema: str, params: Any) -> tuple[str, str] | None:
    """Check parameters against a schema.

    Args:
        schema: JSON.
        params: None: check the schema alone.

    Returns:
        The name of the wrong one, and an error message; None if none is.
    """
    wrong = "params_schema"
    try:
        validator = _validator(schema)
        wrong = "params"
        errors = () if params is None else itertools.islice(validator.iter_errors(params), _MAX_ERRORS)
        error = best_match(errors)
        return None if error is None else (wrong, _message(wrong, error))
    except _InvalidSchema as invalid:
        return wrong, str(invalid)
    except RecursionError:
        return wrong, f"{wrong}: nested too deeply, or params_schema recurses infinitely"
    except MemoryError:
        return wrong, f"{wrong}: the check takes too much memory: make it simpler"
    except Exception as failure:  # noqa: BLE001  # boundary: third-party code
        return wrong, f"{wrong}: cannot be checked: {_shortened(repr(failure), _MAX_MESSAGE)}"


@lru_cache(maxsize=64)
def _validator(text: str) -> Draft202012Validator:
    """Return the validator of a schema.

    Raises:
        _InvalidSchema: it is invalid, has an unknown keyword, or refers to something outside of itself.
    """
    schema = json.loads(text)
    registry: Registry[Any] = Registry()  # empty: jsonschema's own would download what is referred to
    waiting = [(schema, registry.resolver_with_root(DRAFT202012.create_resource(schema)))]
    seen = {id(schema)}
    _check_values(schema)
    while waiting:
        each, resolver = waiting.pop()
        if isinstance(each, bool):
            continue
        if unknown := each.keys() - _KEYWORDS:
            raise _InvalidSchema(f"params_schema: {min(unknown)[:_MAX_NAME]!r} is not a keyword of JSON Schema")
        for reference in (each[keyword] for keyword in ("$ref", "$dynamicRef") if keyword in each):
            try:
                found = resolver.lookup(reference)
            except Unresolvable:
                raise _InvalidSchema(
                    f"params_schema: there is nothing at {reference[:_MAX_NAME]!r}: only references into the schema "
                    "itself, '#/…', are followed"
                ) from None
            if id(found.contents) not in seen:  # it may be in an annotation, which is not checked otherwise
                seen.add(id(found.contents))
                _check_values(found.contents)
                waiting.append((found.contents, found.resolver))
        inner = DRAFT202012.create_resource(each).subresources()
        waiting.extend((each.contents, resolver.in_subresource(each)) for each in inner)
    return Draft202012Validator(schema, registry=registry)


def _check_values(schema: Any) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise _InvalidSchema(_message("params_schema", error)) from None


def _message(root: str, error: ValidationError | SchemaError) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME]}" for part in error.absolute_path)
    text = error.message
    if (shown := repr(error.instance)) in text:
        text = text.replace(shown, _shortened(shown, _MAX_NAME), 1)
    reasons = dict.fromkeys(each.message for each in error.context or ())
    if 0 < len(reasons) < _MAX_REASONS:
        text = f"{text}: {'; '.join(reasons)}"
    return f"{root}{path[-_MAX_MESSAGE:]}: {_shortened(text, _MAX_MESSAGE)}"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def main(lines: Iterable[str]) -> None:
    """Run the checker; see the module's docstring."""
    with contextlib.suppress(OSError):  # the server must not be the one that is killed when memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.setpriority(os.PRIO_PROCESS, 0, max(_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA, _MAX_DATA))
    sys.setrecursionlimit(_MAX_FRAMES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    first, *_ = itertools.islice(lines, 1)
    seconds, _ = json.loads(first)
    check("true", {})  # imports what jsonschema imports late
    print(json.dumps(None), flush=True)
    for line in lines:
        # CPU seconds, so that a busy machine refuses nothing. A kernel timer, because a search does not yield.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = check(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.stdin)
