"""Each field of the peers' protocols is honoured, accepted without effect, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logitship.server.schemas import field_rules
from logitship.server.schemas.field_rules import Ignored, Refused
from tests.helpers.scripts import load_script

ROOT = Path(__file__).parents[3]
DATA = json.loads((ROOT / "tests" / "data" / "protocol_fields.json").read_text())
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}
HEADER = "X-Logitship-Ignored"


SCRIPT = load_script("protocol_fields")


@pytest.mark.parametrize("request_name", DATA)
def test_every_field_of_the_peers_has_a_rule(request_name: str) -> None:
    fields = {field for fields in DATA[request_name].values() for field in fields}
    assert len(fields) >= 2
    for field in fields:
        SCRIPT.rule_of(request_name, field)


def test_every_rule_is_about_a_field_of_a_peer() -> None:
    fields = {field for peers in DATA.values() for fields in peers.values() for field in fields}
    tables = [table for name, table in vars(field_rules).items() if name.endswith("_RULES")]
    assert len(tables) == 14
    assert {field for table in tables for field in table} <= fields


def test_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "protocol-fields.md").read_text() == SCRIPT.page()


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_are_named_in_a_header(path: str, client: Any) -> None:
    ignored = [field for request, field, rule in SCRIPT.fields_of_peers() if request == path and type(rule) is Ignored]
    assert len(ignored) > 2
    response = client.post(path, {**BODIES[path], **dict.fromkeys(ignored, "anything")})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == ", ".join(ignored)
    assert HEADER not in client.post(path, {**BODIES[path], **dict.fromkeys(ignored)}).headers


@pytest.mark.parametrize("path", BODIES)
def test_refused_fields_are_refused_with_their_reason(path: str, client: Any) -> None:
    refused = [
        (field, rule) for each, field, rule in SCRIPT.fields_of_peers() if each == path and type(rule) is Refused
    ]
    assert len(refused) > 10
    for field, rule in refused:
        error = client.post(path, {**BODIES[path], field: "anything"}).json()["error"]
        assert (error["param"], error["message"]) == (field, f"{field}: is not supported by this server: {rule.reason}")
    noops = {field: rule.noops[0] for field, rule in refused if rule.noops}
    response = client.post(path, {**BODIES[path], **noops})
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


def test_nested_ignored_fields_and_streams(client: Any) -> None:
    body = {**BODIES["/v1/chat/completions"], "stream": True, "stream_options": {"include_obfuscation": False}}
    assert client.post("/v1/chat/completions", body).headers[HEADER] == "include_obfuscation"


def test_template_options(client: Any, engine: Any) -> None:
    body = {**BODIES["/v1/chat/completions"], "reasoning_effort": "low", "verbosity": "high"}
    response = client.post("/v1/chat/completions", body)
    assert response.headers[HEADER] == "verbosity"
    assert bytes(engine.requests[0].prompt_token_ids) == b"<user>a|reasoning_effort=low<assistant>"
    body["chat_template_kwargs"] = {"reasoning_effort": "high"}
    client.ok("/v1/chat/completions", body)
    assert bytes(engine.requests[1].prompt_token_ids) == b"<user>a|reasoning_effort=high<assistant>"


def test_template_options_of_a_response(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "template_uses", lambda variable: False)
    body = {"input": "a", "reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}
    assert client.post("/v1/responses", body).headers[HEADER] == "reasoning.effort, text.verbosity"
