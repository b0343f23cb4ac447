"""`params_schema`: the verdicts of jsonschema, in bounded time."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.client.params_schema import MAX_SCHEMA_BYTES, InvalidSchema, ParamsSchema, as_json_schema

SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 1.0, 0.5, -3, "", "a", "ab", "b1"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.sampled_from([0, 1, 2, 0.5])
SIZES = st.integers(0, 3)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
NAMES = st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True)
PATTERNS = st.sampled_from(["^a", "b$", "[0-9]", "a+b", r"\w"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
            "minimum": NUMBERS,
            "maximum": NUMBERS,
            "exclusiveMinimum": NUMBERS,
            "exclusiveMaximum": NUMBERS,
            "multipleOf": st.sampled_from([1, 2, 0.5]),
            "minLength": SIZES,
            "maxLength": SIZES,
            "pattern": PATTERNS,
            "minItems": SIZES,
            "maxItems": SIZES,
            "uniqueItems": st.booleans(),
            "items": inner,
            "prefixItems": some,
            "minProperties": SIZES,
            "maxProperties": SIZES,
            "required": NAMES,
            "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "additionalProperties": inner,
            "propertyNames": inner,
            "dependentRequired": st.dictionaries(st.sampled_from(["a", "b"]), NAMES, max_size=2),
            "allOf": some,
            "anyOf": some,
            "oneOf": some,
            "not": inner,
        },
    )


SCHEMAS = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=4)


@pytest.mark.slow
@given(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), st.lists(VALUES, min_size=1, max_size=5))
def test_verdicts_are_those_of_jsonschema(schema: dict[str, Any], values: list[Any]) -> None:
    ours = ParamsSchema({"properties": {"value": schema}})
    theirs = jsonschema.Draft202012Validator(schema)
    for value in values:
        assert (ours.problem({"value": value}) == "") == theirs.is_valid(value)


@pytest.mark.parametrize(
    ("schema", "params", "problem"),
    [
        ({"required": ["a"]}, {}, "params.a: required"),
        ({"type": "array"}, {}, "params: expected a list, got an object"),
        (
            {"properties": {"a": {"type": ["integer", "null"]}}},
            {"a": "x"},
            "params.a: expected an integer or null, got 'x'",
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
            {"a": [1]},
            "params.a: expected an integer or null, got a list of 1",
        ),
        ({"properties": {"a": {"items": {"minimum": 3}}}}, {"a": [3, 2]}, "params.a[1]: expected 3 or more, got 2"),
        (
            {"properties": {"a": {"multipleOf": 2}}},
            {"a": (1 << 53) + 1},
            "params.a: expected a multiple of 2, got 9007199254740993",
        ),
        ({"properties": {"a": {"multipleOf": 3}}}, {"a": 3 * 10**400}, ""),
        ({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 1.1}, ""),
        ({"properties": {"a": {"enum": ["x", "y"]}}}, {"a": True}, "params.a: expected one of 'x', 'y', got true"),
        ({"properties": {"a": {"const": 1}}}, {"a": None}, "params.a: expected 1, got null"),
        (
            {"properties": {"word": {}}, "additionalProperties": False},
            {"wird": 1},
            "params.wird: there is no such parameter, only word",
        ),
        (
            {"properties": {"a": {"pattern": "^x"}}},
            {"a": "y"},
            "params.a: expected a string that matches '^x', got 'y'",
        ),
        (
            {"$defs": {"n": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
            {"a": 1},
            "params.a: expected null, got 1",
        ),
        (
            {"properties": {"a": {"maxLength": 1}}},
            {"a": "é" * 99},
            f"params.a: expected 1 characters at most, got '{'é' * 76}...",
        ),
    ],
)
def test_problem_says_what_was_expected(schema: dict[str, Any], params: dict[str, Any], problem: str) -> None:
    assert ParamsSchema(schema).problem(params) == problem


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"if": {}}, "params_schema.if: this keyword is not supported"),
        (
            {"properties": {"a": {"type": "strin"}}},
            "params_schema.properties.a.type: must be a name or a list of different names",
        ),
        ({"properties": {"a": 5}}, "params_schema.properties.a: must be an object or a boolean"),
        ({"items": [{}]}, "params_schema.items: must be an object or a boolean"),
        ({"required": "a"}, "params_schema.required: must be a list of different names"),
        ({"required": ["a", "a"]}, "params_schema.required: must be a list of different names"),
        ({"type": ["null", "null"]}, "params_schema.type: must be a name or a list of different names"),
        ({"minimum": True}, "params_schema.minimum: must be a number"),
        ({"multipleOf": 0}, "params_schema.multipleOf: must be a number greater than 0"),
        ({"anyOf": []}, "params_schema.anyOf: must be a list of schemas, not empty"),
        ({"$ref": "http://169.254.169.254/x"}, "only references into the schema itself"),
        ({"$ref": "#/$defs/missing"}, "there is nothing at '#/$defs/missing'"),
        ({"$ref": "#/title", "title": "x"}, "'#/title' is not a schema"),
        ({"$ref": "#/default", "default": {"minimum": "x"}}, "params_schema.$ref.minimum: must be a number"),
        ({"$defs": {"a": {"foo": 1}}}, "params_schema.$defs.a.foo: this keyword is not supported"),
        ({"$defs": 5}, "params_schema.$defs: must be an object of schemas"),
        ({"pattern": "("}, "params_schema.pattern: not a regular expression"),
        ({"pattern": "(a)\\1"}, "params_schema.pattern: references to groups are not supported"),
        ({"allOf": [{"pattern": f"a{{900}}{i}"} for i in range(2)]}, "all patterns together are too large"),
        ({"title": "x" * MAX_SCHEMA_BYTES}, "bytes of JSON, at most"),
        ({"title": object()}, "params_schema: not JSON"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        ParamsSchema(schema)
    assert reason in str(raised.value)


def test_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"not": schema}
    with pytest.raises(InvalidSchema, match="nested deeper than 64"):
        ParamsSchema(schema)


DOUBLING: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2} for i in range(1, 31)}


NAMES_OF_SCHEMA = [f"a{i}" for i in range(2000)]


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        ({"$defs": {"a0": {"type": "object"}, **DOUBLING}, "$ref": "#/$defs/a30"}, {}),
        ({"$ref": "#"}, {}),
        ({"properties": {"a": {"pattern": "[^x]*a[^x]{900}!"}}}, {"a": "ab" * 10_000_000}),
        ({"properties": {"a": {"items": {"enum": list(range(5000))}}}}, {"a": list(range(5000))}),
        ({"anyOf": [{"additionalProperties": False}] * 900}, dict.fromkeys(map(str, range(50_000)))),
        ({"properties": {"a": {"items": {"properties": dict.fromkeys(NAMES_OF_SCHEMA, True)}}}}, {"a": [{}] * 20_000}),
        (
            {"properties": {"a": {"items": {"dependentRequired": {name: [] for name in NAMES_OF_SCHEMA}}}}},
            {"a": [{}] * 20_000},
        ),
        ({"properties": {"a": {"allOf": [{"not": {"const": "y"}}] * 900}}}, {"a": "x" * 1_000_000}),
    ],
)
def test_check_is_bounded(schema: dict[str, Any], params: dict[str, Any]) -> None:
    schema = ParamsSchema(schema)  # type: ignore[assignment]
    start = time.process_time()
    problem = schema.problem(params)  # type: ignore[attr-defined]
    assert re.search("takes too long|too deeply|recurses infinitely|is too long for a pattern", problem)
    assert time.process_time() - start < 2


def with_equal_hashes(count: int) -> list[list[int]]:
    """Return different pairs whose tuples have one hash: that of CPython, xxHash without a key, is a bijection."""
    first, second, start = 11400714785074694791, 14029467366897019727, 2870177450012600261
    size = 1 << 64

    def after(state: int, hashed: int) -> int:
        state = (state + hashed * second) % size
        return (state << 31 | state >> 33) % size * first % size

    wanted = 12345 * pow(first, -1, size) % size
    wanted = (wanted >> 31 | wanted << 33) % size
    pairs = ([x, (wanted - after(start, x)) * pow(second, -1, size) % size] for x in itertools.count())
    return list(itertools.islice((pair for pair in pairs if pair[1] < (1 << 61) - 1), count))


def test_items_with_equal_hashes_are_compared_fast() -> None:
    pairs = with_equal_hashes(10_000)
    assert len({hash(tuple(pair)) for pair in pairs}) == 1
    schema = ParamsSchema({"properties": {"a": {"uniqueItems": True}}})
    start = time.process_time()
    assert schema.problem({"a": pairs}) == ""
    assert time.process_time() - start < 0.5
    assert schema.problem({"a": [*pairs, pairs[0]]}) == "params.a: different items"


def test_bound_grows_with_the_parameters() -> None:
    schema = ParamsSchema({"properties": {"ids": {"items": {"type": "integer", "minimum": 0}, "uniqueItems": True}}})
    assert schema.problem({"ids": list(range(20_000))}) == ""


def test_only_pydantic_models_are_converted() -> None:
    assert as_json_schema({"type": "object"}) == {"type": "object"}
    assert as_json_schema(None) is None
