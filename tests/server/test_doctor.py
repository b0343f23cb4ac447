from __future__ import annotations

from collections.abc import Callable

import httpx
import orjson
import pytest

from logitship.client.http.sglang_handshake import NOT_ENABLED, PROBE_BODY, SglangPlugin
from logitship.server import cli, doctor
from logitship.server.doctor import diagnose


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
    monkeypatch.setattr(doctor.httpx, "Client", lambda **options: client)
    assert cli.main(["doctor", "sglang", "http://server"]) == status
    printed = capsys.readouterr().out
    assert text in printed
    assert "SGLang:             0.5.23" in printed


def test_other_servers_are_not_diagnosed(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        httpx.Client(base_url="http://server", transport=httpx.MockTransport(sglang("no", 200))) as http,
        pytest.raises(httpx.HTTPError, match="which no SGLang does"),
    ):
        diagnose(http)
    assert cli.main(["doctor", "sglang", "http://127.0.0.1:1"]) == 2
    assert "does not answer as SGLang does" in capsys.readouterr().out


def test_key_is_sent() -> None:
    """`LOGITSHIP_API_KEY` is not visible to other users, as an argument would be."""
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return sglang("max_new_tokens")(request)

    def client(**options: object) -> httpx.Client:
        return real(transport=httpx.MockTransport(answer), **options)  # type: ignore[arg-type]

    real = httpx.Client
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITSHIP_API_KEY", "secret")
        patch.setattr(doctor.httpx, "Client", client)
        assert cli.main(["doctor", "sglang", "http://server"]) == 1
    assert seen == ["Bearer secret", "Bearer secret"]
