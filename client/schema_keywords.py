"""The keywords of JSON Schema that `params_schema` may have, and how each is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

_TYPES = {
    "null": "null",
    "boolean": "a boolean",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
}
_NOTHING = object()
_NAMES_PER_STEP = 16


class Problem(NamedTuple):
    """Reason why a value does not match.

    Attributes:
        path: path of the value, from `params`.
        expected: what was expected there; it follows "expected".
        got: the value; `_NOTHING`: `expected` is the whole message.
    """

    path: str
    expected: str
    got: Any = _NOTHING

    def __str__(self) -> str:
        if self.got is _NOTHING:
            return f"{self.path}: {self.expected}"
        return f"{self.path}: expected {self.expected}, got {_shown(self.got)}"


class SchemaRun(Protocol):
    """One check of parameters, see `params_schema.py`."""

    def check(self, schema: Any, value: Any, path: str) -> Problem | None:
        """Check a value against a schema; return the first problem."""
        ...

    def check_reference(self, reference: str, value: Any, path: str) -> Problem | None:
        """Check a value against the schema that a reference points to."""
        ...

    def has_pattern(self, pattern: str, text: str) -> bool:
        """Return whether a pattern of the schema is found in a text."""
        ...

    def canonical(self, value: Any) -> str:
        """Return a text that is equal for equal JSON values."""
        ...

    def spend(self, steps: int = 1) -> None:
        """Count steps beyond those of `check`, which counts one for each keyword."""
        ...


Check: TypeAlias = Callable[[SchemaRun, Any, Any, str], Problem | None]
"""Checks a keyword: (run, the keyword's value, the parameter, its path)."""


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return _is_number(value) and (isinstance(value, int) or value.is_integer())
        case "number":
            return _is_number(value)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list | tuple)
    return isinstance(value, Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _type(_: SchemaRun, names: Any, value: Any, path: str) -> Problem | None:
    names = [names] if isinstance(names, str) else names
    if any(_is_type(value, name) for name in names):
        return None
    return Problem(path, " or ".join(_TYPES[name] for name in names), value)


def _enum(run: SchemaRun, allowed: Any, value: Any, path: str) -> Problem | None:
    if run.canonical(value) in [run.canonical(each) for each in allowed]:
        return None
    shown = ", ".join(map(_shown, allowed[:10])) + (", …" if len(allowed) > 10 else "")
    return Problem(path, shown if len(allowed) == 1 else f"one of {shown}", value)


def _const(run: SchemaRun, allowed: Any, value: Any, path: str) -> Problem | None:
    return _enum(run, [allowed], value, path)


def _bound(words: str, is_ok: Callable[[Any, Any], bool]) -> Check:
    def check(_: SchemaRun, bound: Any, value: Any, path: str) -> Problem | None:
        if not _is_number(value) or is_ok(value, bound):
            return None
        return Problem(path, words.format(_shown(bound)), value)

    return check


def _multiple_of(_: SchemaRun, divisor: Any, value: Any, path: str) -> Problem | None:
    if not _is_number(value):
        return None
    try:
        matches = value % divisor == 0
        if not matches and not (isinstance(value, int) and isinstance(divisor, int)):
            quotient = value / divisor  # 1.1 % 0.1 is not 0
            matches = quotient == int(quotient)
    except (OverflowError, ValueError):
        matches = False
    return None if matches else Problem(path, f"a multiple of {_shown(divisor)}", value)


def _length(kind: Callable[[Any], bool], words: str, is_ok: Callable[[int, int], bool]) -> Check:
    def check(_: SchemaRun, bound: Any, value: Any, path: str) -> Problem | None:
        if not kind(value) or is_ok(len(value), bound):
            return None
        return Problem(path, words.format(bound), value)

    return check


def _pattern(run: SchemaRun, pattern: Any, value: Any, path: str) -> Problem | None:
    if not isinstance(value, str) or run.has_pattern(pattern, value):
        return None
    return Problem(path, f"a string that matches {_shown(pattern)}", value)


def _unique_items(run: SchemaRun, unique: Any, value: Any, path: str) -> Problem | None:
    if not unique or not _is_list(value) or len(set(map(run.canonical, value))) == len(value):
        return None
    return Problem(path, "different items")


def _prefix_items(run: SchemaRun, schemas: Any, value: Any, path: str) -> Problem | None:
    pairs = zip(schemas, value if _is_list(value) else (), strict=False)
    return _first(run.check(schema, item, f"{path}[{i}]") for i, (schema, item) in enumerate(pairs))


def _required(run: SchemaRun, names: Any, value: Any, path: str) -> Problem | None:
    run.spend(len(names) // _NAMES_PER_STEP)
    missing = next((n for n in names if n not in value), None) if isinstance(value, Mapping) else None
    return None if missing is None else Problem(f"{path}.{missing[:80]}", "required")


def _properties(run: SchemaRun, schemas: Any, value: Any, path: str) -> Problem | None:
    if not isinstance(value, Mapping):
        return None
    run.spend(len(schemas) // _NAMES_PER_STEP)
    return _first(run.check(schema, value[n], f"{path}.{n[:80]}") for n, schema in schemas.items() if n in value)


def _property_names(run: SchemaRun, schema: Any, value: Any, path: str) -> Problem | None:
    names = value if isinstance(value, Mapping) else ()
    return _first(run.check(schema, name, f"{path}: the name {_shown(name)}") for name in names)


def _dependent_required(run: SchemaRun, names: Any, value: Any, path: str) -> Problem | None:
    run.spend(len(names) // _NAMES_PER_STEP)
    present = [needed for n, needed in names.items() if n in value] if isinstance(value, Mapping) else []
    return _first(_required(run, needed, value, path) for needed in present)


def _all_of(run: SchemaRun, schemas: Any, value: Any, path: str) -> Problem | None:
    return _first(run.check(schema, value, path) for schema in schemas)


def _any_of(run: SchemaRun, schemas: Any, value: Any, path: str) -> Problem | None:
    problems: list[Problem] = []
    for schema in schemas:
        found = run.check(schema, value, path)
        if found is None:
            return None
        problems.append(found)
    if all(each.path == path and each.got is not _NOTHING for each in problems):
        return Problem(path, " or ".join(dict.fromkeys(each.expected for each in problems)), value)
    deepest = max(problems, key=lambda problem: len(problem.path))  # the form that was meant, most likely
    return deepest._replace(expected=f"{deepest.expected} (or another of the {len(schemas)} forms)")


def _one_of(run: SchemaRun, schemas: Any, value: Any, path: str) -> Problem | None:
    matching = sum(run.check(schema, value, path) is None for schema in schemas)
    if matching > 1:
        return Problem(path, "a value of exactly one of the forms", value)
    return _any_of(run, schemas, value, path) if matching == 0 else None


def _not(run: SchemaRun, schema: Any, value: Any, path: str) -> Problem | None:
    return Problem(path, "another value", value) if run.check(schema, value, path) is None else None


def _first(problems: Iterator[Problem | None]) -> Problem | None:
    return next((each for each in problems if each is not None), None)


def check_items(run: SchemaRun, schema: Any, value: Any, path: str, start: int) -> Problem | None:
    """Check `items`: those from `start`, after the ones of `prefixItems`."""
    items = islice(value, start, None) if _is_list(value) else ()
    return _first(run.check(schema, item, f"{path}[{i}]") for i, item in enumerate(items, start))


def check_additional(run: SchemaRun, schema: Any, value: Any, path: str, known: Any) -> Problem | None:
    """Check `additionalProperties`: those that are not in `known`."""
    if not isinstance(value, Mapping):
        return None
    run.spend(len(value) // _NAMES_PER_STEP)
    others = [name for name in value if name not in known]
    if schema is False and others:
        takes = f", only {', '.join(list(known)[:20])}" if known else ""
        return Problem(f"{path}.{str(others[0])[:80]}", f"there is no such parameter{takes}")
    return _first(run.check(schema, value[name], f"{path}.{str(name)[:80]}") for name in others)


def _reference(run: SchemaRun, reference: Any, value: Any, path: str) -> Problem | None:
    return run.check_reference(reference, value, path)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_type_name(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and _is_names(names) and all(name in _TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len(set(value)) == len(value)


def _is_dependency(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_anything(_: Any) -> bool:
    return True


KEYWORDS: Mapping[str, Check] = {
    "$ref": _reference,
    "allOf": _all_of,
    "anyOf": _any_of,
    "const": _const,
    "dependentRequired": _dependent_required,
    "enum": _enum,
    "exclusiveMaximum": _bound("less than {}", lambda value, bound: value < bound),
    "exclusiveMinimum": _bound("more than {}", lambda value, bound: value > bound),
    "maxItems": _length(_is_list, "{} items at most", lambda length, bound: length <= bound),
    "maxLength": _length(_is_string, "{} characters at most", lambda length, bound: length <= bound),
    "maxProperties": _length(_is_object, "{} keys at most", lambda length, bound: length <= bound),
    "maximum": _bound("{} or less", lambda value, bound: value <= bound),
    "minItems": _length(_is_list, "{} items or more", lambda length, bound: length >= bound),
    "minLength": _length(_is_string, "{} characters or more", lambda length, bound: length >= bound),
    "minProperties": _length(_is_object, "{} keys or more", lambda length, bound: length >= bound),
    "minimum": _bound("{} or more", lambda value, bound: value >= bound),
    "multipleOf": _multiple_of,
    "not": _not,
    "oneOf": _one_of,
    "pattern": _pattern,
    "prefixItems": _prefix_items,
    "properties": _properties,
    "propertyNames": _property_names,
    "required": _required,
    "type": _type,
    "uniqueItems": _unique_items,
}
"""All but `items` and `additionalProperties`, which depend on their neighbors."""

WITH_SCHEMA = frozenset({"additionalProperties", "items", "not", "propertyNames"})
_NUMBER = (_is_number, "a number")
_SIZE = (_is_size, "an integer, 0 or greater")
_SCHEMA = (_is_anything, "")  # checked by `_SchemaValidator.visit`
_SCHEMAS = (_is_schemas, "a list of schemas, not empty")
VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "$ref": (_is_string, "a string"),
    "additionalProperties": _SCHEMA,
    "allOf": _SCHEMAS,
    "anyOf": _SCHEMAS,
    "const": _SCHEMA,
    "dependentRequired": (_is_dependency, "an object of lists of different names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list, not empty"),
    "exclusiveMaximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "items": _SCHEMA,
    "maxItems": _SIZE,
    "maxLength": _SIZE,
    "maxProperties": _SIZE,
    "maximum": _NUMBER,
    "minItems": _SIZE,
    "minLength": _SIZE,
    "minProperties": _SIZE,
    "minimum": _NUMBER,
    "multipleOf": (_is_divisor, "a number greater than 0"),
    "not": _SCHEMA,
    "oneOf": _SCHEMAS,
    "pattern": (_is_string, "a string"),
    "prefixItems": _SCHEMAS,
    "properties": (_is_object, "an object of schemas"),
    "propertyNames": _SCHEMA,
    "required": (_is_names, "a list of different names"),
    "type": (_is_type_name, f"a name or a list of different names, of {', '.join(_TYPES)}"),
    "uniqueItems": (_is_bool, "a boolean"),
}
"""Keywords, and their values."""
