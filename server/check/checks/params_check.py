"""Which parameters the rows of a check get.

Rows with different parameters are what shows that a processor takes one row's for all. So where an author gives one
set, a second one is made of it, if the processor takes that too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from logitship.server.check.check_options import UsageError

Params = Mapping[str, Any]


def given_params(schema: Mapping[str, Any] | None, given: Sequence[Params]) -> list[Params]:
    """What the author gave; else the examples of the schema; else no parameters.

    Args:
        schema: the class's `params_schema`.

    Raises:
        UsageError: the schema requires a parameter of which neither it nor the author gives a value.
    """
    if given:
        return list(given)
    if not isinstance(schema, Mapping):
        return [{}]
    examples = [each for each in _list(schema.get("examples")) if isinstance(each, Mapping)]
    return examples or _by_property(schema)


def _by_property(schema: Mapping[str, Any]) -> list[Params]:
    properties = schema.get("properties")
    described = properties.items() if isinstance(properties, Mapping) else ()
    values = {name: _examples(each) for name, each in described if isinstance(each, Mapping)}
    for name in _list(schema.get("required")):
        if not values.get(name):
            raise UsageError(
                f"params: {name!r} is required by the class's params_schema, which has no example of it: give params "
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
    """The value, if it is what JSON Schema has there."""
    return list(value) if isinstance(value, list | tuple) else []


def with_a_variant(sets: list[Params], runs: Callable[[Params], bool]) -> list[Params]:
    """The sets; if there is only one, also one that was made of it, if there is one that runs.

    Args:
        runs: whether the processor takes a set.
    """
    if len(sets) != 1:
        return sets
    for variant in _variants(sets[0]):
        if variant != sets[0] and runs(variant):
            return [*sets, variant]
    return sets


def _variants(params: Params) -> Iterator[Params]:
    yield _varied(params, numbers=True, texts=True)
    yield _varied(params, numbers=True, texts=False)
    yield _varied(params, numbers=False, texts=True)


def _varied(value: Any, *, numbers: bool, texts: bool) -> Any:
    match value:
        case bool() | None:
            return value
        case int() if numbers:
            return value + 1
        case float() if numbers:
            return value * 1.25
        case str() if texts:
            return _next_letter(value)
        case Mapping():
            return {key: _varied(item, numbers=numbers, texts=texts) for key, item in value.items()}
        case list() | tuple():
            return [_varied(item, numbers=numbers, texts=texts) for item in value]
    return value


def _next_letter(text: str) -> str:
    """`"e"` → `"f"`, `"cat"` → `"cau"`: the last letter is the next one of the alphabet."""
    for place in reversed(range(len(text))):
        letter = text[place]
        if letter.isascii() and letter.isalpha():
            following = {"z": "a", "Z": "A"}.get(letter) or chr(ord(letter) + 1)
            return text[:place] + following + text[place + 1 :]
    return text
