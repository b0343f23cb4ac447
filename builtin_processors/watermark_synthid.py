"""Marks an answer by tournament sampling: SynthID-Text (Dathathri et al., Nature 634, 2024)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.watermarks.context_history import ContextHistory
from logitship.builtin_processors.watermarks.g_values import GValues
from logitship.builtin_processors.watermarks.watermark_key import NO_KEY, WatermarkKey

from .base import BuiltinProcessor
from .params import Count, Expects, ModelFacts, ProcessorParams

MAX_DEPTH = 64


class WatermarkSynthidParams(ProcessorParams):
    """See `WatermarkSynthidLogitsProcessor`. Names are those of transformers' `SynthIDTextWatermarkingConfig`."""

    ngram_len: Annotated[int, Field(ge=2, le=16), Expects("an integer from 2 to 16")] = 5
    """Number of tokens whose hash decides the g-values: the context, and the token itself."""
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH), Expects(f"an integer from 1 to {MAX_DEPTH}")] = 30
    """Number of layers of the tournament: the length of transformers' `keys`."""
    context_history_size: Count = 1024
    """A token whose context occurred in this many steps before it is not marked."""
    candidates: Annotated[int, Field(ge=1, le=4096), Expects("an integer from 1 to 4096")] = 256
    """The tournament is held among this many of the most likely tokens; the others keep their probabilities."""


@dataclass(frozen=True, eq=False)
class Tournament:
    """A request's validated parameters, with the g-values of its layers."""

    params: WatermarkSynthidParams
    g_values: GValues


@dataclass(frozen=True)
class _MarkedRow:
    """A row that is marked in a step.

    Attributes:
        index: its index in the logits.
        tournament: its parameters.
        context_hash: of its last tokens.
        limits: its temperature, `top_k` (0: none), `top_p` and `min_p`.
    """

    index: int
    tournament: Tournament
    context_hash: int
    limits: tuple[float, float, float, float]


