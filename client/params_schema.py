"""`params_schema`: a JSON Schema of a processor's parameters, checked in bounded time.

The schema comes from a client, and so do the parameters. So only keywords whose cost is bounded are taken, references
stay inside the schema, patterns are searched in linear time, and a check counts its steps. A schema with another
keyword is refused: it would look as if it were enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .linear_regex import MAX_SIZE, LinearRegex
from .schema_keywords import KEYWORDS, VALUES, WITH_SCHEMA, Problem, check_additional, check_items

MAX_SCHEMA_BYTES = 1 << 15
"""Maximum number of bytes of JSON."""
MAX_STEPS = 5000
"""Steps of a check that are always allowed, of some microseconds each."""
STEPS_PER_ELEMENT = 10
"""Further steps for each value in the parameters, whose number the server bounds."""

MAX_SEARCH = 1 << 20
"""Maximum product of a text's length and a pattern's size. A search of that takes ten milliseconds or more, in which
nothing else runs in the process."""

_MAX_DEPTH = 64
_REGEX_SIZE_PER_STEP = 64
_CHARACTERS_PER_STEP = 1024
_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "format",
        "readOnly",
        "title",
        "writeOnly",
    }
)


class InvalidSchema(ValueError):
    """A `params_schema` cannot be checked; the message says where and why."""


class ParamsSchema:
    """A schema that can be checked.

    Args:
        schema: a JSON Schema, draft 2020-12.

    Raises:
        InvalidSchema: it is not a schema, is too large, or has a keyword that is not supported.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        try:
            text = orjson.dumps(schema)
        except orjson.JSONEncodeError as error:
            raise InvalidSchema(f"params_schema: not JSON: {error}") from None
        if len(text) > MAX_SCHEMA_BYTES:
            raise InvalidSchema(f"params_schema: {len(text)} bytes of JSON, at most {MAX_SCHEMA_BYTES} are allowed")
        self._root = orjson.loads(text)
        self._patterns: dict[str, LinearRegex] = {}
        _SchemaValidator(self._root, self._patterns).visit(self._root, "params_schema", 0)

    def problem(self, params: Mapping[str, Any]) -> str:
        """Return what is wrong with parameters, such as `params.sentences: required`; "" if they match."""
        run = _ParamsCheck(self._root, self._patterns, params)
        try:
            found = run.check(self._root, params, "params")
        except _LimitExceeded as error:
            return str(error)
        except RecursionError:
            return "params: nested too deeply to be checked against params_schema"
        return "" if found is None else str(found)


def as_json_schema(declared: Any) -> Any:
    """Return the JSON Schema of a pydantic model, and everything else unchanged."""
    to_schema = getattr(declared, "model_json_schema", None)
    return to_schema() if isinstance(declared, type) and callable(to_schema) else declared


class _SchemaValidator:
    """Checks a schema itself: each keyword, its value and its references.

    Args:
        root: the schema.
        patterns: gets its patterns, compiled.
    """

    def __init__(self, root: Any, patterns: dict[str, LinearRegex]) -> None:
        self._root = root
        self._patterns = patterns
        self._referred: list[Any] = []

    def visit(self, schema: Any, at: str, depth: int) -> None:
        """Check a schema and those in it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise InvalidSchema(f"{at}: must be an object or a boolean")
        if depth > _MAX_DEPTH:
            raise InvalidSchema(f"{at}: nested deeper than {_MAX_DEPTH}")
        for keyword, value in schema.items():
            place = f"{at}.{keyword[:80]}"
            if keyword in _ANNOTATIONS:
                continue
            if keyword not in VALUES:
                raise InvalidSchema(f"{place}: this keyword is not supported, only {', '.join(sorted(VALUES))}")
            is_valid, expected = VALUES[keyword]
            if not is_valid(value):
                raise InvalidSchema(f"{place}: must be {expected}")
            self._visit_value(keyword, value, place, depth)
        for name in ("$defs", "definitions"):
            self._visit_all(schema.get(name, {}), f"{at}.{name}", depth)

    def _visit_value(self, keyword: str, value: Any, place: str, depth: int) -> None:
        if keyword == "$ref":
            target = _resolve(self._root, value, place)
            # It may be part of an annotation, which is not visited otherwise.
            if not any(each is target for each in self._referred):
                self._referred.append(target)
                self.visit(target, place, depth + 1)
        elif keyword == "pattern":
            self._add_pattern(value, place)
        elif keyword in ("properties", "allOf", "anyOf", "oneOf", "prefixItems"):
            self._visit_all(value, place, depth)
        elif keyword in WITH_SCHEMA:
            self.visit(value, place, depth + 1)

    def _visit_all(self, schemas: Any, place: str, depth: int) -> None:
        if not isinstance(schemas, dict | list):
            raise InvalidSchema(f"{place}: must be an object of schemas")
        items = schemas.items() if isinstance(schemas, dict) else enumerate(schemas)
        for name, schema in items:
            self.visit(schema, f"{place}.{str(name)[:80]}", depth + 1)

    def _add_pattern(self, pattern: str, place: str) -> None:
        if pattern in self._patterns:
            return
        try:
            self._patterns[pattern] = LinearRegex(pattern)
        except ValueError as error:
            raise InvalidSchema(f"{place}: {error}") from None
        if sum(each.size for each in self._patterns.values()) > MAX_SIZE:
            raise InvalidSchema(f"{place}: all patterns together are too large")


def _resolve(root: Any, reference: str, place: str) -> Any:
    """Return the schema that a reference points to.

    Raises:
        InvalidSchema: it is not in this schema.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise InvalidSchema(f"{place}: only references into the schema itself, '#/…', are followed")
    found = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise InvalidSchema(f"{place}: there is nothing at {reference[:80]!r}")
        found = found[name]
    if not isinstance(found, dict | bool):
        raise InvalidSchema(f"{place}: {reference[:80]!r} is not a schema")
    return found


