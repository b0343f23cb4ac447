"""Peer of `vllm_plugin.py`: the same edit, as a processor for vLLM's own V1 interface."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class BareProcessor(LogitsProcessor):  # type: ignore[misc]
    """Forbids each request the tokens in its `extra_args["banned"]`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._banned: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        """False: it may forbid the most likely token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        process_dict_updates(self._banned, batch_update, lambda params, _, __: (params.extra_args or {}).get("banned"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edit the rows in place."""
        for row, banned in self._banned.items():
            logits[row, banned] = -float("inf")
        return logits
