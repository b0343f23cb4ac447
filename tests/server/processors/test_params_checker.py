"""`params_schema` is checked by jsonschema, in a process that is killed when a check takes too long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest

from logitship.builtin_processors.params import PreparationUnavailable
from logitship.client.errors import ProcessorLoadError
from logitship.sampler.processors.executor import DisabledExecutor, ExecutorUnavailable, LoadedProcessor
from logitship.server.processors import params_checker
from logitship.server.processors.check_params import check
from logitship.server.processors.params_checker import InvalidParams, ParamsChecker


@pytest.fixture(scope="module")
def checker() -> Iterator[ParamsChecker]:
    checker = ParamsChecker(cpu_limit=1.0)
    yield checker
    checker.close()


def with_schema(schema: dict[str, Any] | None) -> LoadedProcessor:
    return LoadedProcessor("digest", "Counts", DisabledExecutor(""), None, params_schema=schema)


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (None, {}),
        ({}, {}),
        ({"$defs": {"n": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}, {"a": None}),
        ({"properties": {"a": {"multipleOf": 3}}}, {"a": 3 * 10**400}),
        ({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 1.1}),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "patternProperties": {"^x": False}},
            {"a": 1, "b": 2},
        ),
        ({"properties": {"a": {"pattern": r"^(?!x)\w+\Z"}}}, {"a": "é"}),
        ({"properties": {"a": {"type": "array"}, "b": {"maximum": 1}}}, {"a": (1, 2), "b": -float("inf")}),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}, {"a": object, "b": MappingProxyType({})}),
        ({"properties": {"ids": {"items": {"type": "integer"}, "uniqueItems": True}}}, {"ids": list(range(5000))}),
        ({"title": "T", "example": {}, "properties": {"a": {"discriminator": {}, "format": "date"}}}, {"a": "x"}),
    ],
)
def test_matching_params(checker: ParamsChecker, schema: dict[str, Any] | None, params: dict[str, Any]) -> None:
    checker.check_schema(with_schema(schema))
    checker.check(with_schema(schema), params, "")


@pytest.mark.parametrize(
    ("schema", "params", "problem"),
    [
        ({"required": ["a"]}, {}, "params: 'a' is a required property"),
        ({"type": "array"}, {}, "params: {} is not of type 'array'"),
        (
            {"properties": {"a": {"items": {"minimum": 3}}}},
            {"a": [3, 2]},
            "params.a[1]: 2 is less than the minimum of 3",
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
            {"a": [1]},
            "params.a: [1] is not valid under any of the given schemas: [1] is not of type 'integer'; "
            "[1] is not of type 'null'",
        ),
        (
            {"properties": {"word": {}}, "additionalProperties": False},
            {"wird": 1},
            "params: Additional properties are not allowed ('wird' was unexpected)",
        ),
        ({"properties": {"a": {"maxLength": 1}}}, {"a": "é" * 99}, f"params.a: '{'é' * 78}… is too long"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": object}, "params.a: \"<class 'object'>\" is not of type"),
        ({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 10**400}, "params: cannot be checked: OverflowError"),
        ({"$ref": "#"}, {}, "params: nested too deeply, or params_schema recurses infinitely"),
    ],
)
def test_problem_says_where_and_why(
    checker: ParamsChecker, schema: dict[str, Any], params: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidParams) as raised:
        checker.check(with_schema(schema), params, "")
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"requird": ["a"]}, "params_schema: 'requird' is not a keyword of JSON Schema"),
        ({"anyOf": [{"properties": {"a": {"foo": 1}}}]}, "params_schema: 'foo' is not a keyword"),
        ({"$defs": {"a": {"foo": 1}}}, "params_schema: 'foo' is not a keyword"),
        ({"definitions": {"a": {"foo": 1}}}, "params_schema: 'foo' is not a keyword"),
        ({"$defs": 5}, "params_schema.$defs: 5 is not of type 'object'"),
        ({"properties": {"a": 5}}, "params_schema.properties.a: 5 is not of type 'object', 'boolean'"),
        ({"properties": {"a": {"type": "strin"}}}, "params_schema.properties.a.type: 'strin' is not"),
        ({"items": [{}]}, "params_schema.items: [{}] is not of type 'object', 'boolean'"),
        ({"required": ["a", "a"]}, "params_schema.required: ['a', 'a'] has non-unique elements"),
        ({"minimum": True}, "params_schema.minimum: True is not of type 'number'"),
        ({"multipleOf": 0}, "params_schema.multipleOf: 0 is less than or equal to the minimum of 0"),
        ({"anyOf": []}, "params_schema.anyOf: [] should be non-empty"),
        ({"pattern": "("}, "params_schema.pattern: '(' is not a 'regex'"),
        (
            {"$ref": "http://169.254.169.254/x"},
            "params_schema: there is nothing at 'http://169.254.169.254/x': only re",
        ),
        ({"$ref": "#/$defs/missing"}, "params_schema: there is nothing at '#/$defs/missing'"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "params_schema: there is nothing at '#/$defs/b'"),
        ({"$ref": "#/title", "title": "x"}, "params_schema: 'x' is not of type 'object', 'boolean'"),
        ({"$ref": "#/default", "default": {"minimum": "x"}}, "params_schema.minimum: 'x' is not of type 'number'"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused(checker: ParamsChecker, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProcessorLoadError) as raised:
        checker.check_schema(with_schema(schema))
    assert str(raised.value).startswith(reason)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def test_deep_schema_is_refused(checker: ParamsChecker) -> None:
    checker.check_schema(with_schema(nested(64)))
    with pytest.raises(ProcessorLoadError, match=r"^params_schema: nested too deeply"):
        checker.check_schema(with_schema(nested(900)))


def test_deep_params_are_checked(checker: ParamsChecker) -> None:
    params: dict[str, Any] = {}
    for _ in range(500):
        params = {"a": params}
    checker.check(with_schema({"type": "object", "properties": {"a": {"$ref": "#"}}}), params, "")


DOUBLING: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2} for i in range(1, 31)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "params"),
    [
        ({"$defs": {"a0": {"type": "object"}, **DOUBLING}, "$ref": "#/$defs/a30"}, {}),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, {"a": "a" * 1000 + "b"}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"x": i} for i in range(20_000)]}),
        ({"properties": {"a": {"items": {"enum": list(range(5000))}}}}, {"a": list(range(5000))}),
        ({"anyOf": [{"additionalProperties": False}] * 900}, dict.fromkeys(map(str, range(50_000)))),
    ],
)
def test_hostile_check_is_ended(checker: ParamsChecker, schema: dict[str, Any], params: dict[str, Any]) -> None:
    used = time.process_time()
    with pytest.raises(InvalidParams, match="it takes too much time: make it simpler"):
        checker.check(with_schema(schema), params, "")
    assert time.process_time() - used < 0.5  # none of it in this process
    checker.check(with_schema({"required": ["a"]}), {"a": 1}, "")  # as before


def test_check_that_needs_too_much_memory_is_ended(checker: ParamsChecker) -> None:
    with pytest.raises(InvalidParams, match=r"too much (memory|time)"):
        checker.check(with_schema({"anyOf": [{"type": "array"}] * 900}), {"a": "x" * 1_000_000}, "")


def test_nesting_that_json_cannot_have(checker: ParamsChecker) -> None:
    params: dict[str, Any] = {}
    for _ in range(200_000):
        params = {"a": params}
    with pytest.raises(InvalidParams, match="nested too deeply"):
        checker.check(with_schema({"type": "object"}), params, "")


def test_hostile_schema_is_refused(checker: ParamsChecker) -> None:
    schema = {"pattern": "(" * 10_000}
    with pytest.raises(ProcessorLoadError, match=r"^params_schema"):
        checker.check_schema(with_schema(schema))


def test_checks_that_cannot_be_made_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params_checker, "_SCRIPT", "/nonexistent.py")
    with pytest.raises(PreparationUnavailable, match="too busy to check the parameters"):
        ParamsChecker().check(with_schema({}), {}, "")
    with pytest.raises(ExecutorUnavailable, match="too busy to check the parameters"):
        ParamsChecker().check_schema(with_schema({}))
    monkeypatch.setattr(params_checker, "_TIMEOUT", 0.0)
    busy = ParamsChecker()
    with (
        busy._slots.use("a", 1.0),
        busy._slots.use("b", 1.0),
        pytest.raises(PreparationUnavailable, match="checking other parameters"),
    ):
        busy.check(with_schema({}), {}, "c")


def test_schema_is_checked_without_a_process() -> None:
    assert check(json.dumps({"required": ["a"]}), None) is None
    assert check("{}", {"a": 1}) is None
    assert check(json.dumps({"required": 1}), None) == (
        "params_schema",
        "params_schema.required: 1 is not of type 'array'",
    )
