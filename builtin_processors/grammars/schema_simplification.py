"""Simplifies JSON schemas: leaves out keywords that exclude nothing, and writes others in llguidance's way.

llguidance refuses keywords that it does not implement by their name, even where they have no effect, as in
`uniqueItems: false`. Its regular expressions are those of Rust, while JSON Schema's are those of ECMA-262.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"),
        *("examples", "id", "readOnly", "title", "writeOnly", "x-guidance"),
    }
)
"""Keywords that exclude nothing, wherever they stand."""
_SCHEMA = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
NAMED_SCHEMAS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
"""Keywords whose value is an object of schemas."""
_IN_PLACE = ("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "oneOf")
"""Keywords whose schemas evaluate properties or items of the same value."""
_TYPES = {
    **dict.fromkeys(("contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"), "array"),
    **dict.fromkeys(
        ("dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"), "object"
    ),
}
"""The type whose values a keyword is about."""


def simplified(schema: Any) -> Any:
    """Return an equivalent schema. References to its parts stay valid, except to those without an effect."""
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _simplified_value(key, value) for key, value in schema.items()}
    if "not" in result and _is_anything(result["not"]):
        return False
    # These two mean the same where nothing else evaluates properties or items.
    for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if result.get(key) is False and not any(each in result for each in _IN_PLACE):
            result.setdefault(same, False)
    if "unevaluatedProperties" in result and _is_anything(result["unevaluatedProperties"]):
        result.setdefault("additionalProperties", True)  # without either, `schema_adaptation` allows no other keys
    return {key: value for key, value in result.items() if not _is_idle(key, result)}


def inner_schemas(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the schemas in the value of a keyword, with their relative paths."""
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return [(f"/{key}/{name}", each) for name, each in value.items()]
    if key in _SCHEMAS and isinstance(value, list):
        return [(f"/{key}/{index}", each) for index, each in enumerate(value)]
    return [(f"/{key}", value)] if key in _SCHEMA else []


def _simplified_value(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return rust_pattern(value)
    if key == "patternProperties" and isinstance(value, Mapping):
        return {rust_pattern(pattern): simplified(each) for pattern, each in value.items()}
    if key in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: simplified(each) for name, each in value.items()}
    if key in _SCHEMAS and isinstance(value, list):
        return [simplified(each) for each in value]
    return simplified(value) if key in _SCHEMA else value


def _is_anything(schema: Any) -> bool:
    """Return whether every value matches a simplified schema, as far as is obvious."""
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= _ANNOTATIONS)


def _is_idle(key: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword excludes nothing that the others of its schema allow."""
    value = schema[key]
    types = schema.get("type", _TYPES.get(key))
    if key in _TYPES and _TYPES[key] not in (types if isinstance(types, list) else (types,)):
        return isinstance(types, str | list)
    match key:
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "propertyNames":
            return _is_any_string(value)
        case "unevaluatedProperties":
            return _is_anything(value) or "additionalProperties" in schema
        case "unevaluatedItems":
            return _is_anything(value) or isinstance(schema.get("items"), Mapping | bool)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, Mapping) and all(_is_met(each, schema.get("required")) for each in value.values())
        case "not":
            return value is False
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or _is_idle("contains", schema)
        case "if" | "then" | "else":
            return "if" not in schema or all(_is_anything(schema.get(each, True)) for each in ("then", "else"))
    return False


def _is_any_string(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    types = schema.get("type", "string")
    others = {key: value for key, value in schema.items() if key != "type" and (key, value) != ("minLength", 0)}
    return _is_anything(others) and (types == "string" or (isinstance(types, list) and "string" in types))


def _is_met(dependency: Any, required: Any) -> bool:
    """Return whether a dependency excludes nothing beyond the required names."""
    if isinstance(dependency, list):
        names = required if isinstance(required, list) else []
        return all(name in names for name in dependency)
    return _is_anything(dependency)


# --- regular expressions ---

_PATTERN_PART = re.compile(
    r"""
      (?P<pair>    \\u[dD][89abAB][0-9A-Fa-f]{2} \\u[dD][c-fC-F][0-9A-Fa-f]{2} )
    | (?P<class>   \\[dDsSwW] | \\[pP]\{[^}]*\} )
    | (?P<control> \\c[A-Za-z] )
    | (?P<zero>    \\0(?![0-9]) )
    | (?P<boundary>\\b )
    | (?P<literal> \\[<>] | \\[^\x00-\x7f] )
    | (?P<other>   \\u\{[^}]*\} | \\u[0-9A-Fa-f]{4} | \\x[0-9A-Fa-f]{2} | \\. | . )
    """,
    re.VERBOSE | re.DOTALL,
)


def rust_pattern(pattern: str) -> str:
    r"""Return a regular expression of ECMA-262 in the syntax of Rust's `regex`, as far as the two differ.

    Inside of brackets, `[`, `&&`, `~~` and `--` are operators in Rust. Some escapes are missing there (`\0`, `\cJ`,
    `[\b]`, two surrogates for one character, and those of characters that need none, as in `\é`), or mean something
    else: `\<` is the beginning of a word.
    """
    parts = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("[^]", position):  # any character
            parts.append(r"[\s\S]")
            position += 3
        elif pattern[position] == "[":
            text, position = _rust_set(pattern, position)
            parts.append(text)
        else:
            found = _PATTERN_PART.match(pattern, position)
            assert found is not None  # it matches any character
            parts.append(found[0] if found.lastgroup == "boundary" else _rust_character(found))
            position = found.end()
    return "".join(parts)


def _rust_set(pattern: str, begin: int) -> tuple[str, int]:
    """Return the set that begins at a bracket, and the position after it."""
    position = begin + (2 if pattern.startswith("[^", begin) else 1)
    parts = [pattern[begin:position]]
    may_begin_range = is_in_range = False
    while position < len(pattern) and pattern[position] != "]":
        found = _PATTERN_PART.match(pattern, position)
        assert found is not None  # it matches any character
        position = found.end()
        if found[0] == "-" and may_begin_range and not pattern.startswith("]", position):
            parts.append("-")
            may_begin_range, is_in_range = False, True
        else:
            parts.append(rf"\{found[0]}" if found[0] in "[&~-" else _rust_character(found))
            may_begin_range = not is_in_range and found.lastgroup != "class"
            is_in_range = False
    return "".join(parts) + pattern[position : position + 1], position + 1


def _rust_character(part: re.Match[str]) -> str:
    text = part[0]
    match part.lastgroup:
        case "pair":
            return rf"\x{{{0x10000 + ((int(text[2:6], 16) - 0xD800) << 10) + int(text[8:12], 16) - 0xDC00:x}}}"
        case "control":
            return rf"\x{{{ord(text[2]) % 32:x}}}"
        case "zero":
            return r"\x00"
        case "boundary":  # a backspace: rust_pattern handles those outside of brackets
            return r"\x08"
        case "literal":
            return rf"\x{{{ord(text[1]):x}}}"
    return text
