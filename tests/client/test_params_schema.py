from __future__ import annotations

from pydantic import BaseModel

from logitship.client.params_schema import as_json_schema, check_schema


def test_only_pydantic_models_are_converted() -> None:
    class Params(BaseModel):
        number: int

    assert as_json_schema(Params) == Params.model_json_schema()
    assert as_json_schema({"type": "object"}) == {"type": "object"}
    assert as_json_schema(None) is None


def test_what_the_server_checks_is_sent() -> None:
    check_schema({"requird": ["a"]})
