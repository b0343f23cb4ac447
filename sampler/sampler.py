"""The sampler (contract 4): from the model's logits to the next tokens of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch

from logitship.client.errors import LogitshipError
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import BatchRows, LogitsProcessors, apply_to, take_faults
from logitship.sampler.ops.greedy import GreedySampling
from logitship.sampler.ops.logprobs import Logprobs, RowLogprobs
from logitship.sampler.ops.masks import AllowedTokensMask, BadWordsMask
from logitship.sampler.ops.penalties import Penalties
from logitship.sampler.ops.random_sampling import RandomSampling
from logitship.sampler.ops.rows import one_thread_for_few
from logitship.sampler.ops.sampler_op import SamplerOp
from logitship.sampler.ops.sampling_masks import RowMask, SamplingMasks
from logitship.sampler.ops.temperature import Temperature
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors

from .drafter import Drafter
from .row_errors import NonFiniteLogitsError, NoTokenLeftError
from .sampling_params import SamplingParams
from .trace import RowTrace, Traces

Op = TypeVar("Op", bound=SamplerOp[Any, Any])


@dataclass(frozen=True)
class SamplerOutput:
    """Result of a step, one entry per row of the logits.

    Attributes:
        token_ids: next tokens. The token of a row in `faults` or `deferred` is meaningless.
        logprobs: log-probabilities of the rows that asked for them; None for other rows, and those without a token.
        faults: (row, fault) of the rows whose request ends, in row order.
        traces: traces of the rows that asked for them; None for other rows, and those without a token.
        masks: sampling masks of the rows that asked for them; None for other rows, and those without a token.
        deferred: rows that get their next token in a later step, see `DeferredCalls`.
    """

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]
    faults: list[tuple[int, LogitshipError]]
    traces: list[RowTrace | None]
    masks: list[RowMask | None]
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
    11. Sampling masks. Log-probabilities as each request asks: raw (the logits before step 1) or processed (after step
        6 for greedy rows, after top-k and top-p of step 10 for random ones).

    Batch-invariant: a row's token depends only on its own logits, parameters, history and seed.

    Args:
        vocab_size: number of columns of the logits.
        device: device of the logits.
        logits_processors: the installed batch processors.
        shipped: the batch processor that runs the requests' processors; None if requests cannot have any.

    Attributes:
        drafter: knows tokens before their logits exist.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        logits_processors: LogitsProcessors,
        shipped: ShippedProcessors | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._params: BatchRows[SamplingParams] = BatchRows(lambda params, prompt, output: params)
        self._ops: list[SamplerOp[Any, Any]] = []
        self._traces = self._with_state(Traces(device))
        self._logprobs = self._with_state(Logprobs(device))
        self._allowed_tokens = self._with_state(AllowedTokensMask(vocab_size, device))
        self._bad_words = self._with_state(BadWordsMask(device))
        self._penalties = self._with_state(Penalties(device))
        self._greedy = self._with_state(GreedySampling(device))
        self._temperature = self._with_state(Temperature(device))
        self._random = self._with_state(RandomSampling(vocab_size, device))
        self._masks = self._with_state(SamplingMasks(vocab_size, device))
        self._processors = logits_processors
        self._shipped = shipped or _no_processors(vocab_size, device)
        self.drafter = Drafter(vocab_size, self._params, self._ops, logits_processors.all, self._shipped)

    def _with_state(self, op: Op) -> Op:
        """Let an operation follow the batch."""
        self._ops.append(op)
        return op

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Once a step, before `sample`; None if no row changed.

        Raises:
            ValueError: a request with random sampling has no seed.
        """
        self._params.update(batch_update)
        for op in self._ops:
            op.update_state(batch_update)
        self._processors.update_state(batch_update)
        self._shipped.update_state(batch_update)

    def begin(self) -> None:
        """Begin what the next `sample` can do before its logits exist. Optional, after `update_state`."""
        self._shipped.begin()

    def skip(self, rows: Iterable[int]) -> None:
        """Count the processors' calls for tokens of some rows that are taken without `sample`.

        Before the tokens are appended to the live output lists.
        """
        self._shipped.skip(rows)

    def abandon(self) -> None:
        """End what `begin` and drafts began and no `sample` took: the step failed, or their sequences have ended."""
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
        in_batch = range(len(self._params)) if rows is None else rows  # batch processors number rows by the batch
        num_draft_tokens = None if rows is None else self._num_draft_tokens(rows)
        if logits.shape != (len(in_batch), self._vocab_size):
            expected = f"({len(in_batch)}, {self._vocab_size})"
            raise ValueError(f"logits: expected shape {expected}, got {tuple(logits.shape)}")
        trace, logprobs, masks = self._traces.begin(rows), self._logprobs.begin(rows), self._masks.begin(rows)
        trace.record("model", logits)
        logprobs.record("raw", logits)
        # 1
        self._allowed_tokens.apply(logits, rows)
        self._bad_words.apply(logits, rows)
        # 2
        for processor in self._processors.non_argmax_invariant:
            logits = apply_to(processor, logits, num_draft_tokens)
        # 3
        self._penalties.apply(logits, rows)
        # 4
        for processor in (*self._processors.penalized, *self._processors.forcing):
            logits = apply_to(processor, logits, num_draft_tokens)
        trace.record("request", logits)
        # 5
        self._shipped.watch(trace)
        logits = apply_to(self._shipped, logits, num_draft_tokens)
        faults: dict[int, LogitshipError] = {in_batch.index(row): each for row, each in self._shipped.take_faults()}
        deferred = {in_batch.index(row) for row in self._shipped.take_deferred()}
        with one_thread_for_few(logits):
            # 6
            self._allowed_tokens.apply(logits, rows)
            peak, tokens = self._greedy.sample(logits, rows)
            self._check_rows(logits, peak, in_batch, faults)
            # 7: `tokens` has them
            logprobs.record("greedy", logits)
            random = self._random.prepared(rows)
            if random is not None:
                # 8
                self._temperature.apply(logits, peak, rows)
                # 9
                for processor in self._processors.argmax_invariant:
                    logits = apply_to(processor, logits, num_draft_tokens)
                # 10
                self._random.sample(logits, random, tokens, faults, masks)
            trace.record_sampled(logits, tokens)
            # Includes processors that did not run in this step: `update_state` may have failed.
            for row, fault in take_faults(self._processors.all):
                if row in in_batch:
                    faults.setdefault(in_batch.index(row), fault)
            # 11
            token_ids = tokens.tolist()
            row_masks = masks.finish(logits, token_ids, faults, deferred)
            trace.add_edits(row_masks, masks, faults)
            logprobs.record("random", logits)
            without = faults.keys() | deferred
            return SamplerOutput(
                token_ids,
                logprobs.finish(token_ids, without),
                sorted(faults.items(), key=itemgetter(0)),
                trace.finish(token_ids, without),
                row_masks,
                frozenset(deferred - faults.keys()),
            )

    def _num_draft_tokens(self, rows: Sequence[int]) -> list[int]:
        """Return the rows as `SpeculativeLogitsProcessor` takes them."""
        counts = [0] * len(self._params)
        for row in rows:
            counts[row] = 1
        return counts

    def _check_rows(
        self, logits: torch.Tensor, peak: torch.Tensor, in_batch: Sequence[int], faults: dict[int, LogitshipError]
    ) -> None:
        """Set unusable rows to zero, also in `peak`, and add them to `faults`.

        Args:
            logits: float32 [rows, vocab].
            peak: float32 [rows, 1]: each row's largest logit. NaN or +inf if the row has one, -inf if it has nothing
                else.
            in_batch: row of the batch of each row.
            faults: faults by row; edited in place.
        """
        # A finite sum shows at once that all rows are finite. A sum of finite values that overflows only costs the
        # check below.
        if math.isfinite(peak.sum()):
            return
        unusable = (~torch.isfinite(peak)).nonzero()[:, 0]
        for row in unusable.tolist():
            params = self._params[in_batch[row]]
            if fault := self._shipped.fault_of(in_batch[row], logits[row]):
                faults.setdefault(row, fault)
            elif peak[row].isneginf():
                faults.setdefault(row, NoTokenLeftError(params.forbidding))
            else:
                faults.setdefault(row, NonFiniteLogitsError([attached.name for attached in params.processors]))
        logits[unusable] = 0.0
        peak[unusable] = 0.0


def _no_processors(vocab_size: int, device: torch.device) -> ShippedProcessors:
    model = ModelView(vocab_size, frozenset(), tokenizer=None)
    return ShippedProcessors(None, device, False, model=model, uses=lambda params: ())
