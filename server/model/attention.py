"""Attention over the slot cache, as an attention function of transformers, and the layout of a forward pass.

A forward pass is one packed row of tokens: first those of each decoding sequence (its last token and its draft), then
the prompt chunks, one after the other. The model's own code computes all per-token operations; only
attention depends on the sequences. The function stores the new keys and values in the slots and attends to views of
them. The layout has the positions of the tokens, and the batches of sequences that attend in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .kv_cache import SlotCache

# Costs of attention, measured on a CPU. The unit is one cache position read for one token of a sequence.
_CALL_COST = 500
_TOKEN_COST = 0.2
"""Cost per position for each further token of the sequence."""

_GATHER_COST = 0.5
"""Cost per position if keys and values are copied first."""

ATTENTION_NAME = "logitship_slots"
_NOT_COMPUTED = {
    "s_aux": "attention sinks",
    "softcap": "softcapped attention",
    "position_bias": "a position bias",
}
"""Arguments of transformers' attention functions that change the result, and their meaning."""


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


PackedSegment = tuple[int, Segment]
"""Index of a segment's first token in the packed row, and the segment."""

BatchedSegments = tuple[list[PackedSegment], bool]
"""Arguments of a `DecodeBatch`: the segments, and `is_subset`."""


class StepLayout:
    """Layout of one forward pass, with tensors that all layers share.

    Args:
        decode: segments of few tokens, first in the packed row.
        prefill: the other segments, in their order.
        cache: the KV cache.
        dtype: of the masks.
        device: of all tensors.

    Attributes:
        slots: int64 [tokens], the slot of each token.
        positions: int64 [tokens], the position of each token in its slot.
        batches: sequences that attend in one call.
        unbatched: the other segments.
        order: int64 [tokens]: index of each token's output in the outputs of `batches`, then `unbatched`; None if
            they are in order.
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
        self._masks: dict[tuple[Segment, int | None], torch.Tensor | None] = {}
        firsts = accumulate((s.length for s in segments), initial=0)
        placed = list(zip(firsts, segments, strict=False))
        # Prompts of which all but the last token were computed before, for example.
        few = max((segment.length for segment in decode), default=1)
        batched = cheapest_batches([each for each in placed if each[1].length <= few])
        self.batches = [DecodeBatch(batch, is_subset, dtype, device) for batch, is_subset in batched]
        in_batches = {first for batch, _ in batched for first, _ in batch}
        self.unbatched = [(first, segment) for first, segment in placed if first not in in_batches]
        self.order = _order([each for batch, _ in batched for each in batch] + self.unbatched, device)

    def segment_mask(self, segment: Segment, window: int | None) -> torch.Tensor | None:
        """Return the additive mask of one segment, [length, end]; None if it is the plain causal mask."""
        if (segment, window) not in self._masks:
            if segment.start == 0 and (window is None or window >= segment.end):
                self._masks[segment, window] = None
            else:
                ends = torch.arange(segment.start, segment.end, device=self._device) + 1
                self._masks[segment, window] = _additive_mask(ends, segment.end, window, self._dtype)
        return self._masks[segment, window]


class DecodeBatch:
    """Sequences of few tokens that attend in one call, all padded to the longest cache and to the most tokens.

    Args:
        placed: the segments.
        is_subset: copy the keys and values of these slots first. Otherwise all slots up to the highest are read in
            place, including those of other segments, which is cheaper than copying.
        dtype: of the masks.
        device: of all tensors.

    Attributes:
        most_tokens: most tokens of a sequence.
        tokens: int64 [sequences, most tokens], indices in the packed row; padding repeats a token.
        rows: int64 [tokens of the batch]: row of each token in `tokens`, in the order of the segments.
        columns: int64 [tokens of the batch]: column of each token in `tokens`.
        is_plain: `tokens` is one column with the first tokens of the packed row, in order.
    """

    def __init__(
        self, placed: Sequence[PackedSegment], is_subset: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        slots = [segment.slot for _, segment in placed]
        row_of = {slot: row for row, slot in enumerate(slots)} if is_subset else {slot: slot for slot in slots}
        self.most_tokens = max(segment.length for _, segment in placed)
        self._longest = max(segment.end for _, segment in placed)
        self._slots = torch.tensor(slots, device=device) if is_subset else None
        num_rows = max(row_of.values()) + 1
        # A slot without a sequence attends to position 0 only, and its output is not used.
        tokens = [[0] * self.most_tokens for _ in range(num_rows)]
        ends = [[1] * self.most_tokens for _ in range(num_rows)]
        for first, segment in placed:
            offsets = [min(offset, segment.length - 1) for offset in range(self.most_tokens)]
            tokens[row_of[segment.slot]] = [first + offset for offset in offsets]
            ends[row_of[segment.slot]] = [segment.start + offset + 1 for offset in offsets]
        self.is_plain = tokens == [[token] for token in range(len(placed))]
        self.tokens = torch.tensor(tokens, device=device)
        self.rows = torch.tensor([row_of[s.slot] for _, s in placed for _ in range(s.length)], device=device)
        self.columns = torch.tensor([column for _, s in placed for column in range(s.length)], device=device)
        self._ends = torch.tensor(ends, device=device)
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def select(self, cached: torch.Tensor) -> torch.Tensor:
        """Return the part of a layer's keys or values [slots, heads, positions, head size] that the batch reads."""
        cached = cached[:, :, : self._longest]
        return cached[: len(self.tokens)] if self._slots is None else cached.index_select(0, self._slots)

    def mask(self, window: int | None, group: int) -> torch.Tensor:
        """Return the additive mask of queries that read the same keys: [sequences, 1, group * most tokens, longest].

        Args:
            window: positions that a token attends to, with its own; None: all.
            group: number of query heads per key head.
        """
        if (window, group) not in self._masks:
            mask = _additive_mask(self._ends, self._longest, window, self._dtype)
            self._masks[window, group] = mask[:, None].repeat(1, 1, group, 1)
        return self._masks[window, group]


