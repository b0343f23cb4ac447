"""The parameters of a check's rows."""

from __future__ import annotations

from typing import Any

import pytest

from logitship.server.check.case_params import add_variant, params_to_check
from logitship.server.check.check_options import UsageError


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
        ({"required": [["n"], 3]}, [{}]),
    ],
)
def test_examples_from_schema(schema: Any, expected: list[dict[str, Any]]) -> None:
    assert params_to_check(schema, []) == expected
    assert params_to_check(schema, [{"given": 1}]) == [{"given": 1}]


def test_number_of_sets_is_bounded() -> None:
    with pytest.raises(UsageError, match="params: 257 are given, at most 256 can be checked"):
        params_to_check(None, [{}] * 257)


def test_required_parameter_needs_value() -> None:
    with pytest.raises(UsageError, match="'n' is required"):
        params_to_check({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, [])


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        ({"token_ids": [3, 30]}, {"token_ids": [4, 31]}),
        ({"letter": "e", "nested": {"bias": 2.0}}, {"letter": "f", "nested": {"bias": 2.5}}),
        ({"text": "fiz", "flag": True, "none": None}, {"text": "fia", "flag": True, "none": None}),
        ({"bias": 0.0}, {"bias": 0.5}),
        ({"text": "12!"}, None),
        ({}, None),
    ],
)
def test_variant_of_params(params: dict[str, Any], variant: dict[str, Any] | None) -> None:
    expected = [params] if variant is None else [params, variant]
    assert add_variant([params], lambda _: True) == expected


def test_variant_must_be_accepted() -> None:
    params = {"mode": "strict", "n": 1}
    assert add_variant([params], lambda each: each["mode"] == "strict") == [params, {"mode": "strict", "n": 2}]
    assert add_variant([params], lambda each: each["n"] == 1) == [params, {"mode": "stricu", "n": 1}]
    assert add_variant([params], lambda _: False) == [params]


def test_variant_with_smaller_numbers() -> None:
    """The first numbers may be the greatest that the class accepts."""
    params = {"probability": 1.0, "n": 3, "mode": "strict"}
    smaller = {"probability": 0.75, "n": 2, "mode": "strict"}
    assert add_variant([params], lambda each: each["n"] <= 3 and each["mode"] == "strict") == [params, smaller]


def test_no_variant_of_several_sets() -> None:
    sets: list[dict[str, Any]] = [{"n": 1}, {"n": 5}]
    assert add_variant([*sets], lambda _: True) == sets
