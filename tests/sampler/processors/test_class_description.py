from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship import CustomLogitProcessor
from logitship.client.errors import ProcessorLoadError
from logitship.sampler.processors.class_description import ClassDescription, describe, from_bytes, to_bytes


class Silent(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits


class Described(Silent):
    __doc__ = "Bans\n    a token.\n\n    And more.\n    "

    params_schema: ClassVar = {"type": "object", "properties": {"token_id": {"type": "integer"}}}


def test_description_of_a_class() -> None:
    assert describe(Described) == ClassDescription("Described", "Bans a token.", Described.params_schema)
    assert describe(Silent) == ClassDescription("Silent")  # not what its base class says


@pytest.mark.parametrize(
    ("attributes", "description", "schema"),
    [
        ({"__doc__": "x" * 5000}, "x" * 1000, None),
        ({"__doc__": 5}, "", None),
        ({"__doc__": "a\x1b[31m\ud800"}, "a\\x1b[31m\\ud800", None),
        ({"params_schema": {"a": (1, 2)}}, "", {"a": [1, 2]}),
    ],
)
def test_invalid_attributes_are_dropped(attributes: dict[str, Any], description: str, schema: Any) -> None:
    cls = type("P", (), {})
    for name, value in attributes.items():
        setattr(cls, name, value)
    described = describe(cls)
    assert described == ClassDescription("P", description, schema)
    assert from_bytes(to_bytes(described)) == described


@pytest.mark.parametrize("schema", [[1], 5, {"a": object()}, {"a": "\ud800"}, {"a": "x" * (1 << 15)}])
def test_schema_that_could_not_be_enforced_is_refused(schema: Any) -> None:
    with pytest.raises(ProcessorLoadError, match="params_schema is not a JSON object of at most 32768 bytes"):
        describe(type("P", (), {"params_schema": schema}))


def test_longest_description_fits_into_a_reply() -> None:
    longest = type("\x01" * 9000, (), {"__doc__": "é" * 5000, "params_schema": {"a": "x" * 32_000}})
    described = describe(longest)
    assert described.params_schema
    assert len(to_bytes(described)) < 1 << 16


@given(
    st.binary(max_size=60)
    | st.tuples(st.text(), st.text(), st.none() | st.dictionaries(st.text(), st.floats())).map(
        lambda value: json.dumps(value).encode(errors="surrogatepass")
    )
)
def test_untrusted_bytes_are_sanitized_or_rejected(body: bytes) -> None:
    try:
        described = from_bytes(body)
    except ValueError:
        return
    assert 1 <= len(described.name) <= 200
    assert len(described.description) <= 1000
    assert not re.search(r"[\s\x00-\x1f\x7f-\x9f]", described.name)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", described.description)
    (described.name + described.description).encode()


@pytest.mark.parametrize("body", [b"", b"P", b'"P"', b"[]", b'["P", "", []]', b'["P", "", null, 1]', b"[" * 60000])
def test_invalid_bytes_are_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a class description|line 1|depth"):
        from_bytes(body)
