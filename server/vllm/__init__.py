"""logitship inside vLLM: `vllm serve MODEL --logits-processors logitship.server.vllm:LogitshipLogitsProcessor`.

The same groups, sandboxes and built-in processors as in logitship's own server; vLLM runs the model. See docs/vllm.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plugin import LogitshipLogitsProcessor

__all__ = ["LogitshipLogitsProcessor"]

_MODEL_RUNNER_V2 = "vllm.v1.worker.gpu."


def __getattr__(name: str) -> Any:
    # Later, because the plugin's base class is vLLM's: everything else here can be imported without it.
    if name != "LogitshipLogitsProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # vLLM chooses between two model runners by itself. Each has an interface of its own and refuses the other's, so
    # the class under this name is the one for the runner that asks.
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_MODEL_RUNNER_V2):
        from .plugin_v2 import LogitshipLogitsProcessorV2

        return LogitshipLogitsProcessorV2
    from .plugin import LogitshipLogitsProcessor

    return LogitshipLogitsProcessor
