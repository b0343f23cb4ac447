from __future__ import annotations

import os
from collections.abc import Callable

import httpx
import orjson
import pytest
from starlette.testclient import TestClient

from logitship.client.http.sglang_handshake import NOT_ENABLED, PROBE_BODY, TOKENS_REFUSED, SglangPlugin
from logitship.server import cli
from logitship.server.doctor import doctor_command
from logitship.server.doctor.doctor_command import diagnose_sglang, diagnose_vllm
from logitship.server.http.app import create_app
from logitship_sglang import NOT_RUN
from tests.helpers.engine_requests import BuildEngine


def sglang(message: str, status: int = 400) -> Callable[[httpx.Request], httpx.Response]:
    """Return a fake of SGLang, which answers the probe with an error."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"version": "0.5.23"})
        assert orjson.loads(request.content) == PROBE_BODY
        return httpx.Response(status, json={"error": {"message": message}})

    return answer


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (SglangPlugin(speculates=False).to_message(), 0, "OK: no process"),
        (SglangPlugin(speculates=True).to_message(), 0, "decodes speculatively"),
        (f"The server is {NOT_ENABLED}. Please set …", 0, "custom processors:  refused"),
        (
            NOT_RUN,
            0,
            "logitship's plugin: could not be installed\nIt refuses all processors.",
        ),
        ("max_new_tokens must be at least 0, got -1.", 1, "UNSAFE: this server unpickles processors"),
    ],
)
def test_reports(
    message: str,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(sglang(message)))
    monkeypatch.setattr(doctor_command.httpx, "Client", lambda **options: client)
    assert cli.main(["doctor", "sglang", "http://server"]) == status
    printed = capsys.readouterr().out
    assert text in printed
    assert "SGLang:             0.5.23" in printed


def test_other_servers_are_not_diagnosed(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        httpx.Client(base_url="http://server", transport=httpx.MockTransport(sglang("no", 200))) as http,
        pytest.raises(httpx.HTTPError, match="which no SGLang does"),
    ):
        diagnose_sglang(http)
    assert cli.main(["doctor", "sglang", "http://127.0.0.1:1"]) == 2
    assert "does not answer as SGLang does" in capsys.readouterr().out


@pytest.mark.parametrize("enabled", [True, False])
def test_own_server_is_not_diagnosed(make_engine: BuildEngine, enabled: bool) -> None:
    engine = make_engine(enable_custom_logit_processor=enabled)
    with TestClient(create_app(engine), base_url="http://localhost") as app:
        refusal = app.post("/generate", json=PROBE_BODY)
    answer = httpx.MockTransport(lambda request: httpx.Response(refusal.status_code, content=refusal.content))
    with (
        httpx.Client(base_url="http://server", transport=answer) as http,
        pytest.raises(httpx.HTTPError, match="without a message that SGLang"),
    ):
        diagnose_sglang(http)


@pytest.mark.parametrize(
    "refusal",
    [
        httpx.Response(400, text="<html>The plain HTTP request was sent to HTTPS port</html>"),
        httpx.Response(400, content=b"\xff"),
        httpx.Response(400, json={"detail": "nope"}),
        httpx.Response(400, json="nope"),
        httpx.Response(400, json={"error": {"message": "sampling_params.max_new_tokens: must be 0 or greater"}}),
    ],
)
def test_other_refusals_are_not_diagnosed(
    refusal: httpx.Response, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda request: refusal))
    monkeypatch.setattr(doctor_command.httpx, "Client", lambda **options: client)
    assert cli.main(["doctor", "sglang", "http://server"]) == 2
    assert "without a message that SGLang has for it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "info",
    [
        httpx.Response(200, text="ok"),
        httpx.Response(200, json=["version"]),
        httpx.Response(200, json=None),
        httpx.Response(200, json={"version": None}),
        httpx.Response(404),
    ],
)
def test_unknown_version(info: httpx.Response) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return sglang(NOT_ENABLED)(request) if request.url.path == "/generate" else info

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        diagnosis = diagnose_sglang(http)
    assert diagnosis.version is None
    assert diagnosis.is_safe


@pytest.mark.parametrize(
    ("listing", "status", "texts"),
    [
        (httpx.Response(200, json={"data": []}), 0, ["vLLM:               0.33.0", "plugin: runs", "OK"]),
        (httpx.Response(404, json={"detail": "Not Found"}), 1, ["processors:  ignored", "IGNORED", "docs/vllm.md"]),
        (
            httpx.Response(503, json={"error": {"message": "no user namespaces"}}),
            0,
            ["plugin: could not be installed", "no user namespaces"],
        ),
        (httpx.Response(401), 2, ["does not answer as vLLM does"]),
    ],
)
def test_vllm(
    listing: httpx.Response,
    status: int,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        others = {"version": "0.33.0", "data": [{"owned_by": "vllm"}]}
        return listing if request.url.path == "/v1/processors" else httpx.Response(200, json=others)

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(doctor_command.httpx, "Client", lambda **options: client)
    assert cli.main(["doctor", "vllm", "http://server"]) == status
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts)
    assert "is tested with" not in printed


def test_untested_version() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"version": "0.40.1", "data": [{"owned_by": "vllm"}]})

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        assert "The plugin is tested with vLLM 0.32.0 and 0.33.0." in diagnose_vllm(http).text


@pytest.mark.parametrize("key", ["secret", "ké€", "not UTF-8: \udcff"])
def test_key_is_sent(key: str) -> None:
    """`LOGITSHIP_API_KEY` is not visible to other users, as an argument would be."""
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.extend(value for name, value in request.headers.raw if name == b"authorization")
        return sglang(TOKENS_REFUSED)(request)

    def client(**options: object) -> httpx.Client:
        return real(transport=httpx.MockTransport(answer), **options)  # type: ignore[arg-type]

    real = httpx.Client
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITSHIP_API_KEY", key)
        patch.setattr(doctor_command.httpx, "Client", client)
        assert cli.main(["doctor", "sglang", "http://server"]) == 1
    assert seen == [b"Bearer " + os.fsencode(key)] * 2
