"""Log-probabilities of tokens for responses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np
import torch

from logitship.sampler.device_tensor import copies_to, to_cpu
from logitship.sampler.sampling_params import SamplingParams

from .candidates import top_candidates
from .rows import Scratch, one_thread_for_few, take_rows
from .sampler_op import SamplerOp, SamplingRow
from .top_k_top_p import kept_tokens, removes_tokens

LogprobsPoint: TypeAlias = Literal["raw", "greedy", "random"]
"""A point of a step at which log-probabilities are taken: before any edit, or after all of them, which greedy and
random rows reach at different points."""


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities (natural logarithm) at one position.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability; -inf for a masked token.
        rank: 1 plus the number of more likely tokens.
        top: (token id, log-probability) of the k most likely tokens, most likely first, ties by ascending id. Masked
            tokens come last, with -inf.
        requested: the same of the tokens that the row names, in its order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    requested: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    top: Sequence[int],
    requested: Sequence[Sequence[int]] | None = None,
) -> list[RowLogprobs]:
    """Look up tokens in the distributions of their rows.

    For sampled tokens, and for those of a prompt: each row of `logits` then predicts its token.

    Args:
        logits: float32 [rows, vocab].
        token_ids: one token per row.
        top: number of most likely tokens that each row asks for; limited to the vocabulary.
        requested: tokens that each row names; None: none.

    Returns:
        One record per row.
    """
    return look_up(logits.log_softmax(dim=-1), token_ids, top, requested)


def look_up(
    logprobs: torch.Tensor,
    token_ids: Sequence[int],
    top: Sequence[int],
    requested: Sequence[Sequence[int]] | None = None,
) -> list[RowLogprobs]:
    """Look up tokens as `token_logprobs` does, from log-probabilities instead of logits: float32 [rows, vocab]."""
    if not token_ids:
        return []
    tokens = copies_to(logprobs.device)(np.array(token_ids, dtype=np.int64))
    chosen = logprobs.gather(-1, tokens[:, None])
    top_values, top_ids = _most_likely(logprobs, max(top))
    if logprobs.device.type == "cpu":
        ranks = _ranks(logprobs, chosen, top_values)
    else:
        above = (logprobs > chosen).sum(dim=-1, keepdim=True)
        chosen, above, top_values, top_ids = to_cpu(chosen, above, top_values, top_ids)
        ranks = (above[:, 0] + 1).tolist()
    return [
        RowLogprobs(token_id, logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)), named)
        for token_id, logprob, rank, ids, values, k, named in zip(
            token_ids,
            chosen.squeeze(-1).tolist(),
            ranks,
            top_ids.tolist(),
            top_values.tolist(),
            top,
            _named(logprobs, requested or [()] * len(token_ids)),
            strict=True,
        )
    ]


def _named(logprobs: torch.Tensor, requested: Sequence[Sequence[int]]) -> list[tuple[tuple[int, float], ...]]:
    """Return (token id, log-probability) of the tokens that each row names."""
    rows = [row for row, tokens in enumerate(requested) for _ in tokens]
    if not rows:
        return [()] * len(requested)
    tokens = [token for each in requested for token in each]
    places = copies_to(logprobs.device)(np.array([rows, tokens], dtype=np.int64))
    values = iter(zip(tokens, logprobs[places[0], places[1]].tolist(), strict=True))
    return [tuple(islice(values, len(each))) for each in requested]


def _ranks(logprobs: torch.Tensor, chosen: torch.Tensor, top_values: torch.Tensor) -> list[int]:
    """Return each row's rank: 1 plus the number of values above the row's chosen one. All on the CPU.

    Args:
        logprobs: float32 [rows, vocab].
        chosen: float32 [rows, 1].
        top_values: float32 [rows, any], the largest values of each row.
    """
    above = (top_values > chosen).sum(dim=-1).tolist()
    # If one of the largest values is not above it, no other value is.
    further = [row for row, count in enumerate(above) if count == top_values.shape[-1]]
    if further:
        # A view if these are all rows.
        rows = slice(None) if len(further) == len(above) else further
        # Up to ten times faster than PyTorch's sum, which first converts each bool.
        values, limits = logprobs[rows].numpy(), chosen[rows].numpy()
        for row, row_values, limit in zip(further, values, limits, strict=True):
            above[row] = np.count_nonzero(row_values > limit)
    return [count + 1 for count in above]


def _most_likely(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` of each row by descending value, then ascending id. Resolves ties at the end too."""
    if count == 0:
        return logprobs[:, :0], torch.empty(len(logprobs), 0, dtype=torch.int64)
    # One more than requested shows whether the last one ties with tokens that were left out.
    values, token_ids = top_candidates(logprobs, count + 1)
    if values.shape[-1] > count:
        tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(-1)
        if len(tied) > 0:
            whole_values, whole_ids = top_candidates(logprobs[tied], logprobs.shape[-1])
            values[tied], token_ids[tied] = whole_values[:, : count + 1], whole_ids[:, : count + 1]
    return values[:, :count], token_ids[:, :count]