class WatermarkSynthidLogitsProcessor(BuiltinProcessor):
    """Moves probability towards tokens whose g-values are 1, layer by layer, so that a sampled token has more of them.

    Over all keys, each token keeps its probability, so answers are as good as without the mark. transformers holds the
    tournament after its warpers. Here it is held before temperature, top-k, top-p and min-p, with their result in mind:
    with the probabilities after temperature, and without the tokens that the three would remove, whose logits become
    -inf as far as they are known from the candidates. At a temperature of 0 nothing is random, and nothing is marked.

    The state, the contexts so far, is derived from the output.

    Args:
        key: the secret; None: requests are refused.
    """

    name = "watermark_synthid"
    Params = WatermarkSynthidParams
    example: ClassVar[Mapping[str, Any]] = {"ngram_len": 3, "context_history_size": 4, "candidates": 40}

    def __init__(self, key: WatermarkKey | None = None) -> None:
        self._key = key
        self._g_values: dict[int, GValues] = {}
        self._lock = threading.Lock()

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> Tournament:
        """See `BuiltinProcessor.prepare`."""
        read = WatermarkSynthidParams.read(params, model)
        if self._key is None:
            raise ValueError(NO_KEY)
        with self._lock:
            if read.depth not in self._g_values:
                self._g_values[read.depth] = GValues(self._key, read.depth)
            return Tournament(read, self._g_values[read.depth])

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Hold the tournaments of all rows, in place, at once for those of equal size."""
        groups: dict[tuple[int, int], list[_MarkedRow]] = {}
        for index, params in enumerate(custom_param_list or ()):
            row = self._marked_row(index, params)
            if row is not None:
                size = row.tournament.params.depth, min(row.tournament.params.candidates, logits.shape[1])
                groups.setdefault(size, []).append(row)
        for (_, num_candidates), rows in groups.items():
            if len(rows) == len(logits):
                _mark(logits, rows, num_candidates)
                continue
            indices = to_device((row.index for row in rows), np.int64, logits.device)
            edited = logits[indices]
            _mark(edited, rows, num_candidates)
            logits[indices] = edited
        return logits

    def _marked_row(self, index: int, params: dict[str, Any]) -> _MarkedRow | None:
        """Return a row that is to be marked; None if it is not."""
        tournament: Tournament = self.prepared(params)
        wanted, request = tournament.params, params["__req__"]
        if self.name not in request.state:
            request.state[self.name] = ContextHistory(wanted.ngram_len - 1)
        history: ContextHistory = request.state[self.name]
        context_hash, steps_ago = history.follow(request.output_ids)
        sampling = request.sampling_params
        is_repeated = steps_ago is not None and steps_ago <= wanted.context_history_size
        if sampling.temperature == 0 or is_repeated:
            return None
        limits = sampling.temperature, max(sampling.top_k, 0), sampling.top_p, sampling.min_p
        return _MarkedRow(index, tournament, context_hash, limits)


def _mark(logits: torch.Tensor, rows: list[_MarkedRow], num_candidates: int) -> None:
    """Hold the tournament of each row among its most likely tokens, in place, without waiting for the device.

    Args:
        logits: float32 [rows, vocab].
        rows: the rows, whose tournaments have the same depth.
        num_candidates: at most the vocabulary's size.
    """
    device = logits.device
    values, tokens = logits.topk(num_candidates, dim=1)
    limits = to_device((row.limits for row in rows), np.float32, device)
    temperature = limits[:, :1]
    scaled = values / temperature
    if any(row.limits[1:] != (0, 1.0, 0.0) for row in rows):
        # The whole row is read only for the probabilities that top-p adds up.
        total = logits.div(temperature).logsumexp(1, keepdim=True) if any(row.limits[2] < 1 for row in rows) else None
        excluded, is_complete = _excluded(scaled, total, limits)
        scaled = scaled.masked_fill(excluded, -torch.inf)
        values = values.masked_fill(excluded, -torch.inf)
        logits.masked_fill_(is_complete, -torch.inf)
    before = scaled.softmax(1)
    contexts = to_device((row.context_hash for row in rows), np.int64, device)
    after = hold_tournament(before, rows[0].tournament.g_values.of_tokens(contexts, tokens))
    # Finite where it was finite: a later processor may still force a token that has lost every match.
    tiny = torch.finfo(torch.float32).tiny
    gain = after.clamp_(min=tiny).log_().sub_(before.clamp(min=tiny).log_()).mul_(temperature)
    logits.scatter_(1, tokens, torch.where(before > 0, values + gain, values))


def _excluded(
    scaled: torch.Tensor, total: torch.Tensor | None, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates that top-k, top-p and min-p remove, and the rows in which all that remain are candidates.

    Args:
        scaled: the candidates' logits, divided by the temperature, in descending order: float32 [rows, candidates].
        total: the logarithm of the sum of all exponentials of the row, float32 [rows, 1]; None: no row has a top-p.
        limits: temperature, top-k, top-p and min-p, float32 [rows, 4].

    Returns:
        bool [rows, candidates], bool [rows, 1].
    """
    num_candidates = scaled.shape[1]
    top_k, top_p, min_p = limits[:, 1:2], limits[:, 2:3], limits[:, 3:4]
    has_top_k = (top_k >= 1) & (top_k <= num_candidates)
    ranks = torch.arange(num_candidates, device=scaled.device)
    excluded = (scaled < scaled[:, :1] + min_p.log()) | (has_top_k & (ranks >= top_k))
    is_complete = excluded[:, -1:].clone() | has_top_k
    if total is not None:
        kept = scaled.masked_fill(excluded, -torch.inf)
        # Top-p counts the probabilities of what the others leave: of all tokens, if that is not known.
        kept_total = torch.where(is_complete, kept.logsumexp(1, keepdim=True), total)
        mass = (kept - kept_total).exp().cumsum(1)
        beyond = mass.roll(1, dims=1) >= top_p
        beyond[:, :1] = False
        beyond &= top_p < 1
        excluded |= beyond
        is_complete |= (mass[:, -1:] >= top_p) & (top_p < 1)
    return excluded, is_complete


def hold_tournament(probabilities: torch.Tensor, g_values: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of winning a tournament of two players a match, in which the higher g-value wins.

    Args:
        probabilities: float32 [rows, tokens], with a sum of 1.
        g_values: 0.0 or 1.0, float32 [layers, rows, tokens].
    """
    for layer in g_values:
        winning = layer * probabilities
        mass = winning.sum(1, keepdim=True)
        probabilities = winning.addcmul_(probabilities, 1 - mass)
    return probabilities
