"""The parameters of the rows of a check.

Rows with different parameters reveal a processor that applies one row's parameters to all rows. So if an author gives
only one set, a second one is derived from it, if the processor accepts that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .check_options import BATCH_SIZE_LIMIT, UsageError

Params = Mapping[str, Any]


def params_to_check(schema: Mapping[str, Any] | None, given: Sequence[Params]) -> list[Params]:
    """Return the given parameters, else the examples of the schema, else one empty set.

    Args:
        schema: the class's `params_schema`.
        given: by the author.

    Raises:
        UsageError: there are too many; or the schema requires a parameter, and neither it nor the author gives a value
            for it.
    """
    sets = list(given) or _of_schema(schema)
    if len(sets) > BATCH_SIZE_LIMIT:
        raise UsageError(f"params: {len(sets)} are given, at most {BATCH_SIZE_LIMIT} can be checked")
    return sets


def _of_schema(schema: Mapping[str, Any] | None) -> list[Params]:
    if not isinstance(schema, Mapping):
        return [{}]
    examples = [each for each in _list(schema.get("examples")) if isinstance(each, Mapping)]
    return examples or _by_property(schema)


def _by_property(schema: Mapping[str, Any]) -> list[Params]:
    properties = schema.get("properties")
    described = properties.items() if isinstance(properties, Mapping) else ()
    values = {name: _examples(each) for name, each in described if isinstance(each, Mapping)}
    for name in _list(schema.get("required")):
        if isinstance(name, str) and not values.get(name):  # an invalid schema is reported later
            raise UsageError(
                f"params: {name!r} is required by the class's params_schema, which has no example for it: give params "
                f"""(on the command line: --params '{{"{name}": …}}')"""
            )
    values = {name: examples for name, examples in values.items() if examples}
    count = max((len(examples) for examples in values.values()), default=1)
    return [{name: examples[i % len(examples)] for name, examples in values.items()} for i in range(min(count, 4))]


def _examples(schema: Mapping[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    default = [schema["default"]] if "default" in schema else []
    return _list(schema.get("examples")) or _list(schema.get("enum")) or default


def _list(value: Any) -> list[Any]:
    """Return the value as a list, or an empty list if it is not a JSON array."""
    return list(value) if isinstance(value, list | tuple) else []


def add_variant(sets: list[Params], runs: Callable[[Params], bool]) -> list[Params]:
    """Return the sets. If there is only one, append a variant of it that the processor accepts, if any.

    Args:
        sets: the parameters that are known.
        runs: returns whether the processor accepts a set.
    """
    if len(sets) != 1:
        return sets
    for variant in _variants(sets[0]):
        if variant != sets[0] and runs(variant):
            return [*sets, variant]
    return sets


def _variants(params: Params) -> Iterator[Params]:
    yield _varied(params, step=1, texts=True)
    yield _varied(params, step=1, texts=False)
    yield _varied(params, step=-1, texts=True)
    yield _varied(params, step=-1, texts=False)
    yield _varied(params, step=0, texts=True)


def _varied(value: Any, *, step: int, texts: bool) -> Any:
    """Change all numbers and texts in a value.

    Args:
        value: parameters, or a part of them.
        step: 1: greater numbers; -1: smaller ones; 0: the same.
        texts: change texts, too.
    """
    match value:
        case bool() | None:
            return value
        case int():
            return value + step
        case float() if step:
            return value * (1 + step / 4) or 0.5  # which most ranges contain that contain 0
        case str() if texts:
            return _next_letter(value)
        case Mapping():
            return {key: _varied(item, step=step, texts=texts) for key, item in value.items()}
        case list() | tuple():
            return [_varied(item, step=step, texts=texts) for item in value]
    return value


def _next_letter(text: str) -> str:
    """Replace the last letter by the next one of the alphabet: `"e"` → `"f"`, `"cat"` → `"cau"`."""
    for index in reversed(range(len(text))):
        letter = text[index]
        if letter.isascii() and letter.isalpha():
            following = {"z": "a", "Z": "A"}.get(letter) or chr(ord(letter) + 1)
            return text[:index] + following + text[index + 1 :]
    return text
