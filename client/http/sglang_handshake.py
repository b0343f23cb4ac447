"""Handshake between the client and logitship's SGLang plugin.

SGLang without the plugin unpickles a processor in its own processes. So the client asks first, with a request that no
SGLang generates: `max_new_tokens` is negative, which SGLang refuses before it looks at the processor. The plugin looks
at the processor before that, and replies in the error message.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

PROBE = '{"name": "logitship:about"}'
"""The `custom_logit_processor` of the probe."""
PROBE_BODY = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": -1},
    "custom_logit_processor": PROBE,
}
"""The probe, a request to `/generate`."""
NOT_ENABLED = "not configured to enable custom logit processor"
"""Part of SGLang's message where processors are off, so that it unpickles none."""
TOKENS_REFUSED = "max_new_tokens must be at least 0"
"""Part of SGLang's message where processors are on, and it is not the plugin that refuses the probe."""

_PREFIX = "logitship plugin for SGLang: "


@dataclass(frozen=True)
class SglangPlugin:
    """Reply of the plugin.

    Attributes:
        speculates: the server decodes speculatively, in a way that makes it refuse processors.
    """

    speculates: bool

    def to_message(self) -> str:
        """Return the error message that refuses the probe."""
        return _PREFIX + orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_message(cls, message: str) -> SglangPlugin | None:
        """Parse SGLang's error message; None if it has no reply of the plugin."""
        _, prefix, reply = message.partition(_PREFIX)
        if not prefix:
            return None
        try:
            return cls(bool(orjson.loads(reply)["speculates"]))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
