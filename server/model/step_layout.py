"""Where the tokens of a forward pass stand, and which sequences attend in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .kv_cache import SlotCache

# Costs of attending, measured on a CPU, in positions of the cache that a call reads for one token of each sequence.
_CALL_COST = 500
_TOKEN_COST = 0.2
"""Of a position, for each further token of the sequence."""
_GATHER_COST = 0.5
"""Of a position, where keys and values are copied first."""


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


Placed = tuple[int, Segment]
"""A segment, and the number of its first token in the packed row."""


class StepLayout:
    """Where the tokens of one forward pass stand, with what all layers share computed once.

    Args:
        decode: segments of few tokens, at the beginning of the packed row.
        prefill: the other segments, in the order in which they follow.

    Attributes:
        slots: int64 [tokens].
        positions: int64 [tokens].
        batches: sequences that attend in one call.
        one_by_one: the other segments.
        order: int64 [tokens]: where each token's output stands in those of the batches, then of the others; None if
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
        batched = cheapest_batches(placed[: len(decode)])
        self.batches = [DecodeBatch(batch, is_part, dtype, device) for batch, is_part in batched]
        in_batches = {first for batch, _ in batched for first, _ in batch}
        self.one_by_one = [(first, segment) for first, segment in placed if first not in in_batches]
        self.order = _order([each for batch, _ in batched for each in batch] + self.one_by_one, device)

    def segment_mask(self, segment: Segment, window: int | None) -> torch.Tensor | None:
        """Additive mask of one segment, [length, end]; None where the plain causal mask is meant."""
        if (segment, window) not in self._masks:
            if segment.start == 0 and (window is None or window >= segment.end):
                self._masks[segment, window] = None
            else:
                ends = torch.arange(segment.start, segment.end, device=self._device) + 1
                self._masks[segment, window] = _additive_mask(ends, segment.end, window, self._dtype)
        return self._masks[segment, window]


class DecodeBatch:
    """Sequences of few tokens that attend in one call, all padded to the longest one and the one with most tokens.

    Args:
        placed: the segments.
        is_part: they stand among others that are not in this batch: their keys and values are copied together. Else
            they are read where they stand, those of slots between them included, which is cheaper than closing gaps.

    Attributes:
        most_tokens: of a sequence.
        tokens: int64 [sequences, most tokens], numbers in the packed row. Where there is none, another one's.
        rows: int64 [tokens of the batch]: where each stands in `tokens`, in the order of the segments.
        places: int64 [tokens of the batch], the same.
        is_plain: all that stands in `tokens` is the first so many tokens, in order.
    """

    def __init__(self, placed: Sequence[Placed], is_part: bool, dtype: torch.dtype, device: torch.device) -> None:
        slots = [segment.slot for _, segment in placed]
        row_of = {slot: row for row, slot in enumerate(slots)} if is_part else {slot: slot for slot in slots}
        self.most_tokens = max(segment.length for _, segment in placed)
        self._longest = max(segment.end for _, segment in placed)
        self._slots = torch.tensor(slots, device=device) if is_part else None
        num_rows = max(row_of.values()) + 1
        # A slot of no sequence sees position 0 alone, and computes what nobody looks at.
        tokens = [[0] * self.most_tokens for _ in range(num_rows)]
        ends = [[1] * self.most_tokens for _ in range(num_rows)]
        for first, segment in placed:
            places = [min(place, segment.length - 1) for place in range(self.most_tokens)]
            tokens[row_of[segment.slot]] = [first + place for place in places]
            ends[row_of[segment.slot]] = [segment.start + place + 1 for place in places]
        self.is_plain = tokens == [[token] for token in range(len(placed))]
        self.tokens = torch.tensor(tokens, device=device)
        self.rows = torch.tensor([row_of[s.slot] for _, s in placed for _ in range(s.length)], device=device)
        self.places = torch.tensor([place for _, s in placed for place in range(s.length)], device=device)
        self._ends = torch.tensor(ends, device=device)
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def of(self, cached: torch.Tensor) -> torch.Tensor:
        """A layer's keys or values [slots, heads, positions, head size]: those that the batch reads."""
        cached = cached[:, :, : self._longest]
        return cached[: len(self.tokens)] if self._slots is None else cached.index_select(0, self._slots)

    def mask(self, window: int | None, group: int) -> torch.Tensor:
        """Additive mask of all queries that read the same keys, [sequences, 1, group * most tokens, longest].

        Args:
            group: how many heads of queries share a head of keys.
        """
        if (window, group) not in self._masks:
            mask = _additive_mask(self._ends, self._longest, window, self._dtype)
            self._masks[window, group] = mask[:, None].repeat(1, 1, group, 1)
        return self._masks[window, group]


Batch = tuple[list[Placed], bool]
"""Of a `DecodeBatch`, what it is made of: the segments, and whether they are a part."""


def cheapest_batches(placed: Sequence[Placed]) -> list[Batch]:
    """Which sequences that decode attend in one call; the others attend one by one.

    A call for each costs calls. One for all costs reading up to the longest one for each, and computing as many tokens
    as the one with most has. So those that have drafts may get a call of their own.
    """
    if not placed:
        return []
    single = [each for each in placed if each[1].length == 1]
    drafted = [each for each in placed if each[1].length > 1]
    ways: list[list[Batch]] = [[(list(placed), False)]]
    if single and drafted:
        ways.append([(single, False), (drafted, True)])
    best = min(ways, key=_cost_of_all)
    alone = sum(_CALL_COST + segment.end * _cost_of_position(segment.length) for _, segment in placed)
    return best if _cost_of_all(best) <= alone else []


def _cost_of_all(batches: Iterable[Batch]) -> float:
    return sum(_cost(*batch) for batch in batches)


def _cost(placed: Sequence[Placed], is_part: bool) -> float:
    segments = [segment for _, segment in placed]
    num_rows = len(segments) if is_part else max(segment.slot for segment in segments) + 1
    position = _cost_of_position(max(segment.length for segment in segments)) + (_GATHER_COST if is_part else 0.0)
    return _CALL_COST + num_rows * max(segment.end for segment in segments) * position


def _cost_of_position(num_tokens: int) -> float:
    return 1.0 + _TOKEN_COST * (num_tokens - 1)


def _order(placed: Iterable[Placed], device: torch.device) -> torch.Tensor | None:
    """Where the tokens of the packed row stand, if segments stand in this order; None if nothing changes."""
    tokens = [first + place for first, segment in placed for place in range(segment.length)]
    where = sorted(range(len(tokens)), key=tokens.__getitem__)
    return None if where == tokens else torch.tensor(where, device=device)


def _additive_mask(ends: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Zero where a token sees a position, else -inf: [..., longest].

    Args:
        ends: int64 [...], one more than each token's own position.
        window: how many positions it sees, with its own; None: all.
    """
    position = torch.arange(longest, device=ends.device)
    seen = position < ends[..., None]
    if window is not None:
        seen &= position >= ends[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=ends.device).masked_fill_(~seen, float("-inf"))
