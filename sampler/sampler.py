"""The sampler (contract 4): from the model's logits to the next tokens of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, cast

import torch

from logitship.client.errors import LogitshipError, ProcessorFault
from logitship.sampler.batch.sampling_batch import LogprobRows, Penalties, PreparedRows, RandomRows, SamplingBatch
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors, apply_to, take_faults
from logitship.sampler.ops.logprobs import RowLogprobs, look_up
from logitship.sampler.ops.penalties import apply_penalties
from logitship.sampler.ops.rows import (
    Scratch,
    greedy_sample,
    mask_forbidden,
    mask_tokens,
    one_thread_for_few,
    row_parts,
    take_rows,
)
from logitship.sampler.ops.sample_tokens import apply_temperature, random_sample
from logitship.sampler.ops.top_k_top_p import kept_tokens, top_k_top_p_sample

from .allowed_tokens import AllowedTokens, DecidesTokens, decides_tokens
from .trace import RowTrace, StepTrace

_PART_SIZE = 2**20
"""Number of probabilities that are processed at a time."""
_FEW = 256
"""Most tokens whose logits are computed one by one."""
_NO_TRACE = StepTrace({})


class NoTokenLeftError(LogitshipError):
    """Every token of the row is forbidden.

    Args:
        forbidding: names of the request's fields and processors that forbid tokens.
    """

    def __init__(self, forbidding: Sequence[str] = ()) -> None:
        who = ", ".join(forbidding) or "the model or an installed batch processor"
        super().__init__(
            f"no token is left to sample: every logit is -inf. Together, {who} forbid the whole vocabulary: forbid less"
        )


class NonFiniteLogitsError(LogitshipError):
    """The row has a logit that is NaN or +inf, or was left without a finite one after the temperature.

    Args:
        processors: names of the request's processors.
        was_checked: True if the logits were finite before the processors that run after the temperature.
    """

    def __init__(self, processors: Sequence[str] = (), *, was_checked: bool = False) -> None:
        who = ", ".join(["logit_bias", "a penalty", "an installed batch processor", *processors])
        super().__init__(
            "an installed batch processor, which runs after the temperature, left NaN, +inf or no finite logit"
            if was_checked
            else f"the logits contain NaN or +inf: either the model's own do, or one of {who} exceeded float32's range"
        )


class Draft(NamedTuple):
    """Tokens that come next in a row, in order.

    Attributes:
        token_ids: at least one token. One, if it is certain.
        is_certain: False if `sample` may return other tokens.
    """

    token_ids: Sequence[int]
    is_certain: bool


class FewTokens(NamedTuple):
    """The only tokens that `sample` may return for a row.

    Attributes:
        token_ids: the tokens.
        takes_largest: True if it returns the one with the largest logit, the lowest id of a tie, if all these logits
            are finite.
    """

    token_ids: Sequence[int]
    takes_largest: bool

    def largest(self, logits: Sequence[float]) -> int | None:
        """Return the token with the largest of its logits, the lowest id of a tie; None if one is not finite."""
        if not all(map(math.isfinite, logits)):
            return None
        largest = max(logits)
        return min(token for token, logit in zip(self.token_ids, logits, strict=True) if logit == largest)


class ShippedStage(Protocol):
    """The batch processor of step 5: `ShippedProcessors` or a replacement."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Once a step."""
        ...

    def begin(self) -> None:
        """Begin calls of the next `apply` before its logits exist. Optional."""
        ...

    def abandon(self) -> None:
        """End the calls that no `apply` took: there will be no logits."""
        ...

    def may_restrict(self, row: int) -> bool:
        """Return whether `restrict` may leave few tokens of a row."""
        ...

    def restrict(self, allowed: Mapping[int, AllowedTokens]) -> None:
        """Forbid what the next `apply` will set to -inf in some rows, as far as their histories alone decide it."""
        ...

    def skip(self, rows: Iterable[int]) -> None:
        """Count a call for each processor of some rows, whose next tokens are certain without `apply`."""
        ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run the shipped processors on float32 [rows, vocab]. Rows of a processor that failed are left finite."""
        ...

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run them on the rows of the batch that have a 1. See `apply_to`."""
        ...

    def watch(self, trace: StepTrace) -> None:
        """Record the rows in `trace` after each processor, from the next call on."""
        ...

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """Return (row of the batch, fault) of the processors that failed in the last call."""
        ...

    def take_deferred(self) -> list[int]:
        """Return the rows of the batch that cannot sample a token in this step, because a processor has not ended."""
        ...

    def fault_of(self, row: int, logits: torch.Tensor) -> ProcessorFault | None:
        """Return the fault of the processor that left a row not finite, if its last call was not checked.

        Args:
            row: row of the batch.
            logits: float32 [vocab].
        """
        ...


