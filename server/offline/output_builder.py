"""Conversion of the engine's chunks to `RequestOutput`."""

from __future__ import annotations

from logitship.client.records import TokenTrace, TraceCandidate
from logitship.client.sampling_record import SamplingRecord
from logitship.sampler.trace import RowTrace
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.requests.messages import (
    Continuation,
    FinishReason,
    GenerationChunk,
    TokenLogprobs,
    best_continuations,
)
from logitship.server.requests.sampling_records import sampling_record
from logitship.server.tokenizer import Tokenizer

from .outputs import CompletionOutput, Logprob, RequestOutput
from .request_builder import OfflineRequest


class OutputBuilder:
    """Collects the chunks of one request.

    Args:
        request: the submitted request.
        model: has the model's own EOS tokens, and the size of its vocabulary.
        tokenizer: decodes the tokens of log-probabilities and traces.
    """

    def __init__(self, request: OfflineRequest, model: ModelInfo, tokenizer: Tokenizer) -> None:
        self._request = request
        self._vocab_size = model.vocab_size
        self._tokenizer = tokenizer
        params = request.request.sampling_params
        self._shows_logprobs = params.logprobs is not None
        self._shows_traces = params.trace is not None
        self._own_eos_token_ids = model.eos_token_ids - frozenset(params.stop_token_ids)
        self._continuations = [_Tables(index) for index in range(request.request.num_sequences)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    def add(self, chunk: GenerationChunk) -> FinishReason | None:
        """Add a chunk.

        Returns:
            The finish reason of its continuation, or None if it has not ended.
        """
        continuation = self._continuations[chunk.index]
        if chunk.prompt_logprobs and not self._prompt_logprobs:  # all continuations have the same
            self._prompt_logprobs = [self._table(position) for position in chunk.prompt_logprobs]
        continuation.add(chunk)
        if self._shows_logprobs:
            continuation.tables += [self._table(position) or {} for position in chunk.logprobs]
        continuation.token_traces += [self._token_trace(trace) for trace in chunk.traces]
        return chunk.finish_reason

    @property
    def finished(self) -> bool:
        """True once all continuations have ended."""
        return all(continuation.finish_reason for continuation in self._continuations)

    def output(self) -> RequestOutput:
        """Return the output so far. Later chunks do not change it."""
        request = self._request.request
        answered = best_continuations(self._continuations, request.n) if request.ranks else self._continuations
        with_prompt = request.sampling_params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.rid,
            prompt=self._request.prompt.text,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=list(self._prompt_logprobs) if with_prompt else None,
            outputs=[
                self._completion(index, continuation)
                for index, continuation in enumerate(answered)
                if not continuation.is_absent
            ],
            finished=self.finished,
            num_cached_tokens=self._continuations[0].cached_tokens,
        )

    def _completion(self, index: int, continuation: _Tables) -> CompletionOutput:
        reason = continuation.finish_reason
        return CompletionOutput(
            index=index,
            text=continuation.text,
            token_ids=list(continuation.token_ids),
            cumulative_logprob=sum(position.logprob or 0.0 for position in continuation.logprobs)
            if self._shows_logprobs
            else continuation.cumulative_logprob,
            logprobs=list(continuation.tables) if self._shows_logprobs else None,
            finish_reason=None if reason is None else reason.kind,
            stop_reason=None if reason is None or reason.matched in self._own_eos_token_ids else reason.matched,
            receipts=continuation.receipts,
            beam_score=continuation.beam_score,
            sampling_record=self._record(continuation),
            trace=list(continuation.token_traces) if self._shows_traces else None,
        )

    def _record(self, continuation: _Tables) -> SamplingRecord | None:
        params = self._request.request.sampling_params
        if not params.return_sampling_mask:
            return None
        return sampling_record(params.temperature, self._vocab_size, continuation.token_ids, continuation.masks)

    def _token_trace(self, trace: RowTrace) -> TokenTrace:
        return TokenTrace(self._candidate(trace.token_id), tuple(map(self._candidate, trace.candidates)), trace.stages)

    def _candidate(self, token_id: int) -> TraceCandidate:
        return TraceCandidate(token_id, self._tokenizer.token_text(token_id))

    def _table(self, position: TokenLogprobs) -> dict[int, Logprob] | None:
        """Return the log-probabilities of a position in vLLM's format: the chosen token comes first."""
        if position.logprob is None:
            return None
        table = {position.token_id: self._entry(position.token_id, position.logprob, position.rank)}
        for rank, (token_id, logprob) in enumerate(position.top, start=1):
            if token_id != position.token_id:
                table[token_id] = self._entry(token_id, logprob, rank)
        return table

    def _entry(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, self._tokenizer.token_text(token_id))


class _Tables(Continuation):
    """A continuation with its log-probabilities and traces in vLLM's format, converted once per token."""

    def __init__(self, index: int) -> None:
        super().__init__(index, prompt=0)
        self.tables: list[dict[int, Logprob]] = []
        self.token_traces: list[TokenTrace] = []