@dataclass(frozen=True)
class LogprobRows:
    """Rows that ask for log-probabilities at one point of a step.

    Attributes:
        rows: int64 [n], ascending.
        params: sampling parameters by row.
    """

    rows: torch.Tensor
    params: dict[int, SamplingParams]


class StepLogprobs:
    """The log-probabilities that the rows of one step ask for.

    Args:
        asking: the rows, by point of the step.
        scratch: a buffer for all rows.
    """

    def __init__(self, asking: Mapping[LogprobsPoint, LogprobRows], scratch: Scratch) -> None:
        self._asking = asking
        self._scratch = scratch
        self._recorded: list[tuple[dict[int, SamplingParams], torch.Tensor]] = []

    def record(self, point: LogprobsPoint, logits: torch.Tensor) -> None:
        """Record the current log-probabilities of all tokens, for the rows that ask for them at this point.

        Args:
            point: the point; at "random", tokens that top-k and top-p remove are first set to -inf.
            logits: float32 [rows, vocab].
        """
        asking = self._asking.get(point)
        if asking is None:
            return
        if point == "random":
            for row, params in asking.params.items():
                if removes_tokens(params, logits.shape[-1]):
                    logits[row].masked_fill_(~kept_tokens(logits[row], params.top_k, params.top_p), -math.inf)
        out = self._scratch.rows(sum(len(params) for params, _ in self._recorded), len(asking.rows), logits)
        with one_thread_for_few(logits):
            logprobs = torch.log_softmax(take_rows(logits, asking.rows), dim=-1, out=out)
        self._recorded.append((asking.params, logprobs))

    def finish(self, token_ids: Sequence[int], without: Collection[int]) -> list[RowLogprobs | None]:
        """Return the log-probabilities.

        Args:
            token_ids: sampled token of each row.
            without: rows without a token.

        Returns:
            One entry per row; None for rows that do not ask.
        """
        found: list[RowLogprobs | None] = [None] * len(token_ids)
        for asking, logprobs in self._recorded:
            tokens = [token_ids[row] for row in asking]
            top = [params.logprobs or 0 for params in asking.values()]
            requested = [params.logprob_token_ids or () for params in asking.values()]
            for row, record in zip(asking, look_up(logprobs, tokens, top, requested), strict=True):
                found[row] = None if row in without else record
        return found


class Logprobs(SamplerOp[SamplingParams, dict[LogprobsPoint, LogprobRows]]):
    """Takes the log-probabilities that requests ask for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._scratch = Scratch()

    def new_state(self, row: SamplingRow) -> SamplingParams | None:
        """Return the parameters of a request that asks for log-probabilities."""
        return None if row.params.logprobs is None else row.params

    def prepare(self, states: Mapping[int, SamplingParams]) -> dict[LogprobsPoint, LogprobRows]:
        """Return the rows by the point at which they ask."""
        by_point: dict[LogprobsPoint, dict[int, SamplingParams]] = {}
        for row, params in states.items():
            by_point.setdefault(_point(params), {})[row] = params
        return {
            point: LogprobRows(self._to_device(np.array([*rows], dtype=np.int64)), rows)
            for point, rows in by_point.items()
        }

    def begin(self, rows: Sequence[int] | None) -> StepLogprobs:
        """Return what records the log-probabilities of a step."""
        return StepLogprobs(self.prepared(rows) or {}, self._scratch)


def _point(params: SamplingParams) -> LogprobsPoint:
    if params.logprobs_mode == "raw_logprobs":
        return "raw"
    return "greedy" if params.greedy else "random"
