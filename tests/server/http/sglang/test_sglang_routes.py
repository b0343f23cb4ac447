from __future__ import annotations

from typing import Any

import pytest

from logitship.server.refusals import QueueFull, ServiceUnavailable
from tests.helpers.answers import error_of


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(path: str, client: Any) -> None:
    info = client.http.get(path).json()
    assert info["model_path"] == "/models/tiny"
    assert info["tokenizer_path"] == "/models/tiny"
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert info["eos_token_ids"] == [0]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_hides_the_key(path: str, make_fake_engine: Any, make_client: Any) -> None:
    client = make_client(
        make_fake_engine(api_key="secret", shipping_api_key="secret too", enable_custom_logit_processor=True)
    )
    answer = client.http.get(path, headers={"Authorization": "Bearer secret"})
    info = answer.json()
    assert info["max_num_seqs"] == 32
    assert info["internal_states"][0]["running"] == 1
    assert info["version"]
    assert "secret" not in answer.text


def test_models(client: Any) -> None:
    (model,) = client.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 64)
    assert client.http.get("/v1/models/tiny").json() == model
    assert error_of(client.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"


def test_health(client: Any, engine: Any) -> None:
    assert client.http.get("/health").status_code == 200
    engine.accepting = False
    assert client.http.get("/health").status_code == 503
    engine.accepting, engine.alive = True, False
    assert client.http.get("/health").status_code == 503


def test_health_reads_no_stats(client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take locks, which a slow load or a restart may hold."""
    monkeypatch.setattr(engine, "stats", None)
    assert client.http.get("/health").status_code == 200


def test_ready(client: Any, engine: Any) -> None:
    answer = client.http.get("/health/ready")
    assert (answer.status_code, answer.content) == (200, b"")
    engine.unready = ServiceUnavailable("not ready: the queue is full; the engine has died")
    answer = client.http.get("/health/ready")
    assert error_of(answer, 503)["message"] == engine.unready.message
    assert answer.headers["retry-after"]


def test_health_generate(client: Any, engine: Any) -> None:
    assert client.http.get("/health_generate").status_code == 200
    (request,) = engine.requests
    assert request.sampling_params.max_new_tokens == 1
    assert engine.closed == [request.rid]


def test_health_generate_without_a_token(client: Any, engine: Any, failing: Any) -> None:
    engine.script = lambda request: failing(request)[1:]
    assert client.http.get("/health_generate").status_code == 503


@pytest.mark.parametrize(
    ("refused", "status"), [(QueueFull("full"), 200), (ServiceUnavailable("the server is shutting down"), 503)]
)
def test_health_generate_when_refused(refused: Exception, status: int, client: Any, engine: Any) -> None:
    engine.refuse_all = refused
    assert client.http.get("/health_generate").status_code == status


def test_flush_cache(client: Any, engine: Any) -> None:
    assert client.http.get("/flush_cache").status_code == 200
    engine.idle = False
    assert client.http.post("/flush_cache").status_code == 400


def test_abort(client: Any, engine: Any) -> None:
    assert client.post("/abort_request", {"rid": "r"}).status_code == 200
    assert client.post("/abort_request", {"rid": "", "abort_all": True}).status_code == 200
    assert engine.aborted == [("r", ""), (None, "")]
    assert error_of(client.post("/abort_request", {"rid": ""}))["param"] == "rid"


def test_unknown_route_and_method(client: Any) -> None:
    assert error_of(client.http.get("/nothing"), 404)["message"] == "Not Found: GET /nothing"
    wrong = client.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("refused", [QueueFull("full"), ServiceUnavailable("closing")])
def test_at_capacity(refused: Any, client: Any, engine: Any) -> None:
    engine.refuse_all = refused
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
        answer = client.post(path, body)
        assert error_of(answer, refused.status_code)["message"] == refused.message
        assert answer.headers["retry-after"] == "1"


def test_openapi_document(client: Any) -> None:
    document = client.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateRequest"}
    described = schemas["ChatCompletionRequest"]["properties"]
    assert "processor string" in described["custom_logit_processor"]["description"]
    assert described["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert "Message" in schemas