@dataclass(frozen=True)
class SamplerOutput:
    """Result of a step, one entry per row of the logits.

    Attributes:
        token_ids: next tokens. The token of a row in `faults` or `deferred` is meaningless.
        logprobs: log-probabilities of the rows that asked for them; None for other rows, and those without a token.
        faults: (row, fault) of the rows whose request ends, in row order.
        traces: traces of the rows that asked for them; None for other rows, and those without a token.
        deferred: rows that get their next token in a later step, see `DeferredCalls`.
    """

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]
    faults: list[tuple[int, LogitshipError]]
    traces: list[RowTrace | None]
    deferred: frozenset[int] = frozenset()


class Sampler:
    """Samples the next tokens from the logits. `sample` numbers its steps alike.

    1. Mask the tokens outside `allowed_token_ids`, and those that would complete a bad word.
    2. Batch processors that can change the most likely token: min-tokens, logit bias, installed ones. If an installed
       one fails on a row, here or in step 9, that request ends.
    3. Repetition, frequency and presence penalties.
    4. Batch processors of vLLM's model runner V2, then those that force tokens: the thinking budget.
    5. Shipped and built-in processors, group by group: first a request's masks (grammars, trees), then its other
       processors in list order, then the masks again. A row whose processor takes too long is deferred: it is zero in
       the steps below, and gets its token in a later step.
    6. Mask the tokens outside `allowed_token_ids` again: forced tokens obey masks. Then check that each row has a
       finite logit and neither NaN nor +inf. A row that fails ends its own request, and is zero in the steps below.
    7. Take the most likely token of greedy rows.
    8. Temperature.
    9. Batch processors that never change the most likely token: min-p, installed ones. Only if some row is random.
    10. Top-k, then top-p, then sample.
    11. Log-probabilities as each request asks: raw (the logits before step 1) or processed (after step 6 for greedy
        rows, after top-k and top-p of step 10 for random ones).

    Batch-invariant: a row's token depends only on its own logits, parameters, history and seed.

    Args:
        vocab_size: number of columns of the logits.
        device: device of the logits.
        logits_processors: the installed batch processors.
        shipped: the batch processor that runs the requests' processors; None if requests cannot have any.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        logits_processors: LogitsProcessors,
        shipped: ShippedStage | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._processors = logits_processors
        self._shipped = shipped
        self._batch = SamplingBatch(vocab_size, device)
        self._logprobs = Scratch()
        self._probabilities = Scratch()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Once a step, before `sample`; None if no row changed.

        Raises:
            ValueError: a request with random sampling has no seed.
        """
        self._batch.update_state(batch_update)
        self._processors.update_state(batch_update)
        if self._shipped is not None:
            self._shipped.update_state(batch_update)

    def begin(self) -> None:
        """Begin what the next `sample` can do before its logits exist. Optional, after `update_state`."""
        if self._shipped is not None:
            self._shipped.begin()

    @property
    def can_draft(self) -> bool:
        """False if an installed batch processor may do anything to any row, so that nothing is known before."""
        return all(decides_tokens(processor) for processor in self._processors.all)

    def may_draft(self, row: int) -> bool:
        """Return whether a row may have a draft. Takes less time than `draft`."""
        params = self._batch.prepared.params[row]
        is_restricted = params.allowed_token_ids is not None or params.thinking_token_budget is not None
        return is_restricted or (self._shipped is not None and self._shipped.may_restrict(row))

    def draft(self, rows: Iterable[int]) -> dict[int, Draft]:
        """Return the next tokens that are known, or likely, before their logits exist.

        A token is certain if everything else becomes -inf in steps 1 to 6 of `sample`: as long as its own logit is
        finite, `sample` returns it. What random rows sample later does not depend on that call, because their random
        numbers belong to positions.

        Args:
            rows: the rows of the batch to look at, after the tokens that their live output lists have now. They may
                have more tokens than at `update_state`.

        Returns:
            Drafts by row, for those of the rows that have one.
        """
        drafts = {}
        for row, each in self._restricted({row: AllowedTokens(self._vocab_size) for row in rows}).items():
            token = each.single()
            if token is not None:
                drafts[row] = Draft([token], is_certain=True)
            elif each.likely:
                drafts[row] = Draft(each.likely, is_certain=False)
        return drafts

    def few_allowed(self, rows: Iterable[int]) -> dict[int, FewTokens]:
        """Return the tokens that steps 1 to 6 of the next `sample` do not set to -inf, if they are few.

        Other logits make no difference to what `sample` returns, but for raw log-probabilities and traces.

        Args:
            rows: the rows of the batch to look at, whose processors are masks.

        Returns:
            The tokens by row, for those of the rows that have at most `_FEW`.
        """
        allowed = {row: AllowedTokens(self._vocab_size, may_guess=False) for row in rows}
        params = self._batch.prepared.params
        return {
            row: FewTokens(tokens, takes_largest=params[row].greedy and each.keeps_order)
            for row, each in self._restricted(allowed).items()
            if (tokens := each.at_most(_FEW)) is not None
        }

    def _restricted(self, allowed: dict[int, AllowedTokens]) -> dict[int, AllowedTokens]:
        """Forbid the tokens that the next `sample` would forbid, given the current tokens of the output lists."""
        for row, each in allowed.items():
            self._batch.restrict(row, each)
            for processor in self._processors.all:
                cast(DecidesTokens, processor).restrict(row, each)
        if self._shipped is not None:
            self._shipped.restrict(allowed)
        return allowed

    def skip(self, rows: Iterable[int]) -> None:
        """Count the processors' calls for tokens of some rows that are taken without `sample`.

        Before the tokens are appended to the live output lists.
        """
        if self._shipped is not None:
            self._shipped.skip(rows)

    def abandon(self) -> None:
        """End what `begin` and `draft` began and no `sample` took: the step failed, or their sequences have ended."""
        if self._shipped is not None:
            self._shipped.abandon()

    def sample(self, logits: torch.Tensor, rows: Sequence[int] | None = None) -> SamplerOutput:
        """Sample the next token of every row, or of some.

        Args:
            logits: float32 [rows, vocab]; edited in place.
            rows: rows of the batch that the logits belong to, ascending; None for all. The processors of other rows are
                not called. With `rows`, the batch processors must be `SpeculativeLogitsProcessor`s.

        Raises:
            ValueError: the shape of the logits does not match the rows.
        """
        batch = self._batch.prepared if rows is None else self._batch.prepare(rows)
        if logits.shape != (len(batch), self._vocab_size):
            raise ValueError(f"logits: expected shape ({len(batch)}, {self._vocab_size}), got {tuple(logits.shape)}")
        # Batch processors number rows by the batch, the logits by place.
        place = range(len(batch)) if rows is None else {row: place for place, row in enumerate(rows)}
        chosen = None if rows is None else [int(row in place) for row in range(self._batch.size)]
        with one_thread_for_few(logits):
            raw = self._all_logprobs(logits, batch.raw)
        trace = StepTrace(batch.traced) if batch.traced else _NO_TRACE
        if batch.traced:
            trace.record("model", logits)

        faults: dict[int, LogitshipError] = {}
        deferred: dict[int, None] = {}

        # 1
        mask_forbidden(logits, batch.forbidden)
        if batch.any_bad_words:
            mask_tokens(logits, *batch.bad_word_endings())
        # 2
        for processor in self._processors.non_argmax_invariant:
            logits = apply_to(processor, logits, chosen)
        # 3
        _penalize(logits, batch.penalties())
        # 4
        for processor in chain(self._processors.penalized, self._processors.forcing):
            logits = apply_to(processor, logits, chosen)
        if batch.traced:
            trace.record("request", logits)
        # 5
        if self._shipped is not None:
            self._shipped.watch(trace)
            logits = apply_to(self._shipped, logits, chosen)
            faults.update((place[row], fault) for row, fault in self._shipped.take_faults())
            deferred = dict.fromkeys(place[row] for row in self._shipped.take_deferred())
        with one_thread_for_few(logits):
            # 6
            mask_forbidden(logits, batch.forbidden)
            peak, tokens = _largest(logits, batch)
            _check_rows(logits, peak, batch, faults, partial(self._shipped_fault, rows))
            # 7: `tokens` has them
            processed_greedy = self._all_logprobs(logits, batch.processed_greedy, len(batch.raw))
            if batch.any_random:
                # 8
                apply_temperature(logits, peak, batch.temperature)
                # 9
                for processor in self._processors.argmax_invariant:
                    logits = apply_to(processor, logits, chosen)
                # 10
                for random in (batch.unfiltered, batch.filtered):
                    if random.outputs:
                        tokens.index_copy_(0, random.rows, self._sample_random(logits, random, faults))
            if batch.traced:
                trace.record_sampled(logits, batch.params, tokens)
            # Includes processors that did not run in this step: `update_state` may have failed.
            for row, fault in take_faults(self._processors.all):
                if row in place:
                    faults.setdefault(place[row], fault)
            token_ids = tokens.tolist()
            # 11
            logprobs: list[RowLogprobs | None] = [None] * len(token_ids)
            _look_up(logprobs, raw, token_ids, batch.raw)
            _look_up(logprobs, processed_greedy, token_ids, batch.processed_greedy)
            for row, (top_k, top_p) in batch.processed_filtered.items():
                logits[row].masked_fill_(~kept_tokens(logits[row], top_k, top_p), -math.inf)
            processed_random = self._all_logprobs(
                logits, batch.processed_random, len(batch.raw) + len(batch.processed_greedy)
            )
            _look_up(logprobs, processed_random, token_ids, batch.processed_random)
            for row in (*faults, *deferred):
                logprobs[row] = None
            in_row_order = sorted(faults.items(), key=lambda fault: fault[0])
            traces: list[RowTrace | None] = [None] * len(token_ids)
            if batch.traced:
                traces = trace.finish(token_ids, {**faults, **deferred})
            return SamplerOutput(token_ids, logprobs, in_row_order, traces, frozenset(deferred.keys() - faults.keys()))

    def _all_logprobs(self, logits: torch.Tensor, asking: LogprobRows, start: int = 0) -> torch.Tensor | None:
        """Return the current log-probabilities of all tokens for the rows that ask for them; None if none does.

        Args:
            logits: float32 [rows, vocab].
            asking: the rows.
            start: number of rows in the buffer that this step still needs.
        """
        if len(asking) == 0:
            return None
        out = self._logprobs.rows(start, len(asking), logits)
        return torch.log_softmax(take_rows(logits, asking.rows), dim=-1, out=out)

    def _sample_random(
        self, logits: torch.Tensor, random: RandomRows, faults: dict[int, LogitshipError]
    ) -> torch.Tensor:
        """Sample a token for each random row, int64 [n], from float32 [rows, vocab]."""
        uniform = random.uniform()
        tokens = torch.zeros_like(random.rows)
        for part in row_parts(len(uniform), logits, _PART_SIZE):
            rows = random.rows[part]
            # A view if these are all rows.
            kept = logits[part] if len(random.rows) == len(logits) else logits[rows]
            probabilities, kept = _probabilities(kept, rows, faults, out=self._probabilities.rows(0, len(kept), kept))
            if random.filters:
                top_k, top_p = random.top_k[part], random.top_p[part]
                tokens[part] = top_k_top_p_sample(kept, probabilities, top_k, top_p, uniform[part])
            else:
                tokens[part] = random_sample(probabilities, uniform[part])
        return tokens

    def _shipped_fault(self, rows: Sequence[int] | None, place: int, logits: torch.Tensor) -> ProcessorFault | None:
        if self._shipped is None:
            return None
        return self._shipped.fault_of(place if rows is None else rows[place], logits)


