"""Decides whether the branches of each `oneOf` of a JSON schema exclude each other, so that it means `anyOf`.

llguidance only decides that for branches without references, and not from ranges and lengths. Its option
`coerce_one_of` takes each `oneOf` for `anyOf`, which is right if they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .schema_recursion import SchemaTooLarge, resolved_reference
from .schema_simplification import inner_schemas

_MAX_VISITS = 100_000
"""Schemas to visit at most, some 0.3 seconds. Larger ones are not decided."""
_MAX_DEPTH = 100
_MAX_ITEMS = 16
"""Items at the beginning of arrays that are compared."""
_TYPES: tuple[str, ...] = ("null", "boolean", "number", "string", "array", "object")


def has_exclusive_branches(schema: Any) -> bool:
    """Return whether no value matches two branches of a `oneOf` in the schema, as far as that can be decided."""
    try:
        return _Exclusion(schema).holds_everywhere()
    except (SchemaTooLarge, RecursionError):
        return False


class _Interval(NamedTuple):
    low: float
    high: float
    excludes_low: bool = False
    excludes_high: bool = False

    def is_below(self, other: _Interval) -> bool:
        touches = self.high == other.low and (self.excludes_high or other.excludes_low)
        return self.high < other.low or touches


_ANY = _Interval(-float("inf"), float("inf"))
_Parts = Sequence[Any]
"""Schemas that a value matches all of."""


class _Exclusion:
    """Compares parts of a schema.

    Args:
        schema: the whole schema.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._visits = 0
        self._comparing: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def holds_everywhere(self) -> bool:
        """Return whether the branches of each `oneOf` that can be reached exclude each other."""
        seen: set[int] = set()
        waiting = [self._schema]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            self._visit()
            seen.add(id(schema))
            if isinstance(target := schema.get("$ref"), str):
                waiting.append(resolved_reference(self._schema, target))
            for key, value in schema.items():
                if key not in ("$defs", "definitions"):
                    waiting += [each for _, each in inner_schemas(key, value)]
            if isinstance(branches := schema.get("oneOf"), list):
                others = {key: value for key, value in schema.items() if key != "oneOf"}
                alternatives = [list(self._alternatives([others, branch])) for branch in branches]
                for one, other in itertools.combinations(alternatives, 2):
                    if not self._all_exclude(one, other):
                        return False
        return True

    def _exclude(self, these: _Parts, those: _Parts) -> bool:
        """Return whether no value matches all schemas of both lists."""
        self._visit()
        key = (tuple(map(id, these)), tuple(map(id, those)))
        if key in self._comparing or len(self._comparing) > _MAX_DEPTH:
            return False
        self._comparing.add(key)
        exclude = self._all_exclude(list(self._alternatives(these)), list(self._alternatives(those)))
        self._comparing.remove(key)
        return exclude

    def _alternatives(self, parts: _Parts, known: frozenset[int] = frozenset()) -> Iterator[list[Mapping[str, Any]]]:
        """Yield lists of schemas, in one of which a value matches all if it matches all of `parts`.

        References are followed, and alternatives are told apart. Schemas in `known`, by their ids, are left out.
        """
        found: list[Mapping[str, Any]] = []
        choices: list[list[Any]] = []
        seen = set(known)
        waiting = list(parts)
        while waiting:
            part = waiting.pop()
            self._visit()
            if part is False:
                return
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            found.append(part)
            if isinstance(target := part.get("$ref"), str):
                waiting.append(resolved_reference(self._schema, target))
            waiting += _list(part, "allOf")
            choices += [each for name in ("anyOf", "oneOf") if (each := _list(part, name))]
        if not choices:
            yield found
            return
        for choice in itertools.product(*choices):
            self._visit()
            for inner in self._alternatives(choice, frozenset(seen)):
                yield [*found, *inner]

    def _all_exclude(self, these: list[list[Mapping[str, Any]]], those: list[list[Mapping[str, Any]]]) -> bool:
        """Return whether each of these alternatives excludes each of those."""
        for one, other in itertools.product(these, those):
            self._visit()
            if not all(self._exclude_as(each, one, other) for each in _types(one) & _types(other)):
                return False
        return True

    def _exclude_as(self, type_name: str, these: list[Mapping[str, Any]], those: list[Mapping[str, Any]]) -> bool:
        """Return whether no value of a type matches all schemas of both lists."""
        values, other_values = _values(these, type_name), _values(those, type_name)
        if values is not None and other_values is not None:
            return values.keys().isdisjoint(other_values)
        match type_name:
            case "number":
                limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
                return _apart(_intervals(these, values, *limits), _intervals(those, other_values, *limits))
            case "string":
                return _apart(_lengths(these, values, "Length"), _lengths(those, other_values, "Length"))
            case "array":
                if _apart(_lengths(these, values, "Items"), _lengths(those, other_values, "Items")):
                    return True
                least = max((_least(each, "minItems") for each in [*these, *those]), default=0)
                return any(
                    self._exclude([_item(each, index) for each in these], [_item(each, index) for each in those])
                    for index in range(int(min(least, _MAX_ITEMS)))
                )
            case "object":
                if _apart(_lengths(these, values, "Properties"), _lengths(those, other_values, "Properties")):
                    return True
                required = [name for each in [*these, *those] for name in _list(each, "required")]
                return any(
                    self._exclude([_property(each, name) for each in these], [_property(each, name) for each in those])
                    for name in dict.fromkeys(name for name in required if isinstance(name, str))
                )
        return False

    def _visit(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise SchemaTooLarge


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    known = {int: "number", float: "number", str: "string", list: "array"}
    return known.get(type(value), "object")


def _types(parts: list[Mapping[str, Any]]) -> set[str]:
    types: set[str] = set(_TYPES)
    for part in parts:
        if isinstance(names := part.get("type"), str | list):
            listed = [names] if isinstance(names, str) else names
            types &= {"number" if name == "integer" else name for name in listed if isinstance(name, str)}
        if (allowed := _allowed(part)) is not None:
            types &= set(map(_type_of, allowed))
    return types


def _allowed(part: Mapping[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return _list(part, "enum") if "enum" in part else None


def _values(parts: list[Mapping[str, Any]], type_name: str) -> dict[Any, Any] | None:
    """Return the possible values of a type, by a key that is equal for equal values; None if they are not listed."""
    found: dict[Any, Any] | None = None
    for part in parts:
        if (allowed := _allowed(part)) is not None:
            values = {_key(value): value for value in allowed if _type_of(value) == type_name}
            found = values if found is None else {key: value for key, value in found.items() if key in values}
    return found


def _key(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return _type_of(value), value


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _least(part: Mapping[str, Any], key: str) -> float:
    return _number(part.get(key), 0)


def _intervals(
    parts: list[Mapping[str, Any]], values: Mapping[Any, float] | None, low: str, high: str, *exclusive: str
) -> list[_Interval]:
    if values is not None:
        return [_Interval(value, value) for value in values.values()]
    lows = [(_ANY.low, False), *((_number(part.get(low), _ANY.low), False) for part in parts)]
    highs = [(_ANY.high, True), *((_number(part.get(high), _ANY.high), True) for part in parts)]
    if exclusive:
        lows += [(_number(part.get(exclusive[0]), _ANY.low), True) for part in parts]
        highs += [(_number(part.get(exclusive[1]), _ANY.high), False) for part in parts]
    (least, excludes_least), (most, includes_most) = max(lows), min(highs)
    return [_Interval(least, most, excludes_least, not includes_most)]


def _lengths(parts: list[Mapping[str, Any]], values: Mapping[Any, Any] | None, unit: str) -> list[_Interval]:
    lengths = None if values is None else {key: len(value) for key, value in values.items()}
    return _intervals(parts, lengths, f"min{unit}", f"max{unit}")


def _apart(these: list[_Interval], those: list[_Interval]) -> bool:
    return all(one.is_below(other) or other.is_below(one) for one in these for other in those)


def _item(part: Mapping[str, Any], index: int) -> Any:
    """Return the schema of an array's item."""
    items = part.get("items", True)
    first: list[Any] = items if isinstance(items, list) else _list(part, "prefixItems")
    if index < len(first):
        return first[index]
    return part.get("additionalItems", True) if isinstance(items, list) else items


def _property(part: Mapping[str, Any], name: str) -> Any:
    """Return a schema that the value of an object's property matches."""
    properties = part.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if part.get("patternProperties") else part.get("additionalProperties", True)
