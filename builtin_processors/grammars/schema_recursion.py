"""Finds infinitely recursive parts of JSON schemas, which no text matches.

llguidance lets some of these begin, and the output would nest forever; of others it only says `NoExtensionBias`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_MAX_VISITS = 100_000
"""Schemas to visit at most, some 0.1 seconds. Larger ones are not examined."""


def without_endless_references(schema: Any) -> Any:
    """Return an equivalent of a schema, with `false` in place of references to what no text matches.

    Raises:
        ValueError: no text matches the schema itself; says where it refers to itself.
    """
    recursion = _Recursion(schema)
    try:
        endless = recursion.endless_targets()
    except (SchemaTooLarge, RecursionError):
        return schema
    if "#" in endless and (found := recursion.endless_reference()) is not None:
        at, target = found
        raise ValueError(f"no text matches it: infinite recursion: {at} refers back to {target}")
    return _without(schema, endless) if endless else schema


def resolved_reference(schema: Any, target: str) -> Any:
    """Return the part of a schema that a reference refers to; true, which anything matches, if it is not found."""
    if target != "#" and not target.startswith("#/"):
        return True
    found = schema
    for name in target[1:].split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key in map(str, range(len(found))):
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            return True
    return found


class SchemaTooLarge(Exception):
    """The schema is not examined."""


class _Recursion:
    """The references of a schema.

    Args:
        schema: the whole schema.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._visits = 0
        self._satisfiable: set[str] = set()
        """Targets of references that some text matches, as far as they are known."""

    def endless_targets(self) -> set[str]:
        """Return the targets of references that no text matches."""
        targets = {"#", *self._targets(self._schema)}
        found = True
        while found:  # a target may need another one that was found in this pass
            new = {each for each in targets - self._satisfiable if self._is_satisfiable(self._resolved(each))}
            self._satisfiable |= new
            found = bool(new)
        return targets - self._satisfiable

    def endless_reference(self) -> tuple[str, str] | None:
        """Return the place of a reference without an end, and its target, after `endless_targets`."""
        return self._endless("#", self._schema, set())

    def _endless(self, at: str, schema: Any, passed: set[str]) -> tuple[str, str] | None:
        """Follow parts that no text matches to a reference that was passed before."""
        for group in _needed(schema):
            if any(self._is_satisfiable(part) for _, part in group):
                continue
            path, part = group[0]
            if path != "/$ref":
                return self._endless(at + path, part, passed)
            if part.target in passed or part.target == "#":
                return f"{at}/$ref", part.target
            return self._endless(part.target, self._resolved(part.target), passed | {part.target})
        return None

    def _is_satisfiable(self, schema: Any) -> bool:
        """Return whether some text matches, as far as is known."""
        self._visit()
        if isinstance(schema, _Reference):
            return schema.target in self._satisfiable
        return all(any(self._is_satisfiable(part) for _, part in group) for group in _needed(schema))

    def _targets(self, schema: Any) -> Iterator[str]:
        self._visit()
        if isinstance(schema, Mapping):
            if isinstance(target := schema.get("$ref"), str):
                yield target
            for part in schema.values():
                yield from self._targets(part)
        elif isinstance(schema, list):
            for part in schema:
                yield from self._targets(part)

    def _resolved(self, target: str) -> Any:
        return resolved_reference(self._schema, target)

    def _visit(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise SchemaTooLarge


class _Reference:
    """A reference to the schema at `target`."""

    def __init__(self, target: str) -> None:
        self.target = target


def _without(value: Any, endless: set[str]) -> Any:
    if isinstance(value, list):
        return [_without(part, endless) for part in value]
    if not isinstance(value, Mapping):
        return value
    target = value.get("$ref")
    if isinstance(target, str) and target in endless:
        return False
    return {key: _without(part, endless) for key, part in value.items()}


def _needed(schema: Any) -> Iterator[Sequence[tuple[str, Any]]]:
    """Yield groups of (path, part). A text that matches the schema contains a match of some part of each group."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(target := schema.get("$ref"), str):
        yield [("/$ref", _Reference(target))]
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            yield [(f"/{name}/{index}", part) for index, part in enumerate(parts)]
    if isinstance(parts := schema.get("allOf"), list):
        yield from ([(f"/allOf/{index}", part)] for index, part in enumerate(parts))
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            names = [name for name in required if isinstance(name, str) and name in properties]
            yield from ([(f"/properties/{name}", properties[name])] for name in names)
    if schema.get("type") == "array":
        yield from _needed_items(schema)


def _needed_items(schema: Mapping[str, Any]) -> Iterator[Sequence[tuple[str, Any]]]:
    count = schema.get("minItems", 0)
    if not isinstance(count, int | float):
        return
    prefix = schema.get("prefixItems")
    prefix = prefix if isinstance(prefix, list) else []
    yield from ([(f"/prefixItems/{index}", part)] for index, part in enumerate(prefix) if index < count)
    if count > len(prefix) and "items" in schema:
        yield [("/items", schema["items"])]
