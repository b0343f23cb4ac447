"""Adapts JSON schemas to llguidance, so that no text can begin that cannot end as it usually does.

llguidance writes the keys of `properties` in their order, then additional ones, which must not be one of them. A model
that has gone past a key could then begin it, as an additional one, but not end it. So objects with `properties` have no
additional keys by default. Where a schema asks for them, they and the optional keys come in any order.

Escapes of printable characters by number are allowed in strings that have no pattern. llguidance compares patterns with
the escaped text, and so do additional keys with the other ones: a grammar with these has no such escapes.

llguidance reads numbers as 64-bit floats: others are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from logitship.builtin_processors.params import shown

from .schema_recursion import resolved_reference

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values have schemas by name."""
_VALUES = ("const", "enum", "default", "examples", "required")
"""Keywords whose values are no schemas."""
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
"""Keywords whose values are a schema or a list of schemas."""
_OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties", "required")
_COUNTS = ("minProperties", "maxProperties")
_OPENING = ("patternProperties", "additionalProperties", "unevaluatedProperties", *_COUNTS)
"""Keywords that ask for other keys than those of `properties`, or exclude them by themselves."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_EXACT = 1 << 53
"""All integers up to it are exact as 64-bit floats."""
_MAX_INTEGER = (1 << 63) - 1
"""Largest bound of llguidance's integers, to which it reduces larger floats."""
_ESCAPES_WITHOUT_U = 'nrbtf\\"'
_NEEDS_U = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that can only be escaped by their number."""
_NEEDS_U_IN_PATTERN = re.compile(r"\\x(?:[01]|7f|\{0*(?:1?[0-9a-f]|7f)\})|\\u00(?:[01]|7f)", re.IGNORECASE)
"""Such characters, and those with a short escape, as a simplified pattern names them."""
_ESCAPED_IN_PATTERN = re.compile(r"[^A-Za-z0-9]")


def adapt(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an equivalent of a schema, and the options of llguidance to compile it with.

    Raises:
        ValueError: it has a number that llguidance cannot represent; says where.
    """
    try:
        adaptation = _Adaptation(schema)
        adapted: dict[str, Any] = adaptation.schema("#", schema)
    except RecursionError:
        return schema, {}  # llguidance refuses what nests a fraction as deeply
    options: dict[str, Any] = {"json_allow_general_unicode_escapes": True}
    if adaptation.compares_texts and not adaptation.needs_u:
        options["json_allowed_escapes"] = _ESCAPES_WITHOUT_U
    return adapted, options