def cheapest_batches(placed: Sequence[PackedSegment]) -> list[BatchedSegments]:
    """Return the batches in which sequences of few tokens attend; [] if separate calls are cheaper.

    Separate calls have an overhead each. One call for all reads as many positions as the longest sequence has, and
    computes as many tokens as the longest draft, for each sequence. So sequences with drafts may get a separate call.
    """
    if not placed:
        return []
    single = [each for each in placed if each[1].length == 1]
    drafted = [each for each in placed if each[1].length > 1]
    options: list[list[BatchedSegments]] = [[(list(placed), False)]]
    if single and drafted:
        options.append([(single, False), (drafted, True)])
    best = min(options, key=_cost_of_all)
    alone = sum(_CALL_COST + segment.end * _cost_of_position(segment.length) for _, segment in placed)
    return best if _cost_of_all(best) <= alone else []


def _cost_of_all(batches: Iterable[BatchedSegments]) -> float:
    return sum(_cost(*batch) for batch in batches)


def _cost(placed: Sequence[PackedSegment], is_subset: bool) -> float:
    segments = [segment for _, segment in placed]
    num_rows = len(segments) if is_subset else max(segment.slot for segment in segments) + 1
    position = _cost_of_position(max(segment.length for segment in segments)) + (_GATHER_COST if is_subset else 0.0)
    return _CALL_COST + num_rows * max(segment.end for segment in segments) * position


def _cost_of_position(num_tokens: int) -> float:
    return 1.0 + _TOKEN_COST * (num_tokens - 1)


def _order(placed: Iterable[PackedSegment], device: torch.device) -> torch.Tensor | None:
    """Return each packed token's index in the order of these segments; None if the orders are the same."""
    tokens = [first + offset for first, segment in placed for offset in range(segment.length)]
    if tokens == list(range(len(tokens))):
        return None
    return torch.tensor(sorted(range(len(tokens)), key=tokens.__getitem__), device=device)


def _additive_mask(ends: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return zero where a token attends to a position, else -inf: [..., longest].

    Args:
        ends: int64 [...], one more than each token's own position.
        longest: number of positions.
        window: positions that a token attends to, with its own; None: all.
        dtype: of the mask.
    """
    position = torch.arange(longest, device=ends.device)
    seen = position < ends[..., None]
    if window is not None:
        seen &= position >= ends[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=ends.device).masked_fill_(~seen, float("-inf"))


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
