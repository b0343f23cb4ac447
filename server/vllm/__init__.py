"""logitship inside vLLM: `vllm serve MODEL --logits-processors logitship.server.vllm:LogitshipLogitsProcessor`.

Groups, sandboxes and built-in processors are those of logitship's own server; vLLM runs the model. See docs/vllm.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plugin import LogitshipLogitsProcessor

__all__ = ["LogitshipLogitsProcessor"]

_MODEL_RUNNER_V2 = "vllm.v1.worker.gpu."


def __getattr__(name: str) -> Any:
    # Lazily, because the plugin's base class is vLLM's: all other modules here can be imported without vLLM.
    if name != "LogitshipLogitsProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # vLLM chooses one of its two model runners itself. Each has its own plugin interface and rejects the other's, so
    # this name resolves to the class for the model runner that imports it.
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_MODEL_RUNNER_V2):
        from .plugin_v2 import LogitshipLogitsProcessorV2

        return LogitshipLogitsProcessorV2
    from .plugin import LogitshipLogitsProcessor

    return LogitshipLogitsProcessor