class _LimitExceeded(Exception):
    """A check exceeds a limit."""


class _ParamsCheck:
    """One check of parameters, with its remaining steps."""

    def __init__(self, root: Any, patterns: Mapping[str, LinearRegex], params: Any) -> None:
        self._root = root
        self._patterns = patterns
        self._params = params
        self._steps = MAX_STEPS
        self._is_extended = False
        self._depth = 0

    def spend(self, steps: int = 1) -> None:
        """Deduct steps from the budget."""
        self._steps -= steps
        if self._steps < 0 and not self._is_extended:
            self._is_extended = True
            self._steps += STEPS_PER_ELEMENT * _count(self._params)
        if self._steps < 0:
            raise _LimitExceeded("params: checking them against params_schema takes too long")

    def check(self, schema: Any, value: Any, path: str) -> Problem | None:
        """Check a value against a schema; return the first problem."""
        self.spend()
        if isinstance(schema, bool):
            return None if schema else Problem(path, "not allowed")
        self._depth += 1
        if self._depth > 4 * _MAX_DEPTH:
            raise _LimitExceeded(f"{path[:200]}: params_schema recurses infinitely")
        for keyword, argument in schema.items():
            self.spend()
            if (found := self._check_keyword(keyword, argument, schema, value, path)) is not None:
                self._depth -= 1
                return found
        self._depth -= 1
        return None

    def _check_keyword(self, keyword: str, argument: Any, schema: Any, value: Any, path: str) -> Problem | None:
        if keyword == "items":
            return check_items(self, argument, value, path, len(schema.get("prefixItems", ())))
        if keyword == "additionalProperties":
            return check_additional(self, argument, value, path, schema.get("properties", {}))
        check = KEYWORDS.get(keyword)
        return None if check is None else check(self, argument, value, path)

    def check_reference(self, reference: str, value: Any, path: str) -> Problem | None:
        """Check a value against the schema that a reference points to."""
        return self.check(_resolve(self._root, reference, path), value, path)

    def has_pattern(self, pattern: str, text: str) -> bool:
        """Return whether a pattern of the schema is found in a text."""
        regex = self._patterns[pattern]
        size = len(text) * regex.size
        if size > MAX_SEARCH:
            raise _LimitExceeded(f"params: a text of {len(text)} characters is too long for a pattern of params_schema")
        self.spend(size // _REGEX_SIZE_PER_STEP)
        return regex.is_found_in(text)

    def canonical(self, value: Any) -> str:
        """Return a text that is equal for equal JSON values.

        A text, because clients can choose numbers and lists that all have the same hash.
        """
        return repr(self._normalized(value))

    def _normalized(self, value: Any) -> Any:
        match value:
            case str():
                self.spend(1 + len(value) // _CHARACTERS_PER_STEP)
                return value
            case Mapping():
                self.spend(1 + len(value))
                return tuple((key, self._normalized(value[key])) for key in sorted(value, key=str))
            case list() | tuple():
                self.spend()
                return [self._normalized(each) for each in value]
        self.spend()
        return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(value: Any) -> int:
    total, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        total += 1
        if isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)
    return total
