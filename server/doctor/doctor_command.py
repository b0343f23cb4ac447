"""`logitship doctor`: tells what a running SGLang or vLLM server does with the processors of its clients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import httpx

from logitship.client.http.error_responses import parse_error_body
from logitship.client.http.sglang_handshake import NOT_ENABLED, PROBE_BODY, TOKENS_REFUSED, SglangPlugin
from logitship.client.http.transport import client_headers
from logitship_sglang import REFUSES_ALL

TIMEOUT = 30.0
"""Seconds. The server may be busy."""
TESTED = {"SGLang": ("0.5.23",), "vLLM": ("0.32.0", "0.33.0")}
"""The versions of the engines that the plugins were made for."""


class PluginState(StrEnum):
    """States of logitship's plugin in an engine."""

    RUNS = "runs"
    IS_BROKEN = "could not be installed"
    IS_ABSENT = "does not run"


@dataclass(frozen=True)
class Diagnosis:
    """The state of a server.

    Attributes:
        engine: SGLang or vLLM.
        version: its version; None if the server does not say.
        plugin: the state of logitship's plugin.
        processors: what happens to processors of requests: accepted, refused or ignored.
        remarks: more about it, in sentences.
    """

    engine: str
    version: str | None
    plugin: PluginState
    processors: str
    remarks: tuple[str, ...] = ()

    @property
    def is_safe(self) -> bool:
        """True if the server neither unpickles nor ignores the processors of its clients."""
        return self.plugin is PluginState.RUNS or self.processors == "refused"

    @property
    def text(self) -> str:
        """The report, a few lines."""
        lines = [f"{self.engine + ':':20}{self.version or 'unknown version'}"]
        lines.append(f"custom processors:  {self.processors}")
        lines.append(f"logitship's plugin: {self.plugin}")
        lines += self.remarks
        if self.plugin is PluginState.IS_BROKEN:
            lines.append("It refuses all processors. The server's log says why, after 'logitship cannot run'.")
        if self.version is not None and self.version not in TESTED[self.engine]:
            tested = " and ".join(TESTED[self.engine])
            lines.append(f"The plugin is tested with {self.engine} {tested}. It refuses to run if {self.engine}'s")
            lines.append("functions differ from theirs; run logitship's tests with this version before you rely on it.")
        return "\n".join([*lines, self._verdict])

    @property
    def _verdict(self) -> str:
        if self.is_safe:
            return "OK: no process of this server unpickles a processor."
        page = f"docs/{self.engine.lower()}.md"
        if self.processors == "ignored":
            return f"IGNORED: requests run without their processors, or are refused. See {page}."
        return (
            "UNSAFE: this server unpickles processors: any client can run code in it.\n"
            f"Install logitship into its environment, and see {page}: is SGLANG_PLUGINS set?"
        )


def diagnose_sglang(http: httpx.Client) -> Diagnosis:
    """Ask SGLang for its state. Nothing is generated, and no processor is unpickled.

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
    reply = SglangPlugin.from_message(message)
    remarks: tuple[str, ...] = ()
    if reply is not None:
        plugin, processors = PluginState.RUNS, "accepted"
        if reply.speculates:
            remarks = ("The server decodes speculatively: it refuses requests with processors.",)
    elif REFUSES_ALL in message:
        plugin, processors = PluginState.IS_BROKEN, "refused"
    elif TOKENS_REFUSED in message:
        plugin, processors = PluginState.IS_ABSENT, "accepted"
    elif NOT_ENABLED in message:
        plugin, processors = PluginState.IS_ABSENT, "refused"
    else:
        raise httpx.HTTPError("the server answered 400 without a message that SGLang has for it")
    return Diagnosis("SGLang", _version(http, "/server_info", "/get_server_info"), plugin, processors, remarks)


def diagnose_vllm(http: httpx.Client) -> Diagnosis:
    """Ask vLLM for its state, by the route of registered processors, which only the plugin has.

    Args:
        http: see `diagnose_sglang`.

    Raises:
        httpx.HTTPError: there is no answer, or one that vLLM does not give.
    """
    version = _version(http, "/version")
    if version is None or '"owned_by":"vllm"' not in http.get("/v1/models").text.replace(" ", ""):
        raise httpx.HTTPError("it tells no version at /version, or its models are not owned by vllm")
    answer = http.get("/v1/processors")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return Diagnosis("vLLM", version, PluginState.IS_ABSENT, "ignored")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        error = parse_error_body(_json(answer))
        return Diagnosis("vLLM", version, PluginState.IS_BROKEN, "refused", () if error is None else (error.message,))
    answer.raise_for_status()
    return Diagnosis("vLLM", version, PluginState.RUNS, "accepted")


def _json(answer: httpx.Response) -> object:
    """Return the body; None if it is not JSON."""
    try:
        body: object = answer.json()
    except ValueError:
        return None
    return body


def _version(http: httpx.Client, *paths: str) -> str | None:
    for path in paths:
        answer = http.get(path)
        if answer.status_code == httpx.codes.OK:
            info = _json(answer)
            version = info.get("version") if isinstance(info, dict) else None
            return version if isinstance(version, str) else None
    return None


DIAGNOSES = {"sglang": diagnose_sglang, "vllm": diagnose_vllm}
"""The functions that ask each engine."""


def run_doctor_command(engine: str, url: str, api_key: str | None) -> int:
    """Print the report about a server. Return the exit status: 0 if it neither unpickles nor ignores processors."""
    try:
        with httpx.Client(base_url=url, headers=client_headers(api_key, None), timeout=TIMEOUT) as http:
            diagnosis = DIAGNOSES[engine](http)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"{url} does not answer as {'SGLang' if engine == 'sglang' else 'vLLM'} does: {error}")
        return 2
    print(diagnosis.text)
    return 0 if diagnosis.is_safe else 1
