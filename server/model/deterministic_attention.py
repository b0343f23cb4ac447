"""Attention that computes each token by itself: its bits depend on its own sequence and position alone.

`slot_attention` chooses masks and shapes by what else is in a step, and the order of its additions follows. Here each
token is a call of its own, with one query and exactly the keys that it sees. Its shapes follow from the token's
position. Several queries in one call would be faster, and are not the same: with two threads and more, PyTorch splits
the work by how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import layer_index, no_mask, refuse_what_is_not_computed, store
from .step_layout import StepLayout

DETERMINISTIC_ATTENTION_NAME = "logitship_slots_token_by_token"


def token_by_token_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: StepLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention. Arguments, results and errors are those of `slot_attention`."""
    refuse_what_is_not_computed(others)
    # Contiguous, so that a query's strides do not depend on the number of tokens either.
    queries, new_keys, new_values = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    keys, values = store(layer_index(module), new_keys, new_values, step)
    places = [(s.slot, position) for s in (*step.decode, *step.prefill) for position in range(s.start, s.end)]
    outputs = []
    for token, (slot, position) in enumerate(places):
        begin = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        output = scaled_dot_product_attention(
            queries[token, None, :, None],
            keys[slot, None, :, begin : position + 1],
            values[slot, None, :, begin : position + 1],
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output[:, :, 0])
    return torch.stack(outputs, dim=1), None


def register() -> None:
    """Make the function known to transformers under `DETERMINISTIC_ATTENTION_NAME`."""
    AttentionInterface.register(DETERMINISTIC_ATTENTION_NAME, token_by_token_attention)
    AttentionMaskInterface.register(DETERMINISTIC_ATTENTION_NAME, no_mask)