def _penalize(logits: torch.Tensor, penalties: Penalties | None) -> None:
    if penalties is not None:
        apply_penalties(
            logits,
            penalties.rows,
            penalties.token_ids,
            penalties.output_counts,
            penalties.repetition_penalty,
            penalties.frequency_penalty,
            penalties.presence_penalty,
        )


def _look_up(
    found: list[RowLogprobs | None], logprobs: torch.Tensor | None, token_ids: Sequence[int], asking: LogprobRows
) -> None:
    """Write the log-probabilities of the rows that ask for them into `found`."""
    if logprobs is not None:
        records = look_up(logprobs, [token_ids[row] for row in asking.numbers], asking.top, asking.requested)
        for row, record in zip(asking.numbers, records, strict=True):
            found[row] = record


def _largest(logits: torch.Tensor, batch: PreparedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest logit, [rows, 1], and the most likely tokens of the greedy rows, int64 [rows]."""
    if not batch.any_random:
        tokens = greedy_sample(logits)
        return logits.gather(-1, tokens[:, None]), tokens
    tokens = torch.zeros(len(batch), dtype=torch.int64, device=logits.device)
    if len(batch.greedy) > 0:
        tokens[batch.greedy] = greedy_sample(logits[batch.greedy])
    return logits.amax(dim=-1, keepdim=True), tokens


def _check_rows(
    logits: torch.Tensor,
    peak: torch.Tensor,
    batch: PreparedRows,
    faults: dict[int, LogitshipError],
    shipped_fault: Callable[[int, torch.Tensor], ProcessorFault | None],
) -> None:
    """Set unusable rows to zero, also in `peak`, and add them to `faults`.

    Args:
        logits: float32 [rows, vocab].
        peak: float32 [rows, 1]: each row's largest logit. NaN or +inf if the row has one, -inf if it has nothing else.
        batch: the rows.
        faults: faults by row; edited in place.
        shipped_fault: takes a row's place and its logits, and returns the fault of a shipped processor that left them
            so, or None.
    """
    # A finite sum shows at once that all rows are finite. A sum of finite values that overflows only costs the check
    # below.
    if math.isfinite(peak.sum()):
        return
    unusable = (~torch.isfinite(peak)).nonzero()[:, 0]
    for row in unusable.tolist():
        empty = peak[row].isneginf()
        params = batch.params[row]
        processors = [attached.name for attached in params.processors]
        fault = NoTokenLeftError(params.forbidding) if empty else NonFiniteLogitsError(processors)
        faults.setdefault(row, shipped_fault(row, logits[row]) or fault)
    logits[unusable] = 0.0
    peak[unusable] = 0.0


def _probabilities(
    logits: torch.Tensor, rows: torch.Tensor, faults: dict[int, LogitshipError], out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of some rows, and the logits that they belong to.

    Args:
        logits: float32 [n, vocab].
        rows: int64 [n]: keys of the rows in `faults`.
        faults: faults by row; edited in place.
        out: buffer for the probabilities, float32 in the shape of the logits.
    """
    probabilities = torch.softmax(logits, dim=-1, out=out)
    # An installed processor may have left a non-finite logit at step 9. Softmax spreads it over the whole row, so one
    # column shows it.
    if math.isfinite(probabilities[:, 0].sum()):
        return probabilities, logits
    broken = probabilities[:, 0].isnan()
    for row in rows[broken].tolist():
        faults.setdefault(row, NonFiniteLogitsError(was_checked=True))
    logits = logits.masked_fill(broken[:, None], 0.0)
    return logits.softmax(dim=-1), logits
