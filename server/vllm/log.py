"""The plugin's logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.logitship")
"""Below vLLM's own, which is the only one that `vllm serve` prints."""
