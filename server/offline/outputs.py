"""What `LLM` and `AsyncLLM` give back: frozen records with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from logitship.client.records import Receipt, TokenTrace


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: the token as text; bytes that are no UTF-8 on their own become U+FFFD.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: its place in `outputs`.
        text: what was generated.
        token_ids: the same as token ids, with the token that ended it.
        cumulative_logprob: sum of the tokens' log-probabilities; None if none were asked for, except with beam search.
        logprobs: one dict a token, by token id: the token itself, and as many of the most likely ones as were asked
            for. None if none were.
        finish_reason: `stop`, `length`, or `abort` (cancelled); None while it runs.
        stop_reason: the stop string or the stop token that ended it; None for the model's own end token and for all
            other reasons.
        receipts: at the end, one for each processor that the request carried.
        beam_score: with beam search, what the sequences were compared by; None without.
        trace: one a token, if asked for; None if not.
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
    trace: list[TokenTrace] | None = None

    def finished(self) -> bool:
        """True once it has its finish reason."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations.

    Attributes:
        request_id: id of the request.
        prompt: its text; of a conversation, with the chat template around it. None if it came as token ids.
        prompt_token_ids: its token ids.
        prompt_logprobs: one dict a token, as in `CompletionOutput.logprobs`; None for the first token, which nothing
            comes before. None if none were asked for.
        outputs: the `n` continuations, in order of their `index`; with `best_of` the most likely first.
            With beam search the best first, and fewer where processors allow no more.
        finished: all of them have ended.
        num_cached_tokens: prompt tokens whose keys and values were found in a cache, for the first continuation.
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
