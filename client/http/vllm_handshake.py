"""Handshake between the client and logitship's vLLM plugin.

vLLM without the plugin accepts unknown `vllm_xargs` and generates without the processor. So the client first sends one
probe: a completion whose `vllm_xargs` are `PROBE`. The plugin refuses it at admission, before anything is generated,
and replies in the error message.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

PROBE = {"logitship": "about"}
"""The `vllm_xargs` of the probe."""

_PREFIX = "logitship plugin: "


@dataclass(frozen=True)
class PluginInfo:
    """Reply of the plugin.

    Attributes:
        fault_token: the token id with which the plugin ends a request when one of its processors fails. No other
            request ends with it: models may have several EOS tokens, and vLLM reports those as `stop_reason` too.
    """

    fault_token: int

    def to_message(self) -> str:
        """Return the error message that refuses the probe."""
        return _PREFIX + orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_message(cls, message: str) -> PluginInfo | None:
        """Parse vLLM's error message, which may have text before the reply; None if it has no reply."""
        _, prefix, reply = message.partition(_PREFIX)
        if not prefix:
            return None
        try:
            fault_token = orjson.loads(reply[: reply.index("}") + 1])["fault_token"]
        except (ValueError, KeyError):
            return None
        return cls(fault_token) if isinstance(fault_token, int) else None
