"""What the client asks of logitship's vLLM plugin, and what that answers.

A vLLM without the plugin takes `vllm_xargs` that nobody reads, and generates as if no processor had come. So the client
asks first, once: a completion whose `vllm_xargs` are `QUESTION`. The plugin refuses it at admission, before anything is
generated, and its answer is the text of that refusal: a plugin has no route of its own to answer on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

QUESTION = {"logitship": "about"}
"""The `vllm_xargs` of the question."""

_MARK = "logitship plugin: "


@dataclass(frozen=True)
class PluginInfo:
    """What the plugin says of itself.

    Attributes:
        fault_token: the token id that it ends a request with when one of its processors fails. Nothing else ends with
            it: models may have several end tokens, and vLLM gives those as `stop_reason` too.
    """

    fault_token: int

    def to_message(self) -> str:
        """The sentence that the question is refused with."""
        return _MARK + orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_message(cls, message: str) -> PluginInfo | None:
        """Read it out of vLLM's error message, which may add words of its own before it; None where it is not there."""
        _, mark, answer = message.partition(_MARK)
        if not mark:
            return None
        try:
            fault_token = orjson.loads(answer[: answer.index("}") + 1])["fault_token"]
        except (ValueError, KeyError):
            return None
        return cls(fault_token) if isinstance(fault_token, int) else None
