"""The sampler's state of each row: parameters as tensors, rebuilt when the batch changes, and live histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import AllowedTokens, Words, mask_of
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.ops.rows import BadWords, forbidden_tokens
from logitship.sampler.ops.sample_tokens import UniformNumbers
from logitship.sampler.sampling_params import LogprobsMode, SamplingParams

from .token_counts import TokenCounts

_INT64_MAX = 2**63 - 1
_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """One request in the batch.

    Attributes:
        params: sampling parameters.
        output_token_ids: the live output.
        counts: token counts of prompt and output; None without penalties.
        forbidden: bool [vocab], the tokens outside `allowed_token_ids`; None if all are allowed.
        bad_words: bad words; None if there are none.
        allowed: the tokens in `allowed_token_ids` as a mask; None if all are allowed.
    """

    params: SamplingParams
    output_token_ids: list[int]
    counts: TokenCounts | None
    forbidden: torch.Tensor | None
    bad_words: BadWords | None
    allowed: Words | None


@dataclass(frozen=True)
class RandomRows:
    """Rows with random sampling.

    Attributes:
        rows: int64 [n], ascending.
        top_k: int64 [n]; 0 for all tokens.
        top_p: float64 [n].
        seeds: uint64 [n].
        outputs: the live outputs.
        filters: True if the rows use top-k or top-p.
    """

    rows: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: npt.NDArray[np.uint64]
    outputs: list[list[int]]
    filters: bool

    @cached_property
    def _numbers(self) -> UniformNumbers:
        return UniformNumbers(self.seeds)

    def uniform(self) -> torch.Tensor:
        """Return this step's random number of each row: float64 [n], in [0, 1)."""
        positions = np.array([len(output) for output in self.outputs], dtype=np.int64)
        return torch.from_numpy(self._numbers.at(positions)).to(self.rows.device)


@dataclass(frozen=True)
class LogprobRows:
    """Rows that ask for log-probabilities of one kind.

    Attributes:
        rows: int64 [n], ascending.
        numbers: the same as Python integers.
        top: number of most likely tokens that each row asks for.
        requested: tokens that each row names.
    """

    rows: torch.Tensor
    numbers: list[int]
    top: list[int]
    requested: list[Sequence[int]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.numbers)


