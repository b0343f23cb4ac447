"""Contract 4: from the model's logits to the next tokens, one step of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from logitship.client.errors import LogitshipError, ProcessorFault
from logitship.sampler.batch.sampling_batch import LogprobRows, Penalties, PreparedRows, RandomRows, SamplingBatch
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors, apply_to, take_faults
from logitship.sampler.ops.logprobs import RowLogprobs, look_up
from logitship.sampler.ops.masks import mask_forbidden, mask_tokens
from logitship.sampler.ops.penalties import apply_penalties
from logitship.sampler.ops.rows import Scratch, one_thread_for_few, row_parts, take_rows
from logitship.sampler.ops.sample_tokens import apply_temperature, greedy_sample, random_sample, top_k_top_p_sample

from .trace import RowTrace, StepTrace

_PART_SIZE = 2**20
"""How many probabilities are worked on at a time."""


class NoTokenLeftError(LogitshipError):
    """Every token of the row is forbidden.

    Args:
        forbidding: names of what forbids tokens in the request: its fields and processors.
    """

    def __init__(self, forbidding: Sequence[str] = ()) -> None:
        who = ", ".join(forbidding) or "the model or an installed batch processor"
        super().__init__(
            f"no token is left to draw: every logit is -inf. Together, {who} forbid the whole vocabulary: forbid less"
        )


class NonFiniteLogitsError(LogitshipError):
    """The row has a logit that is NaN or +inf.

    Args:
        processors: names of those that the request carries.
    """

    def __init__(self, processors: Sequence[str] = ()) -> None:
        who = ", ".join(["logit_bias", "a penalty", *processors])
        super().__init__(
            f"the logits hold NaN or +inf: either the model's own do, or one of {who} took one out of float32's range"
        )


class ShippedStage(Protocol):
    """What step 5 needs: the batch processor `ShippedProcessors`, or what takes its place."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch. Once a step."""
        ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run the shipped processors on float32 [rows, vocab]. Rows of a processor that failed are left finite."""
        ...

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """The same on some rows of the batch: those with a 1. See `apply_to`."""
        ...

    def watch(self, trace: StepTrace) -> None:
        """Show the trace what processors make of its rows, in the calls from now on."""
        ...

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """(row of the batch, fault) of the processors that failed in the last call."""
        ...

    def fault_of(self, row: int, logits: torch.Tensor) -> ProcessorFault | None:
        """Whose fault it is that a row is not finite, if nobody looked at it after the last processor's call.

        Args:
            row: of the batch.
            logits: float32 [vocab].
        """
        ...


@dataclass(frozen=True)
class SamplerOutput:
    """One step's result, one entry a row of the logits.

    Attributes:
        token_ids: the next tokens. That of a row in `faults` has no meaning.
        logprobs: for rows that asked, None for the others and for those in `faults`.
        faults: (row, why it has no next token), in row order.
        traces: for rows that asked, None for the others and for those in `faults`.
    """

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]
    faults: list[tuple[int, LogitshipError]]
    traces: list[RowTrace | None]


class Sampler:
    """Turns logits into next tokens, in this order (`sample` keeps the numbers):

    1. Forbid all but `allowed_token_ids`, and what would complete a bad word.
    2. Batch processors that can change the most likely token: min-tokens, logit bias, installed ones. The rows on which
       an installed one fails end their requests, here and in step 9.
    3. Repetition, frequency and presence penalties.
    4. Batch processors that force tokens: the thinking budget.
    5. Shipped and built-in processors, group by group: first the masks among a request's (grammars, trees), then the
       others in the order of its list, then the masks again.
    6. Forbid all but `allowed_token_ids` again: forcing a token obeys masks. Then each row must have a finite logit and
       neither NaN nor +inf; one that fails ends its own request, and zeros take its place in the steps below.
    7. Greedy rows take the most likely token.
    8. Temperature.
    9. Batch processors that never change the most likely token: min-p, installed ones. Only if some row is random.
    10. Top-k, then top-p, then the draw.
    11. Log-probabilities: raw (the logits before step 1) or processed (after step 6 for greedy rows, after step 9 for
        random ones), as each request asks.

    A row's token depends on its own logits, parameters, history and seed, and not on the rows beside it.

    Args:
        vocab_size: width of the logits.
        device: where the logits are.
        logits_processors: the installed batch processors.
        shipped: the processors that came with requests; None if there can't be any.
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
        """Follow the batch. Once a step, before `sample`; None if no row came, went or moved.

        Raises:
            ValueError: a request that draws at random came without a seed.
        """
        self._batch.update_state(batch_update)
        self._processors.update_state(batch_update)
        if self._shipped is not None:
            self._shipped.update_state(batch_update)

    def sample(self, logits: torch.Tensor, rows: Sequence[int] | None = None) -> SamplerOutput:
        """Choose the next token of every row, or of some.

        Args:
            logits: float32 [rows, vocab]; edited in place.
            rows: rows of the batch, ascending, that the logits are of; None: all. The others draw nothing, and nothing
                of theirs is called. The batch processors must then be `SpeculativeLogitsProcessor`s.

        Raises:
            ValueError: the logits' shape is not that of the rows.
        """
        batch = self._batch.prepared if rows is None else self._batch.prepare(rows)
        if logits.shape != (len(batch), self._vocab_size):
            raise ValueError(f"logits: expected shape ({len(batch)}, {self._vocab_size}), got {tuple(logits.shape)}")
        # What processors are told of some rows, and the places of what they tell of them.
        place = range(len(batch)) if rows is None else {row: place for place, row in enumerate(rows)}
        chosen = None if rows is None else [int(row in place) for row in range(self._batch.size)]
        with one_thread_for_few(logits):
            raw = self._all_logprobs(logits, batch.raw)
        trace = StepTrace(batch.traced)
        trace.record("model", logits)

        faults: dict[int, LogitshipError] = {}

        # 1
        mask_forbidden(logits, batch.forbidden)
        if batch.any_bad_words:
            mask_tokens(logits, *batch.bad_word_endings())
        # 2
        for processor in self._processors.non_argmax_invariant:
            logits = apply_to(processor, logits, chosen)
        # 3
        _penalise(logits, batch.penalties())
        # 4
        for processor in self._processors.forcing:
            logits = apply_to(processor, logits, chosen)
        trace.record("request", logits)
        # 5
        if self._shipped is not None:
            self._shipped.watch(trace)
            logits = apply_to(self._shipped, logits, chosen)
            faults.update((place[row], fault) for row, fault in self._shipped.take_faults())
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
                for drawing in (batch.unfiltered, batch.filtered):
                    if drawing.outputs:
                        tokens.index_copy_(0, drawing.rows, self._draw(logits, drawing, faults))
            trace.record_sampled(logits, batch.params, tokens)
            # Also of those that did not run in this step: one may have failed when it was told what changed.
            for row, fault in take_faults(self._processors.all):
                if row in place:
                    faults.setdefault(place[row], fault)
            token_ids = tokens.tolist()
            # 11
            logprobs: list[RowLogprobs | None] = [None] * len(token_ids)
            _look_up(logprobs, raw, token_ids, batch.raw)
            _look_up(logprobs, processed_greedy, token_ids, batch.processed_greedy)
            processed_random = self._all_logprobs(
                logits, batch.processed_random, len(batch.raw) + len(batch.processed_greedy)
            )
            _look_up(logprobs, processed_random, token_ids, batch.processed_random)
            for row in faults:
                logprobs[row] = None
            in_row_order = sorted(faults.items(), key=lambda fault: fault[0])
            return SamplerOutput(token_ids, logprobs, in_row_order, trace.finish(token_ids, faults))

    def _all_logprobs(self, logits: torch.Tensor, asking: LogprobRows, start: int = 0) -> torch.Tensor | None:
        """The log-probabilities of all tokens as they are now, in the rows that ask for them; None without such rows.

        Args:
            start: how many rows' log-probabilities of this step are still needed.
        """
        if len(asking) == 0:
            return None
        out = self._logprobs.rows(start, len(asking), logits)
        return torch.log_softmax(take_rows(logits, asking.rows), dim=-1, out=out)

    def _draw(self, logits: torch.Tensor, drawing: RandomRows, faults: dict[int, LogitshipError]) -> torch.Tensor:
        """Draw a token for each of some rows, int64 [n], from float32 [rows, vocab]."""
        uniform = drawing.uniform()
        tokens = torch.zeros_like(drawing.rows)
        for part in row_parts(len(uniform), logits, _PART_SIZE):
            rows = drawing.rows[part]
            # A view where these are all rows.
            kept = logits[part] if len(drawing.rows) == len(logits) else logits[rows]
            probabilities, kept = _probabilities(kept, rows, faults, out=self._probabilities.rows(0, len(kept), kept))
            if drawing.filters:
                top_k, top_p = drawing.top_k[part], drawing.top_p[part]
                tokens[part] = top_k_top_p_sample(kept, probabilities, top_k, top_p, uniform[part])
            else:
                tokens[part] = random_sample(probabilities, uniform[part])
        return tokens

    def _shipped_fault(self, rows: Sequence[int] | None, place: int, logits: torch.Tensor) -> ProcessorFault | None:
        if self._shipped is None:
            return None
        return self._shipped.fault_of(place if rows is None else rows[place], logits)


