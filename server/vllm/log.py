"""The plugin's logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.logitship")
"""A child of vLLM's logger, the only one that `vllm serve` prints."""
