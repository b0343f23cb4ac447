"""Attention over the slot cache, as an attention function of transformers.

A forward pass is one packed row of tokens: first one token of each decoding sequence, then the prompt chunks, one
after the other. The model's own code computes everything that is done token by token; only here do the sequences
differ. The function stores the new keys and values in the slots and attends to views of them.
"""

from __future__ import annotations

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
        decode: segments of length 1, at the beginning of the packed row.
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
        self._masks: dict[tuple[int | None, int | None], torch.Tensor | None] = {}
        if decode:
            self.num_slots = max(s.slot for s in decode) + 1
            self.longest = max(s.end for s in decode)
            self.decode_slots = self.slots[: len(decode)]
            self.ends = torch.zeros(self.num_slots, dtype=torch.long, device=device)
            self.ends[self.decode_slots] = self.positions[: len(decode)] + 1
            self.slots_are_rows = [s.slot for s in decode] == list(range(len(decode)))
            padded = self.num_slots * self.longest
            self.row_by_row = padded > sum(s.end for s in decode) + _CALL_COST * len(decode)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Additive mask of the decoding rows, [slots, 1, 1, longest]. A slot without a row sees position 0 alone."""
        if (None, window) not in self._masks:
            position = torch.arange(self.longest, device=self._device)
            ends = self.ends.clamp(min=1)[:, None]
            seen = position < ends
            if window is not None:
                seen &= position >= ends - window
            self._masks[None, window] = self._additive(seen)[:, None, None, :]
        mask = self._masks[None, window]
        assert mask is not None
        return mask

    def prefill_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Additive mask of one prompt chunk, [length, end]; None where the plain causal mask is meant."""
        if (index, window) not in self._masks:
            segment = self.prefill[index]
            if segment.start == 0 and (window is None or window >= segment.end):
                self._masks[index, window] = None
            else:
                query = torch.arange(segment.start, segment.end, device=self._device)[:, None]
                key = torch.arange(segment.end, device=self._device)
                seen = key <= query
                if window is not None:
                    seen &= key > query - window
                self._masks[index, window] = self._additive(seen)
        return self._masks[index, window]

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))


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
    """One layer's attention.

    Args:
        query: [1, heads, tokens, head size]; key and value: [1, key-value heads, tokens, head size].
        attention_mask: always None, `step` says who sees whom.
        others: what a model passes beside, `position_ids` for one. Ignored, where that changes nothing.

    Returns:
        [1, tokens, heads, head size], and None for the weights.

    Raises:
        NotImplementedError: the layer asks for something that this function does not compute.
    """
    for name, meaning in _NOT_COMPUTED.items():
        if others.get(name) is not None:
            raise NotImplementedError(f"{meaning} ({name})")
    index = module.layer_idx
    assert isinstance(index, int)
    keys, values = step.cache.keys[index], step.cache.values[index]
    keys[step.slots, :, step.positions] = key[0].transpose(0, 1)
    values[step.slots, :, step.positions] = value[0].transpose(0, 1)

    outputs = []
    first = len(step.decode)
    if first:
        outputs.append(_attend_decode(query[0, :, :first].transpose(0, 1), keys, values, step, scaling, sliding_window))
    for number, segment in enumerate(step.prefill):
        last = first + segment.length
        mask = step.prefill_mask(number, sliding_window)
        output = scaled_dot_product_attention(
            query[:, :, first:last],
            keys[segment.slot : segment.slot + 1, :, : segment.end],
            values[segment.slot : segment.slot + 1, :, : segment.end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
        first = last
    return torch.cat(outputs).unsqueeze(0) if len(outputs) > 1 else outputs[0].unsqueeze(0), None


def _attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[rows, heads, head size] in, the same out."""
    if step.row_by_row:
        rows = []
        for row, segment in enumerate(step.decode):
            begin = 0 if window is None else max(0, segment.end - window)
            span = slice(begin, segment.end)
            rows.append(
                scaled_dot_product_attention(
                    query[row, None, :, None],
                    keys[segment.slot, None, :, span],
                    values[segment.slot, None, :, span],
                    scale=scaling,
                    enable_gqa=True,
                )
            )
        return torch.cat(rows).squeeze(2)
    # A free slot among those in use gets a query of zeros: cheaper than copying keys to close the gap.
    if not step.slots_are_rows:
        spread = query.new_zeros(step.num_slots, *query.shape[1:])
        spread[step.decode_slots] = query
        query = spread
    output = scaled_dot_product_attention(
        query[:, :, None],
        keys[: step.num_slots, :, : step.longest],
        values[: step.num_slots, :, : step.longest],
        attn_mask=step.decode_mask(window),
        scale=scaling,
        enable_gqa=True,
    ).squeeze(2)
    return output if step.slots_are_rows else output[step.decode_slots]


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Transformers asks for a mask for the whole packed row; `StepLayout` makes its own."""
    return None