class _Adaptation:
    """The adaptation of one schema.

    Args:
        root: the whole schema.

    Attributes:
        compares_texts: strings or keys are compared with patterns or other keys.
        needs_u: a string of the schema has a character that must be escaped by its number.
    """

    def __init__(self, root: Any) -> None:
        self.compares_texts = self.needs_u = False
        self._root = root
        self._targets: set[int] = set()
        """Schemas that are referred to, by their identity: they may be anywhere."""
        self._references: set[str] = set()
        self._merged: set[int] = set()
        """Schemas that are merged with others. What is closed there, or reordered, would restrict the others."""
        self._merging: set[int] = set()
        """Schemas with which others are merged. What is closed there restricts the result."""
        self._find_targets(root)
        self._find_merged(root, is_schema=True)

    def _find_targets(self, value: Any) -> None:
        for part in _parts(value):
            self._find_targets(part)
        if isinstance(value, Mapping) and isinstance(target := value.get("$ref"), str):
            self._references.add(unquote(target))
            self._targets.add(id(resolved_reference(self._root, target)))

    def _find_merged(self, value: Any, *, is_schema: bool) -> None:
        for is_part, part in self._below(value, is_schema):
            self._find_merged(part, is_schema=is_part)
        if isinstance(value, Mapping) and (is_schema or id(value) in self._targets):
            num_groups = len(list(self._applied(value))) + any(name in value for name in _OBJECT_KEYWORDS)
            if num_groups > 1:
                self._merging.add(id(value))
                for is_part, part in self._below(value, True):
                    self._mark_merged(part, is_schema=is_part)
                self._mark_target(value)

    def _mark_merged(self, value: Any, *, is_schema: bool) -> None:
        """Mark a schema and all that is in it, because what two schemas say of one property is merged, too."""
        if id(value) in self._merged or not isinstance(value, Mapping | list):
            return
        self._merged.add(id(value))
        for is_part, part in self._below(value, is_schema):
            self._mark_merged(part, is_schema=is_part)
        self._mark_target(value)

    def _mark_target(self, value: Any) -> None:
        if isinstance(value, Mapping) and isinstance(target := value.get("$ref"), str):
            self._mark_merged(resolved_reference(self._root, target), is_schema=True)

    def _applied(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Yield groups of schemas. What matches `schema` matches one of each group."""
        if isinstance(target := schema.get("$ref"), str):
            yield [resolved_reference(self._root, target)]
        yield from ([part] for part in _list(schema.get("allOf")))
        yield from (_list(schema[name]) for name in ("anyOf", "oneOf") if name in schema)

    def _below(self, value: Any, is_schema: bool) -> Iterator[tuple[bool, Any]]:
        """Yield the parts of a value, and whether they are schemas."""
        if not isinstance(value, Mapping) or not (is_schema or id(value) in self._targets):
            yield from ((is_schema and isinstance(value, list), part) for part in _parts(value))
            return
        for key, part in value.items():
            if key in _MAPS and isinstance(part, Mapping):
                yield from ((True, each) for each in part.values())
            elif key not in _VALUES:
                yield key in _SCHEMAS, part

    def schema(self, path: str, value: Any, *, is_schema: bool = True) -> Any:
        """Return the equivalent of a part of the schema.

        Args:
            path: where it is.
            value: the part.
            is_schema: it is a schema or a list of schemas. Others may contain some that are referred to.
        """
        if isinstance(value, list):
            return [self.schema(f"{path}/{i}", part, is_schema=is_schema) for i, part in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if not is_schema and id(value) not in self._targets:
            return {key: self.schema(_joined(path, key), part, is_schema=False) for key, part in value.items()}
        self._check_numbers(path, value)
        adapted = {key: self._keyword(_joined(path, key), key, part) for key, part in value.items()}
        if id(value) in self._merging - self._merged:
            self._close_merged(adapted, value)
        elif isinstance(value.get("properties"), Mapping) and id(value) not in self._merged:
            is_referred_to = any(each.startswith(f"{path}/properties/") for each in self._references)
            _close(adapted, may_move=not is_referred_to)
        self.needs_u |= _NEEDS_U_IN_PATTERN.search(str(adapted.get("pattern"))) is not None
        self.compares_texts |= "pattern" in adapted or "patternProperties" in adapted
        self.compares_texts |= bool(adapted.get("properties")) and adapted.get("additionalProperties") is not False
        return adapted

    def _close_merged(self, adapted: dict[str, Any], schema: Mapping[str, Any]) -> None:
        """Exclude keys of objects that none of the schemas that are merged names, in place, unless one of them does."""
        parts = list(self._merged_parts(schema, set()))
        if any(name in part for part in parts for name in _OPENING):
            return  # llguidance merges what they say
        named = [part["properties"] for part in parts if isinstance(part.get("properties"), Mapping)]
        required = (name for part in parts for name in _list(part.get("required")) if _is_text(name))
        if any(named):
            names = dict.fromkeys([*(name for properties in named for name in properties), *required])
            adapted["properties"] = {name: {} for name in names} | (adapted.get("properties") or {})
            adapted["additionalProperties"] = False

    def _merged_parts(self, schema: Any, visited: set[int]) -> Iterator[Mapping[str, Any]]:
        if isinstance(schema, Mapping) and id(schema) not in visited:
            visited.add(id(schema))
            yield schema
            for group in self._applied(schema):
                for part in group:
                    yield from self._merged_parts(part, visited)

    def _keyword(self, path: str, key: str, value: Any) -> Any:
        if key in _VALUES:
            self.needs_u |= any(_NEEDS_U.search(text) for text in _texts(value))
            return value
        if key in _MAPS and isinstance(value, Mapping):
            self.needs_u |= any(_NEEDS_U.search(name) for name in value)
            return {name: self.schema(_joined(path, name), part) for name, part in value.items()}
        return self.schema(path, value, is_schema=key in _SCHEMAS)

    def _check_numbers(self, path: str, schema: Mapping[str, Any]) -> None:
        for key in _BOUNDS:
            if not _is_exact(schema.get(key), is_inclusive=not key.startswith("exclusive")):
                raise ValueError(
                    f"{path}/{key}: {shown(schema[key])} is not exact as a 64-bit float, with which the grammar"
                    " calculates: give a bound between -2^53 and 2^53, or leave it out"
                )
        for key in ("const", "enum"):
            for number in _numbers(schema.get(key)):
                if not _is_exact(number):
                    raise ValueError(
                        f"{path}/{key}: {shown(number)} is not exact as a 64-bit float, with which the grammar"
                        " calculates: give a number between -2^53 and 2^53, or a string"
                    )


def _close(schema: dict[str, Any], *, may_move: bool) -> None:
    """Exclude additional keys, or let optional ones come in any order, in place.

    Args:
        schema: a schema of objects with `properties`.
        may_move: nothing refers to its properties where they are.
    """
    properties, required = schema["properties"], [name for name in _list(schema.get("required")) if _is_text(name)]
    if not properties or any(name in schema for name in _COUNTS):
        return
    additional = schema.get("additionalProperties")
    if additional is None and "unevaluatedProperties" not in schema:
        schema["additionalProperties"] = False
        schema["properties"] = properties | {name: {} for name in required if name not in properties}
    elif additional not in (None, False) and "patternProperties" not in schema and may_move:
        optional = {name: part for name, part in properties.items() if name not in required}
        schema["properties"] = {name: part for name, part in properties.items() if name in required}
        schema["patternProperties"] = {f"^{_escaped(name)}$": part for name, part in optional.items()}


def _escaped(name: str) -> str:
    return _ESCAPED_IN_PATTERN.sub(lambda found: rf"\x{{{ord(found[0]):x}}}", name)


def _is_exact(value: Any, *, is_inclusive: bool = True) -> bool:
    """Return whether llguidance represents a number exactly; True for what is no number of JSON."""
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return True
    if -_MAX_EXACT <= value <= _MAX_EXACT:
        return True
    # A larger float may be what the parser of the request's body made of an integer.
    is_whole = isinstance(value, int) and is_inclusive and abs(value) <= _MAX_INTEGER
    return is_whole and (value in (int(float(value)), _MAX_INTEGER))


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    for part in _parts(value):
        yield from _numbers(part)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
    for part in _parts(value):
        yield from _texts(part)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _joined(path: str, key: str) -> str:
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
