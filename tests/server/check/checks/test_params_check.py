"""Which parameters the rows get."""

from __future__ import annotations

from typing import Any

import pytest

from logitship.server.check.check_options import UsageError
from logitship.server.check.checks.params_check import given_params, with_a_variant


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (None, [{}]),
        ({}, [{}]),
        ({"examples": [{"n": 1}, {"n": 2}]}, [{"n": 1}, {"n": 2}]),
        ({"properties": {"n": {"default": 3}, "m": {"type": "integer"}}}, [{"n": 3}]),
        (
            {"properties": {"n": {"examples": [1, 2]}, "mode": {"enum": ["a", "b", "c"]}}, "required": ["n"]},
            [{"n": 1, "mode": "a"}, {"n": 2, "mode": "b"}, {"n": 1, "mode": "c"}],
        ),
        ({"properties": {"kind": {"const": None}}}, [{"kind": None}]),
        ({"properties": ["n"], "examples": 3, "required": "n"}, [{}]),
        (["no schema"], [{}]),
    ],
)
def test_examples_of_a_schema(schema: Any, expected: list[dict[str, Any]]) -> None:
    assert given_params(schema, []) == expected
    assert given_params(schema, [{"given": 1}]) == [{"given": 1}]


def test_a_required_parameter_needs_a_value() -> None:
    with pytest.raises(UsageError, match="'n' is required"):
        given_params({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, [])


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ({"token_ids": [3, 30]}, {"token_ids": [4, 31]}),
        ({"letter": "e", "nested": {"bias": 2.0}}, {"letter": "f", "nested": {"bias": 2.5}}),
        ({"text": "fiz", "flag": True, "none": None}, {"text": "fia", "flag": True, "none": None}),
        ({"text": "12!"}, None),
        ({}, None),
    ],
)
def test_a_second_set_is_made_of_the_first(params: dict[str, Any], variant: dict[str, Any] | None) -> None:
    expected = [params] if variant is None else [params, variant]
    assert with_a_variant([params], lambda _: True) == expected


def test_a_variant_must_run() -> None:
    params = {"mode": "strict", "n": 1}
    assert with_a_variant([params], lambda each: each["mode"] == "strict") == [params, {"mode": "strict", "n": 2}]
    assert with_a_variant([params], lambda each: each["n"] == 1) == [params, {"mode": "stricu", "n": 1}]
    assert with_a_variant([params], lambda _: False) == [params]


def test_several_sets_are_enough() -> None:
    sets: list[dict[str, Any]] = [{"n": 1}, {"n": 5}]
    assert with_a_variant([*sets], lambda _: True) == sets
