"""Attention over the slot cache, as an attention function of transformers.

A forward pass is one packed row of tokens: first those of each decoding sequence (its last token and its draft), then
the prompt chunks, one after the other. The model's own code computes everything that is done token by token; only
attention depends on the sequences. The function stores the new keys and values in the slots and attends to views of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .step_layout import DecodeBatch, Segment, StepLayout

ATTENTION_NAME = "logitship_slots"

_NOT_COMPUTED = {
    "s_aux": "attention sinks",
    "softcap": "softcapped attention",
    "position_bias": "a position bias",
}
"""Arguments of transformers' attention functions that change the result, and their meaning."""


def check_supported_arguments(others: Mapping[str, Any]) -> None:
    """Check the arguments that only some models pass to their attention function.

    Raises:
        NotImplementedError: the layer needs something that no attention function here computes.
    """
    for name, meaning in _NOT_COMPUTED.items():
        if others.get(name) is not None:
            raise NotImplementedError(f"{meaning} ({name})")


def slot_attention(
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
    """Compute one layer's attention, as transformers calls it.

    Args:
        module: the attention module, with `layer_idx`.
        query: [1, heads, tokens, head size].
        key: [1, key-value heads, tokens, head size].
        value: as `key`.
        attention_mask: always None: `step` makes the masks.
        step: layout of the forward pass.
        scaling: see `attend`.
        sliding_window: see `attend`.
        others: other arguments of the model, such as `position_ids`. Ignored unless they change the result.

    Returns:
        [1, tokens, heads, head size], and None for the weights.

    Raises:
        NotImplementedError: the layer needs something that this function does not compute.
    """
    check_supported_arguments(others)
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(layer_index(module), queries, keys, values, step, scaling, sliding_window)[None], None


def layer_index(module: torch.nn.Module) -> int:
    """Return the layer index of an attention module of transformers."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def store(layer: int, key: torch.Tensor, value: torch.Tensor, step: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a layer's new keys and values to the slots.

    Args:
        layer: its index.
        key: [tokens, key-value heads, head size].
        value: as `key`.
        step: layout of the forward pass.

    Returns:
        The layer's caches of keys and of values, each [slots, key-value heads, positions, head size].
    """
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys[step.slots, :, step.positions] = key
    values[step.slots, :, step.positions] = value
    return keys, values


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Store a layer's new keys and values, and compute the attention of each token.

    Args:
        layer: its index.
        query: [tokens, heads, head size].
        key: [tokens, key-value heads, head size].
        value: as `key`.
        step: layout of the forward pass.
        scaling: factor of the products of queries and keys; None: one over the root of the head size.
        window: positions that a token attends to, with its own; None: all.

    Returns:
        [tokens, heads, head size].
    """
    keys, values = store(layer, key, value, step)
    outputs = [_attend_batch(query, keys, values, batch, scaling, window) for batch in step.batches]
    for first, segment in step.unbatched:
        tokens = query[first : first + segment.length]
        outputs.append(_attend_segment(tokens, keys, values, step, segment, scaling, window))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output if step.order is None else output[step.order]


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepLayout,
    segment: Segment,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend with one segment: [length, heads, head size] in, the same out."""
    if segment.length == 1:  # it attends to all positions, or to the window: no mask
        begin, mask, is_causal = 0 if window is None else max(0, segment.end - window), None, False
    else:
        begin, mask = 0, step.segment_mask(segment, window)
        is_causal = mask is None
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[segment.slot, None, :, begin : segment.end],
        values[segment.slot, None, :, begin : segment.end],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def _attend_batch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: DecodeBatch,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend with decoding sequences in one call: [tokens of the step, heads, head size] in, the batch's tokens out."""
    keys, values = batch.select(keys), batch.select(values)
    if batch.most_tokens == 1:
        queries = query[: len(batch.tokens)] if batch.is_plain else query[batch.tokens[:, 0]]
        output = scaled_dot_product_attention(
            queries[:, :, None], keys, values, attn_mask=batch.mask(window, 1), scale=scaling, enable_gqa=True
        )[:, :, 0]
        return output if batch.is_plain else output[batch.rows]
    # Queries that read the same keys are adjacent: the heads of a group, and the tokens of a sequence.
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group = query.shape[1] // num_kv_heads
    queries = query[batch.tokens].view(*batch.tokens.shape, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    output = scaled_dot_product_attention(
        queries.reshape(len(queries), num_kv_heads, -1, head_dim),
        keys,
        values,
        attn_mask=batch.mask(window, group),
        scale=scaling,
    )
    output = output.view(queries.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output[batch.rows, batch.columns]


def register() -> None:
    """Register the function with transformers as `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask. Transformers calls this for a mask of the packed row; `StepLayout` makes its own."""
    return None
