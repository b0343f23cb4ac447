"""Attention over the slot cache, as an attention function of transformers.

A forward pass is one packed row of tokens: first those of each decoding sequence (its last token, and what is drafted
behind it), then the prompt chunks, one after the other. The model's own code computes everything that is done token by
token; only here do the sequences differ. The function stores the new keys and values in the slots and attends to views
of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .kv_cache import SlotCache

ATTENTION_NAME = "logitship_slots"

# Attending row by row costs a call a row; attending to all rows at once costs reading up to the longest one for each.
# Measured on a CPU: a call costs about what 500 cache positions of one layer cost.
_CALL_COST = 500

_NOT_COMPUTED = {
    "s_aux": "attention sinks",
    "softcap": "softcapped attention",
    "position_bias": "a position bias",
}
"""Arguments under which attention functions of transformers get what changes the result, and what that is."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a forward pass: positions `start` to `start + length - 1`."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """The sequence's length in the cache after this pass."""
        return self.start + self.length


class StepLayout:
    """Where the tokens of one forward pass stand, with what all layers share computed once.

    Args:
        decode: segments of few tokens, at the beginning of the packed row.
        prefill: the other segments, in the order in which they follow.
    """

    def __init__(
        self, decode: list[Segment], prefill: list[Segment], cache: SlotCache, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache = cache
        self.decode = decode
        self.prefill = prefill
        segments = [*decode, *prefill]
        self.slots = torch.tensor([s.slot for s in segments for _ in range(s.length)], device=device)
        self.positions = torch.tensor([p for s in segments for p in range(s.start, s.end)], device=device)
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[Segment | None, int | None], torch.Tensor | None] = {}
        self.num_decode = sum(s.length for s in decode)
        if decode:
            self.num_slots = max(s.slot for s in decode) + 1
            self.longest = max(s.end for s in decode)
            self.most_tokens = max(s.length for s in decode)
            self.decode_slots = self.slots[: self.num_decode]
            self.places = torch.tensor([place for s in decode for place in range(s.length)], device=device)
            self.ends = torch.zeros(self.num_slots, self.most_tokens, dtype=torch.long, device=device)
            self.ends[self.decode_slots, self.places] = self.positions[: self.num_decode] + 1
            self.slots_are_rows = self.most_tokens == 1 and [s.slot for s in decode] == list(range(len(decode)))
            padded = self.num_slots * self.longest
            self.row_by_row = padded > sum(s.end for s in decode) + _CALL_COST * len(decode)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Additive mask of the decoding sequences, [slots, 1, most tokens of a sequence, longest].

        Where a slot has no such token, it sees position 0 alone.
        """
        if (None, window) not in self._masks:
            position = torch.arange(self.longest, device=self._device)
            ends = self.ends.clamp(min=1)[:, :, None]
            seen = position < ends
            if window is not None:
                seen &= position >= ends - window
            self._masks[None, window] = self._additive(seen)[:, None]
        mask = self._masks[None, window]
        assert mask is not None
        return mask

    def segment_mask(self, segment: Segment, window: int | None) -> torch.Tensor | None:
        """Additive mask of one segment, [length, end]; None where the plain causal mask is meant."""
        if (segment, window) not in self._masks:
            if segment.start == 0 and (window is None or window >= segment.end):
                self._masks[segment, window] = None
            else:
                query = torch.arange(segment.start, segment.end, device=self._device)[:, None]
                key = torch.arange(segment.end, device=self._device)
                seen = key <= query
                if window is not None:
                    seen &= key > query - window
                self._masks[segment, window] = self._additive(seen)
        return self._masks[segment, window]

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))


def refuse_what_is_not_computed(others: Mapping[str, Any]) -> None:
    """Look at what a model passes to its attention function beside what every model does.

    Raises:
        NotImplementedError: the layer asks for something that no attention function here computes.
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
    """One layer's attention, as transformers calls it.

    Args:
        query: [1, heads, tokens, head size]; key and value: [1, key-value heads, tokens, head size].
        attention_mask: always None, `step` says who sees whom.
        others: what a model passes beside, `position_ids` for one. Ignored, where that changes nothing.

    Returns:
        [1, tokens, heads, head size], and None for the weights.

    Raises:
        NotImplementedError: the layer asks for something that this function does not compute.
    """
    refuse_what_is_not_computed(others)
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend(layer_index(module), queries, keys, values, step, scaling, sliding_window)[None], None


def layer_index(module: torch.nn.Module) -> int:
    """Which layer an attention module of transformers belongs to."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def store(layer: int, key: torch.Tensor, value: torch.Tensor, step: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a layer's new keys and values into the slots.

    Args:
        key: [tokens, key-value heads, head size], as `value`.

    Returns:
        The layer's cache of keys, and that of values: [slots, key-value heads, positions, head size].
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
    """Store a layer's new keys and values, and attend to all that each token sees.

    Args:
        query: [tokens, heads, head size]; key and value: [tokens, key-value heads, head size].
        scaling: of the products of queries and keys; None: one over the root of the head size.
        window: how many positions a token sees, with its own; None: all.

    Returns:
        [tokens, heads, head size].
    """
    keys, values = store(layer, key, value, step)
    outputs = []
    one_by_one = step.prefill
    first = 0
    if step.decode and step.row_by_row:
        one_by_one = [*step.decode, *step.prefill]
    elif step.decode:
        first = step.num_decode
        outputs.append(_attend_decode(query[:first], keys, values, step, scaling, window))
    for segment in one_by_one:
        last = first + segment.length
        outputs.append(_attend_segment(query[first:last], keys, values, step, segment, scaling, window))
        first = last
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepLayout,
    segment: Segment,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[length, heads, head size] in, the same out."""
    if segment.length == 1:  # it sees all, or the window: no mask
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


def _attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """All decoding sequences at once: [tokens, heads, head size] in, the same out."""
    # A free slot among those in use, and a sequence with fewer tokens than another, get queries of zeros: cheaper than
    # copying keys to close the gap.
    if step.slots_are_rows:
        query = query[:, None]
    else:
        spread = query.new_zeros(step.num_slots, step.most_tokens, *query.shape[1:])
        spread[step.decode_slots, step.places] = query
        query = spread
    output = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys[: step.num_slots, :, : step.longest],
        values[: step.num_slots, :, : step.longest],
        attn_mask=step.decode_mask(window),
        scale=scaling,
        enable_gqa=True,
    ).transpose(1, 2)
    return output[:, 0] if step.slots_are_rows else output[step.decode_slots, step.places]


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Transformers asks for a mask for the whole packed row; `StepLayout` makes its own."""
    return None
