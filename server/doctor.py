"""`logitship doctor`: whether a running SGLang server would unpickle the processors of its clients."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from logitship.client.http.error_responses import parse_error_body
from logitship.client.http.sglang_handshake import NOT_ENABLED, PROBE_BODY, TOKENS_REFUSED, SglangPlugin
from logitship.client.http.transport import client_headers
from logitship_sglang import REFUSES_ALL

TIMEOUT = 30.0
"""Seconds. The server may be busy."""


@dataclass(frozen=True)
class Diagnosis:
    """The state of a server.

    Attributes:
        version: SGLang's version; None if the server does not say.
        plugin: the reply of logitship's plugin; None if it is not there.
        takes_processors: the server accepts processors with requests.
        is_broken: the plugin is there, but could not be installed completely, and refuses all processors.
    """

    version: str | None
    plugin: SglangPlugin | None
    takes_processors: bool
    is_broken: bool = False

    @property
    def is_safe(self) -> bool:
        """True if the server unpickles nothing of its clients."""
        return self.plugin is not None or not self.takes_processors

    @property
    def _plugin_state(self) -> str:
        if self.is_broken:
            return "could not be installed"
        return "does not run" if self.plugin is None else "runs"

    @property
    def text(self) -> str:
        """The report, a few lines."""
        lines = [f"SGLang:             {self.version or 'unknown version'}"]
        lines.append(f"custom processors:  {'accepted' if self.takes_processors else 'refused'}")
        lines.append(f"logitship's plugin: {self._plugin_state}")
        if self.is_broken:
            lines.append("It refuses all processors. The server's log says why, after 'logitship cannot run'.")
        if self.plugin is not None and self.plugin.speculates:
            lines.append("The server decodes speculatively: it refuses requests with processors.")
        if self.is_safe:
            lines.append("OK: no process of this server unpickles a processor.")
        else:
            lines.append("UNSAFE: this server unpickles processors: any client can run code in it.")
            lines.append("Install logitship into its environment, and see docs/sglang.md: is SGLANG_PLUGINS set?")
        return "\n".join(lines)


def diagnose(http: httpx.Client) -> Diagnosis:
    """Ask a server for its state. Nothing is generated, and no processor is unpickled.

    Args:
        http: a client with the server's base URL, and with its API key if it needs one.

    Raises:
        httpx.HTTPError: there is no answer, or one that SGLang does not give.
    """
    answer = http.post("/generate", json=PROBE_BODY)
    if answer.status_code != httpx.codes.BAD_REQUEST:
        answer.raise_for_status()
        raise httpx.HTTPError(f"the server answered {answer.status_code}, which no SGLang does")
    error = parse_error_body(_json(answer))
    message = "" if error is None else error.message
    plugin = SglangPlugin.from_message(message)
    takes_processors = plugin is not None or TOKENS_REFUSED in message
    is_broken = REFUSES_ALL in message
    if not takes_processors and not is_broken and NOT_ENABLED not in message:
        raise httpx.HTTPError("the server answered 400 without a message that SGLang has for it")
    return Diagnosis(_version(http), plugin, takes_processors, is_broken)


def _json(answer: httpx.Response) -> object:
    """Return the body; None if it is not JSON."""
    try:
        body: object = answer.json()
    except ValueError:
        return None
    return body


def _version(http: httpx.Client) -> str | None:
    for path in ("/server_info", "/get_server_info"):
        answer = http.get(path)
        if answer.status_code == httpx.codes.OK:
            info = _json(answer)
            version = info.get("version") if isinstance(info, dict) else None
            return version if isinstance(version, str) else None
    return None


def run_doctor_command(url: str, api_key: str | None) -> int:
    """Print the report about a server. Return the exit status: 0 if it is safe."""
    try:
        with httpx.Client(base_url=url, headers=client_headers(api_key, None), timeout=TIMEOUT) as http:
            diagnosis = diagnose(http)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"{url} does not answer as SGLang does: {error}")
        return 2
    print(diagnosis.text)
    return 0 if diagnosis.is_safe else 1