def _penalise(logits: torch.Tensor, penalties: Penalties | None) -> None:
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
    """Write the records of the rows that ask to their places in `found`."""
    if logprobs is not None:
        records = look_up(logprobs, [token_ids[row] for row in asking.numbers], asking.top)
        for row, record in zip(asking.numbers, records, strict=True):
            found[row] = record


def _largest(logits: torch.Tensor, batch: PreparedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit, [rows, 1], and the most likely tokens of the greedy rows, int64 [rows]."""
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
    """Replace unusable rows by zeros, also in `peak`, and add them to `faults`.

    Args:
        peak: float32 [rows, 1]: each row's largest logit. It is NaN or +inf if there is one, and -inf if there is
            nothing else.
        shipped_fault: takes a row's place and its logits: whether a shipped processor left them so.
    """
    # One number tells that all are finite, mostly: a sum that overflows by itself only costs the closer look.
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
    """Probabilities of some rows, and the logits that they are of.

    Args:
        rows: int64 [n]: where in `faults` they belong.
        out: float32, as the logits: where the probabilities may be written.
    """
    probabilities = torch.softmax(logits, dim=-1, out=out)
    # Softmax spreads what an installed processor may have broken at step 9 over the whole row: one column shows it.
    if math.isfinite(probabilities[:, 0].sum()):
        return probabilities, logits
    broken = probabilities[:, 0].isnan()
    for row in rows[broken].tolist():
        faults.setdefault(row, NonFiniteLogitsError())
    logits = logits.masked_fill(broken[:, None], 0.0)
    return logits.softmax(dim=-1), logits
