"""Truncation of the tokens at a rank: typical-p, tail free sampling, min-k and top-h.

The vocabulary is not sorted if its first tokens decide where to cut: 64 of them usually do. Tokens that tie with the
last one that stays also stay.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_sums import row_sums
from logitship.builtin_processors.parts.sampling_rule import SamplingRule
from logitship.sampler.ops.candidates import top_candidates

from .params import Count, Expects, ProcessorParams

_WIDTHS = (64, 512)
"""Numbers of first tokens to try before all of them."""

_MANY = 2**31
"""More tokens than a vocabulary has."""

Share = Annotated[float, Field(gt=0, le=1), Expects("a number above 0 and at most 1")]
AfterTemperature = Annotated[bool, Expects("true or false")]


@dataclass(frozen=True)
class Cut:
    """The places at which rows are cut.

    Attributes:
        limits: [rows, 1]: tokens with a lower score are forbidden.
        decided: bool [rows], False if the first tokens do not decide it. None if all are decided.
    """

    limits: torch.Tensor
    decided: torch.Tensor | None = None


class RankedRule(SamplingRule):
    """Forbids the tokens behind some rank by a score. A subclass gives the scores, and the rank from the first ones."""

    widths: ClassVar[tuple[int, ...]] = _WIDTHS

    @abstractmethod
    def scores(self, logits: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return what the tokens are ranked by, float32 [rows, vocab], and tensors [rows, any] for `cut`."""

    @abstractmethod
    def cut(self, first: torch.Tensor, token_ids: torch.Tensor | None, size: int, facts: Sequence[torch.Tensor]) -> Cut:
        """Find where to cut rows.

        Args:
            first: float32 [rows, any], the highest scores, descending.
            token_ids: their tokens.
            size: the number of scores.
            facts: the tensors from `scores`, then the constants.
        """

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        scores, facts = self.scores(logits, *constants)
        limits = self._limits(scores, (*facts, *constants))
        logits.masked_fill_(scores < limits, -math.inf)

    def _limits(self, scores: torch.Tensor, facts: Sequence[torch.Tensor]) -> torch.Tensor:
        size = scores.shape[1]
        limits: torch.Tensor | None = None
        undecided: torch.Tensor | None = None  # None: all rows
        for width in self._tried(scores):
            some = scores if undecided is None else scores[undecided]
            of_some = facts if undecided is None else [each[undecided] for each in facts]
            found = self.cut(*top_candidates(some, width), size, of_some)
            if limits is None or undecided is None:
                limits = found.limits
            else:
                limits[undecided] = found.limits
            if found.decided is None or width >= size:
                break
            left = (~found.decided).nonzero()[:, 0]  # only on a CPU, where it is no wait
            undecided = left if undecided is None else undecided[left]
            if not len(undecided):
                break
        assert limits is not None
        return limits

    def _tried(self, scores: torch.Tensor) -> Iterator[int]:
        """Return the numbers of first tokens to look at. On another device, asking whether they decide would wait."""
        size = scores.shape[1]
        if scores.device.type == "cpu":
            yield from (width for width in self.widths if width < size)
        yield size


class TypicalPParams(ProcessorParams):
    """See `TypicalPLogitsProcessor`."""

    typical_p: Share
    """The share of the probability that stays. 1: all tokens."""
    min_keep: Count = 0
    """Minimum number of tokens that stay."""
    after_temperature: AfterTemperature = False
    """Use the probabilities after the request's temperature, as transformers does. False: those before it."""


