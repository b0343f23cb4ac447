"""Outputs of `LLM` and `AsyncLLM`: frozen records with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from logitship.client.records import Receipt, TokenTrace, answer_html
from logitship.client.sampling_record import SamplingRecord


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: the token as text; bytes that are not valid UTF-8 become U+FFFD.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: its index in `outputs`.
        text: the generated text.
        token_ids: the generated tokens, including the one that ended the continuation.
        cumulative_logprob: sum of the tokens' log-probabilities; None if they were not requested, except with beam
            search.
        logprobs: one dict per token, by token id: the token itself, and the requested number of most likely tokens.
            None if not requested.
        finish_reason: `stop`, `length`, or `abort` (cancelled); None while it runs.
        stop_reason: the stop string, stop pattern or stop token that ended it; None for the model's own EOS token and
            for all other reasons.
        receipts: at the end, one per processor of the request.
        beam_score: with beam search, the score that ranks the sequences; else None.
        sampling_record: how the tokens were sampled, for `logitship.replay`, with `return_sampling_mask`; else None.
        trace: one per token if requested, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    receipts: tuple[Receipt, ...] = ()
    beam_score: float | None = None
    sampling_record: SamplingRecord | None = field(default=None, repr=False)
    trace: list[TokenTrace] | None = None

    def finished(self) -> bool:
        """Return whether it has a finish reason."""
        return self.finish_reason is not None

    def _repr_html_(self) -> str:
        """Return the answer with its receipts and trace for a notebook."""
        reason = "" if self.finish_reason is None else f", ended by {self.finish_reason}"
        return answer_html(self.text, f"{len(self.token_ids)} tokens{reason}", self.receipts, self.trace)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations.

    Attributes:
        request_id: id of the request.
        prompt: the text; for a conversation, as rendered by the chat template. None if given as token ids.
        prompt_token_ids: the token ids.
        prompt_logprobs: one dict per token, as in `CompletionOutput.logprobs`; None for the first token, which has no
            predecessor. None if not requested.
        outputs: the `n` continuations, in order of their `index`; with `best_of`, the most likely first. With beam
            search, the best first, and fewer if the processors allow fewer.
        finished: whether all continuations have ended.
        num_cached_tokens: prompt tokens of the first continuation that were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of all continuations, in order."""
        return tuple(receipt for output in self.outputs for receipt in output.receipts)

    def _repr_html_(self) -> str:
        """Return the continuations for a notebook."""
        return "<hr>".join(output._repr_html_() for output in self.outputs)
