"""One continuation of one prompt, from admission to its finish reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from logitship.sampler.processors.processor_use import uses_of
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import RowTrace
from logitship.server.tokenizer import Tokenizer

from .detokenizer import IncrementalDetokenizer, StopMatch, StopStrings
from .messages import FinishReason, GenerationChunk, TokenLogprobs

if TYPE_CHECKING:
    from logitship.server.engine.beam_group import BeamGroup

_CONTEXT_TOKENS = 5
"""How much of the prompt the text of the first output token may depend on."""

Sink = Callable[[GenerationChunk], None]
"""Takes the chunks of a request; called on the engine's thread."""


class Sequence:
    """State of one running continuation.

    Attributes:
        rid: the request that it belongs to; `index` is which of its `n` continuations it is.
        names: the ids by which a client may cancel it.
        tenant: whose request it is.
        slot: its slot of the cache, while it has one.
        num_computed: its tokens whose keys and values are in the cache.
        num_copied: those of them that another sequence computed.
        is_prompt_kept: the prompt's are in the prefix cache.
        prompt_logprobs: what was asked for of the prompt, as far as it is computed.
        output_token_ids: grows by one a step. Others hold references to it: it is never replaced.
        finish_reason: None while it runs.
        beams: of a beam search, the group that it belongs to; None of all others.
    """

    def __init__(
        self,
        rid: str,
        index: int,
        names: frozenset[str],
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        tokenizer: Tokenizer,
        sink: Sink,
        tenant: str = "",
    ) -> None:
        self.rid = rid
        self.index = index
        self.names = names
        self.tenant = tenant
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.output_token_ids: list[int] = []
        self.slot: int | None = None
        self.num_computed = 0
        self.num_copied = 0
        self.is_prompt_kept = False
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.beams: BeamGroup | None = None
        self._has_emitted = False
        self._max_tokens = max_tokens
        self._sink = sink
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids[-_CONTEXT_TOKENS:],
            skip_special_tokens=sampling_params.skip_special_tokens,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        self._stop_strings = StopStrings(
            tuple(sampling_params.stop), include=sampling_params.include_stop_str_in_output
        )

    @property
    def num_prompt(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def request_key(self) -> tuple[str, str]:
        """The same for the sequences of one request, which have one prompt."""
        return self.tenant, self.rid

    @property
    def num_slots(self) -> int:
        """Slots that it must get before it can begin."""
        return 1 if self.beams is None else self.beams.width

    @property
    def num_missing(self) -> int:
        """Most tokens that it may still draw."""
        return self._max_tokens - len(self.output_token_ids)

    @property
    def draws(self) -> bool:
        """False if only the prompt is to be computed, for its log-probabilities."""
        return self._max_tokens > 0

    @property
    def prefilling(self) -> bool:
        """True until the whole prompt is in the cache."""
        return self.num_computed < self.num_prompt

    @property
    def needs_prompt(self) -> bool:
        """True until all of the prompt that can be copied is in the cache: all but its last token."""
        return self.num_computed < self.num_prompt - 1

    @property
    def num_restorable(self) -> int:
        """How many of its first tokens may be copied from a sequence that began with the same ones.

        Not the last one, behind which the first token is drawn, and none whose log-probabilities were asked for.
        """
        params = self.sampling_params
        if params.prompt_logprobs is None:
            return self.num_prompt - 1
        return max(0, params.prompt_logprobs_start - 1)

    @property
    def computed_token_ids(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        return [*self.prompt_token_ids, *self.output_token_ids][: self.num_computed]

    @property
    def is_sound(self) -> bool:
        """False if an error ended it, after which its keys and values may be anything."""
        return self.finish_reason is None or self.finish_reason.error is None

    def take_prompt(self, source: Sequence) -> None:
        """Go on from the prompt of another sequence of the request, whose keys and values were copied."""
        self.num_computed = self.num_copied = self.num_prompt - 1
        self.prompt_logprobs = source.prompt_logprobs.copy()

    def next_tokens(self, count: int) -> list[int]:
        """The next tokens to compute, at most `count`: of the prompt, then the last one drawn."""
        if self.prefilling:
            return self.prompt_token_ids[self.num_computed : self.num_computed + count]
        return self.output_token_ids[-1:]

    def append(self, token_id: int, logprobs: TokenLogprobs | None, trace: RowTrace | None = None) -> None:
        """Take the token that was drawn, see whether it ends the sequence, and give out what is certain."""
        self.output_token_ids.append(token_id)
        text = self._text_of(token_id)
        if self.finish_reason is None and len(self.output_token_ids) >= self._max_tokens:
            text += self._flush()
            # The last piece may complete a stop string, which then is the better reason.
            self.finish_reason = self.finish_reason or FinishReason("length")
        self._emit(text, [token_id], [logprobs] if logprobs else [], [trace] if trace else [])

    def would_end(self, token_id: int) -> bool:
        """Whether a token would end the sequence, if it were the next one."""
        length = len(self.output_token_ids) + 1
        if length >= self._max_tokens or (length >= self.sampling_params.min_tokens and self._is_stop_token(token_id)):
            return True
        if not self.sampling_params.stop:
            return False
        twin = self.fork(lambda chunk: None)
        twin.append(token_id, None)
        return twin.finish_reason is not None

    def fork(self, sink: Sink) -> Sequence:
        """Another sequence with the same output so far, without a slot."""
        twin = copy.copy(self)
        twin.output_token_ids = self.output_token_ids.copy()
        twin.slot = None
        twin._sink = sink
        twin._detokenizer = self._detokenizer.fork()
        twin._stop_strings = copy.copy(self._stop_strings)
        return twin

    def finish(self, reason: FinishReason) -> None:
        """End the sequence from outside."""
        text = self._flush()
        self.finish_reason = reason
        self._emit(text, [], [], [])

    def _text_of(self, token_id: int) -> str:
        params = self.sampling_params
        may_stop = len(self.output_token_ids) >= params.min_tokens
        if may_stop and self._is_stop_token(token_id):
            text = self._flush()
            if self.finish_reason is None:
                self.finish_reason = FinishReason("stop", token_id)
                if params.include_stop_str_in_output:
                    text += self._detokenizer.push(token_id) + self._detokenizer.flush()
            return text
        piece = self._detokenizer.push(token_id)
        if len(self.output_token_ids) <= params.min_tokens and params.min_tokens > 0:
            # A stop string counts only in what comes after the minimum.
            return piece
        return self._past_stop_strings(piece)

    def _is_stop_token(self, token_id: int) -> bool:
        return self.sampling_params.is_end_token(token_id)

    def _past_stop_strings(self, piece: str) -> str:
        found = self._stop_strings.push(piece)
        if isinstance(found, StopMatch):
            self.finish_reason = FinishReason("stop", found.matched)
            return found.text
        return found

    def _flush(self) -> str:
        """What the detokenizer and the search for stop strings still hold back."""
        text = self._past_stop_strings(self._detokenizer.flush())
        return text if self.finish_reason and self.finish_reason.kind == "stop" else text + self._stop_strings.flush()

    def _emit(self, text: str, token_ids: list[int], logprobs: list[TokenLogprobs], traces: list[RowTrace]) -> None:
        finished = self.finish_reason is not None
        prompt_logprobs = [] if self._has_emitted else self.prompt_logprobs.copy()
        self._has_emitted = True
        self._sink(
            GenerationChunk(
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                traces=traces,
                prompt_logprobs=prompt_logprobs,
                finish_reason=self.finish_reason,
                prompt_tokens=self.num_prompt,
                cached_tokens=self.num_copied,
                completion_tokens=len(self.output_token_ids),
                receipts=tuple(use.receipt for use in uses_of(self.sampling_params)) if finished else (),
            )
        )