class TypicalPLogitsProcessor(RankedRule):
    """Keeps the tokens whose surprise is closest to the entropy, until their probabilities reach `typical_p`.

    The most likely token may be among those that are forbidden.

    Meister et al. 2022, "Locally Typical Sampling" (arXiv:2202.00666); parameters are llama.cpp's, which uses the
    probabilities before temperature.
    """

    name = "typical_p"
    Params = TypicalPParams
    example: ClassVar[Mapping[str, Any]] = {"typical_p": 0.5}

    def constants(self, prepared: TypicalPParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        if prepared.typical_p == 1:
            return None
        return temperature if prepared.after_temperature else 1.0, prepared.typical_p, min(prepared.min_keep, _MANY)

    def scores(self, logits: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RankedRule.scores`."""
        distances = self._distances(logits, constants[0])
        weights = torch.exp(distances, out=self._buffer(1, logits))
        entropy, log_total = self._entropy(distances, weights)
        typical = (log_total - entropy).to(logits.dtype)
        # The probabilities are needed for the first tokens only.
        return distances.sub_(typical).abs_().neg_(), (weights, log_total.exp())

    def cut(self, first: torch.Tensor, token_ids: torch.Tensor | None, size: int, facts: Sequence[torch.Tensor]) -> Cut:
        """See `RankedRule.cut`."""
        assert token_ids is not None
        weights, total, _, share, min_keep = facts
        reached = weights.gather(1, token_ids).to(torch.float64).cumsum(dim=1)
        last = (reached < share.to(torch.float64) * total).sum(dim=1, keepdim=True)
        last = torch.maximum(last, min_keep.clamp(max=size).to(torch.int64) - 1)
        width = first.shape[1]
        return Cut(first.gather(1, last.clamp(max=width - 1)), (last < width)[:, 0])


class TailFreeParams(ProcessorParams):
    """See `TailFreeLogitsProcessor`."""

    tfs_z: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")]
    """The share of the curvature that stays. 1: all tokens."""
    min_keep: Count = 1
    """Minimum number of tokens that stay."""
    after_temperature: AfterTemperature = False
    """Use the probabilities after the request's temperature. False: those before it."""


class TailFreeLogitsProcessor(RankedRule):
    """Cuts the sorted probabilities where their curve has flattened.

    The absolute second differences of the sorted probabilities are divided by their sum, or are equal if that is at
    most 1e-6. The token at which their cumulative sum exceeds `tfs_z` is the first one that is forbidden.

    Bricken 2019, "Tail Free Sampling"; parameters and edge cases are those of llama.cpp until 2024 and of koboldcpp,
    which use the probabilities before temperature.
    """

    name = "tfs"
    Params = TailFreeParams
    example: ClassVar[Mapping[str, Any]] = {"tfs_z": 0.5}

    def constants(self, prepared: TailFreeParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        if prepared.tfs_z == 1:
            return None
        return temperature if prepared.after_temperature else 1.0, prepared.tfs_z, min(prepared.min_keep, _MANY)

    def scores(self, logits: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RankedRule.scores`."""
        return logits, ()

    def cut(self, first: torch.Tensor, token_ids: torch.Tensor | None, size: int, facts: Sequence[torch.Tensor]) -> Cut:
        """See `RankedRule.cut`."""
        temperature, z, min_keep = (each.to(torch.float64) for each in facts)
        width = first.shape[1]
        if size <= 2:
            return Cut(torch.full_like(first[:, :1], -math.inf))
        weights = ((first - first[:, :1]).to(torch.float64) / temperature).exp()
        reached = weights.diff(dim=1).diff(dim=1).abs().cumsum(dim=1)
        curvature = reached[:, -1:]

        least = min_keep.clamp(max=size).to(torch.int64)

        def staying(sums: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
            """Return the number of tokens that stay, int64 [rows, 1]: all, if it is not below that of the sums."""
            place = torch.maximum((sums <= limit).sum(dim=-1, keepdim=True), least)
            return torch.where(place < sums.shape[-1], place.clamp(min=1), size)

        stays = staying(reached, z * curvature)
        if width == size:
            equal = torch.arange(1, size - 1, device=first.device, dtype=torch.float64) / (size - 2)
            stays = torch.where(curvature > 1e-6 * row_sums(weights), stays, staying(equal, z))
            return Cut(first.gather(1, stays - 1))
        # The other tokens add at most this much, as their first differences add up to the last weight.
        rest = weights[:, -2:].sum(dim=1, keepdim=True)
        is_same = stays == staying(reached, z * (curvature + rest))
        decided = is_same & (stays < width) & (curvature > 1e-6 * size)
        return Cut(first.gather(1, stays.clamp(max=width) - 1), decided[:, 0])


class MinKParams(ProcessorParams):
    """See `MinKLogitsProcessor`."""

    min_k_tau: Annotated[float, Field(ge=0, le=1e9), Expects("a number from 0 to 1e9")] = 3.0
    """At least `min_k_tau` / (range of the logits) tokens stay, rounded down."""


class MinKLogitsProcessor(RankedRule):
    """Cuts the sorted logits at the steepest drop, weighted by 1 / rank.

    k is the rank i with the largest (l_i - l_{i+1}) / (i · range), or `min_k_tau` / range if that is more. The range is
    that of the finite logits. Uses the logits before temperature, so that it does not change which tokens stay.

    Ding et al. 2026, "Min-k Sampling: Decoupling Truncation from Temperature Scaling via Relative Logit Dynamics"
    (arXiv:2604.11012), algorithm 1.
    """

    name = "min_k"
    Params = MinKParams

    def constants(self, prepared: MinKParams, temperature: float) -> Sequence[float]:
        """See `RandomRowsProcessor.constants`."""
        return (prepared.min_k_tau,)

    def scores(self, logits: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RankedRule.scores`."""
        lowest = logits.amin(dim=1, keepdim=True)
        if logits.device.type != "cpu" or bool(lowest.isneginf().any()):
            lowest = logits.masked_fill(logits.isneginf(), math.inf).amin(dim=1, keepdim=True)
        return logits, (lowest,)

    def cut(self, first: torch.Tensor, token_ids: torch.Tensor | None, size: int, facts: Sequence[torch.Tensor]) -> Cut:
        """See `RankedRule.cut`."""
        lowest, tau = (each.to(torch.float64) for each in facts)
        width = first.shape[1]
        if width == 1:
            return Cut(first)
        finite = torch.maximum(first.to(torch.float64), lowest)
        span = finite[:, :1] - lowest + 1e-8
        ranks = torch.arange(1, width, device=first.device)
        steepest = ((finite[:, :-1] - finite[:, 1:]) / ranks).max(dim=1, keepdim=True)
        stays = torch.maximum(steepest.indices + 1, (tau / span).floor().clamp(max=size).to(torch.int64))
        limits = first.gather(1, stays.clamp(max=width) - 1)
        if width == size:
            return Cut(limits)
        decided = (steepest.values >= (finite[:, -1:] - lowest) / width) & (stays <= width)
        return Cut(limits, decided[:, 0])


class TopHParams(ProcessorParams):
    """See `TopHLogitsProcessor`."""

    top_h: Share
    """The share of the entropy that stays."""
    after_temperature: AfterTemperature = True
    """Use the probabilities after the request's temperature, as transformers does. False: those before it."""


class TopHLogitsProcessor(RankedRule):
    """Keeps the most likely tokens as long as their part of the entropy is at most `top_h` of it, at least one token.

    Of the vocabulary, only the 100 most likely tokens count: others are forbidden, and the probabilities are normalized
    without them, as in transformers.

    Baghaei Potraghloo et al. 2025, "Top-H Decoding: Adapting the Creativity and Coherence with Bounded Entropy in Text
    Generation" (arXiv:2509.02510).
    """

    name = "top_h"
    Params = TopHParams
    example: ClassVar[Mapping[str, Any]] = {"top_h": 0.4}
    _COUNTED = 100

    def constants(self, prepared: TopHParams, temperature: float) -> Sequence[float]:
        """See `RandomRowsProcessor.constants`."""
        return temperature if prepared.after_temperature else 1.0, prepared.top_h

    def scores(self, logits: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RankedRule.scores`."""
        return logits, ()

    def cut(self, first: torch.Tensor, token_ids: torch.Tensor | None, size: int, facts: Sequence[torch.Tensor]) -> Cut:
        """See `RankedRule.cut`."""
        temperature, top_h = (each.to(torch.float64) for each in facts)
        distances = (first - first[:, :1]).to(torch.float64) / temperature
        weights = distances.exp()
        shares = weights / weights.sum(dim=1, keepdim=True)
        reached = -torch.special.xlogy(shares, shares).cumsum(dim=1)
        stays = (reached <= top_h * reached[:, -1:]).sum(dim=1, keepdim=True).clamp(min=1)
        return Cut(first.gather(1, stays - 1))

    def _tried(self, scores: torch.Tensor) -> Iterator[int]:
        yield min(self._COUNTED, scores.shape[1])