@dataclass(frozen=True)
class Penalties:
    """The arguments of `apply_penalties` after the logits."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    output_counts: torch.Tensor
    repetition_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor


class PreparedRows:
    """Rows of the batch, sorted by the features they use, so that a step skips rows that need nothing.

    Valid until the batch changes. Rows are numbered by their places among these rows.

    Attributes:
        params: sampling parameters of each row.
        temperature: float32 [rows, 1]; 1 for greedy rows.
        greedy: int64 [n]: rows that take the most likely token.
        unfiltered: random rows without top-k and top-p.
        filtered: random rows with top-k, top-p or both.
        raw: rows that ask for log-probabilities before any edit.
        processed_greedy: greedy rows that ask for log-probabilities after the edits.
        processed_random: random rows that ask for log-probabilities after the edits.
        processed_filtered: of these, row to top-k and top-p of those that have them.
        forbidden: row to bool [vocab], the tokens outside its `allowed_token_ids`.
        traced: row to the number of most likely tokens in its trace.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        def numbers(condition: Callable[[SamplingParams], bool]) -> list[int]:
            return [number for number, row in enumerate(rows) if condition(row.params)]

        filtered = numbers(lambda params: not params.greedy and _filters(params, vocab_size))
        unfiltered = numbers(lambda params: not params.greedy and not _filters(params, vocab_size))
        self._device = device
        self.params = [row.params for row in rows]
        self.temperature = _to(device, [_temperature(params) for params in self.params], torch.float32)[:, None]
        self.greedy = _to(device, numbers(lambda params: params.greedy), torch.int64)
        self.unfiltered = _random_rows(rows, unfiltered, device, filters=False)
        self.filtered = _random_rows(rows, filtered, device, filters=True)
        self.raw = _logprob_rows(rows, numbers(lambda params: _asks(params, "raw_logprobs")), device)
        self.processed_greedy = _logprob_rows(
            rows, numbers(lambda params: params.greedy and _asks(params, "processed_logprobs")), device
        )
        self.processed_random = _logprob_rows(
            rows, numbers(lambda params: not params.greedy and _asks(params, "processed_logprobs")), device
        )
        self.processed_filtered = {
            number: (self.params[number].top_k, self.params[number].top_p)
            for number in filtered
            if number in self.processed_random.numbers
        }
        self.forbidden = {number: row.forbidden for number, row in enumerate(rows) if row.forbidden is not None}
        self.traced = {number: p.trace for number, p in enumerate(self.params) if p.trace is not None}
        self._bad_words = {
            number: (row.bad_words, row.output_token_ids)
            for number, row in enumerate(rows)
            if row.bad_words is not None
        }
        self._counts = {number: row.counts for number, row in enumerate(rows) if row.counts is not None}
        penalties = [_penalty_params(self.params[number]) for number in self._counts]
        self._penalties = np.array(penalties, dtype=np.float32).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.params)

    @property
    def any_random(self) -> bool:
        """True if some row is sampled at random."""
        return bool(self.unfiltered.outputs or self.filtered.outputs)

    @property
    def any_bad_words(self) -> bool:
        """True if some row has bad words."""
        return bool(self._bad_words)

    def bad_word_endings(self) -> tuple[list[int], list[int]]:
        """Return rows and, for each, a token that would complete a bad word there now."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, (bad_words, output) in self._bad_words.items():
            endings = bad_words.endings(output)
            rows += [row] * len(endings)
            tokens += endings
        return rows, tokens

    def penalties(self) -> Penalties | None:
        """Return the current token counts and penalties of the rows that have any; None if none has."""
        if not self._counts:
            return None
        for counts in self._counts.values():
            counts.follow()
        lengths = [len(counts.tokens) for counts in self._counts.values()]
        arrays = (
            np.repeat(np.array(list(self._counts)), lengths),
            np.concatenate([counts.tokens for counts in self._counts.values()]),
            np.concatenate([counts.output_counts for counts in self._counts.values()]),
            *np.repeat(self._penalties.T, lengths, axis=1),
        )
        return Penalties(*(torch.from_numpy(array).to(self._device) for array in arrays))


class SamplingBatch:
    """The sampler's own state of the persistent batch.

    Assumption: after each update the rows in use are 0 to `batch_size` - 1.

    Attributes:
        size: number of rows.
        prepared: all rows, prepared.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: BatchRows[SamplingRow] = BatchRows(self._new_row)
        self.size = 0
        self.prepared = self.prepare(range(0))

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Once a step.

        Raises:
            ValueError: a request with random sampling has no seed.
        """
        if batch_update is not None:
            self._rows.update(batch_update)
            self.size = batch_update.batch_size
            self.prepared = self.prepare(range(self.size))

    def prepare(self, rows: Iterable[int]) -> PreparedRows:
        """Prepare some of the rows."""
        return PreparedRows([self._rows[row] for row in rows], self._vocab_size, self._device)

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """Forbid what the parameters of a row forbid, given the current tokens of its live output list."""
        state = self._rows[row]
        if state.counts is not None:
            allowed.edit_values()
        if state.allowed is not None:
            allowed.keep_mask(state.allowed)
        if state.bad_words is not None:
            allowed.forbid(state.bad_words.endings(state.output_token_ids))

    def _new_row(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> SamplingRow:
        if params.seed is None and not params.greedy:
            raise ValueError("seed: required for random sampling; the engine sets it at admission")
        allowed = params.allowed_token_ids
        return SamplingRow(
            params,
            output_token_ids,
            TokenCounts(_penalized_prompt(params, prompt_token_ids), output_token_ids) if _penalized(params) else None,
            None if allowed is None else forbidden_tokens(allowed, self._vocab_size, self._device),
            BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None,
            None if allowed is None else mask_of(allowed, self._vocab_size),
        )


def _penalty_params(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _penalized(params: SamplingParams) -> bool:
    return _penalty_params(params) != (1, 0, 0)


def _penalized_prompt(params: SamplingParams, prompt_token_ids: list[int] | None) -> Sequence[int]:
    # Frequency and presence penalties only count the output.
    return prompt_token_ids or [] if params.repetition_penalty != 1 else []


def _temperature(params: SamplingParams) -> float:
    # Clamped to float32's range: dividing by 0 or infinity would give NaN.
    return 1.0 if params.greedy else min(max(params.temperature, _FLOAT32.tiny), _FLOAT32.max)


def _filters(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1


def _asks(params: SamplingParams, mode: LogprobsMode) -> bool:
    return params.logprobs is not None and params.logprobs_mode == mode


def _random_rows(rows: Sequence[SamplingRow], numbers: list[int], device: torch.device, *, filters: bool) -> RandomRows:
    params = [rows[number].params for number in numbers]
    return RandomRows(
        rows=_to(device, numbers, torch.int64),
        top_k=_to(device, [min(max(p.top_k, 0), _INT64_MAX) for p in params], torch.int64),
        top_p=_to(device, [p.top_p for p in params], torch.float64),
        seeds=np.array([(p.seed or 0) % 2**64 for p in params], dtype=np.uint64),
        outputs=[rows[number].output_token_ids for number in numbers],
        filters=filters,
    )


def _logprob_rows(rows: Sequence[SamplingRow], numbers: list[int], device: torch.device) -> LogprobRows:
    params = [rows[number].params for number in numbers]
    top = [each.logprobs or 0 for each in params]
    return LogprobRows(
        _to(device, numbers, torch.int64), numbers, top, [each.logprob_token_ids or () for each in params]
    )


def _to(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)
