"""The state of one continuation of one prompt, from admission to its finish reason; stop strings, which may end it."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as IndexSequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from logitship.sampler.ops.sampling_masks import RowMask
from logitship.sampler.processors.processor_groups import uses_of
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import RowTrace
from logitship.server.tokenizer import IncrementalDetokenizer, Tokenizer

from .messages import FinishReason, GenerationChunk, TokenLogprobs
from .stop_regex import StopRegexSearch, compile_stop_regex

CONTEXT_TOKENS = 5
"""Prompt tokens that the text of the first output token may depend on."""

Sink = Callable[[GenerationChunk], None]
"""Takes the chunks of a request. Called on the engine thread."""


class _Unemitted(NamedTuple):
    """A sampled token without a chunk yet.

    Attributes:
        token_id: the token.
        length: tokens of the output with it.
        logprobs: its log-probabilities, if requested.
        trace: its trace, if requested.
        mask: its sampling mask, if requested.
    """

    token_id: int
    length: int
    logprobs: TokenLogprobs | None
    trace: RowTrace | None
    mask: RowMask | None


class Sequence:
    """State of one running continuation.

    Attributes:
        rid: id of its request.
        index: which of the request's continuations it is.
        names: the ids that abort it.
        tenant: the client that sent the request.
        slot: its slot in the KV cache, or None.
        num_computed: tokens whose keys and values are in the slot.
        num_copied: tokens among them that another sequence computed.
        is_prompt_kept: True once the prompt is in the prefix cache.
        prompt_logprobs: requested log-probabilities of the prompt, as far as computed.
        output_token_ids: the output. Never replaced: others hold references to the list.
        finish_reason: None while it runs.
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
        self._has_emitted = False
        self._unemitted: list[_Unemitted] = []
        self._max_tokens = max_tokens
        self._sink = sink
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids[-CONTEXT_TOKENS:],
            skip_special_tokens=sampling_params.skip_special_tokens,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        stop_regex = compile_stop_regex(tuple(sampling_params.stop_regex), tenant)
        self._stop_strings = StopStrings(
            (*sampling_params.stop, *stop_regex.literals), include=sampling_params.include_stop_str_in_output
        )
        self._stop_regex = None if stop_regex.start is None else StopRegexSearch(stop_regex, stop_regex.start)
        self._stop_regex_in_all: StopRegexSearch | None = None
        """Searches the text with the special tokens that it does not show, from the first one on."""
        self._tokenizer = tokenizer

    @property
    def num_prompt(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def request_key(self) -> tuple[str, str]:
        """Key that the sequences of one request share."""
        return self.tenant, self.rid

    @property
    def num_slots(self) -> int:
        """Slots that it needs to start."""
        return 1

    @property
    def lead(self) -> Sequence:
        """The sequence that was queued for it: itself, or the first beam of its search."""
        return self

    @property
    def num_missing(self) -> int:
        """Most tokens that it can still sample."""
        return self._max_tokens - len(self.output_token_ids)

    @property
    def samples(self) -> bool:
        """False if only the prompt is computed, for its log-probabilities."""
        return self._max_tokens > 0

    @property
    def prefilling(self) -> bool:
        """True until the whole prompt is in the cache."""
        return self.num_computed < self.num_prompt

    @property
    def needs_prompt(self) -> bool:
        """True until the whole prompt except its last token is in the cache: only that much can be copied."""
        return self.num_computed < self.num_prompt - 1

    @property
    def num_restorable(self) -> int:
        """Length of the prompt's prefix that may be copied from the prefix cache.

        The last token is computed, for the logits of the first output token, and so are tokens with requested
        log-probabilities.
        """
        params = self.sampling_params
        if params.prompt_logprobs is None:
            return self.num_prompt - 1
        return max(0, params.prompt_logprobs_start - 1)

    @property
    def computed_token_ids(self) -> list[int]:
        """Tokens whose keys and values are in the slot."""
        return [*self.prompt_token_ids, *self.output_token_ids][: self.num_computed]

    @property
    def is_sound(self) -> bool:
        """False if an error ended it: its keys and values may be invalid."""
        return self.finish_reason is None or self.finish_reason.error is None

    def take_prompt(self, source: Sequence) -> None:
        """Take over the computed prompt of another sequence of the request, after its keys and values were copied."""
        self.num_computed = self.num_copied = self.num_prompt - 1
        self.prompt_logprobs = source.prompt_logprobs.copy()

    def next_tokens(self, count: int) -> list[int]:
        """Return the next tokens to compute: at most `count` of the prompt, or the last sampled token."""
        if self.prefilling:
            return self.prompt_token_ids[self.num_computed : self.num_computed + count]
        return self.output_token_ids[-1:]

    def append(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        trace: RowTrace | None = None,
        mask: RowMask | None = None,
    ) -> None:
        """Append a sampled token, and check whether it ends the sequence.

        Its chunk is emitted now if it does, or if that depends on its text; else by the next `emit`, because sandboxes
        should not wait for the detokenizer.
        """
        may_end = self._searches_text or self.is_ended_by(token_id)
        self.output_token_ids.append(token_id)
        self._unemitted.append(_Unemitted(token_id, len(self.output_token_ids), logprobs, trace, mask))
        if may_end:
            self.emit()

    def emit(self) -> None:
        """Emit the chunks of the tokens that have none yet."""
        unemitted, self._unemitted = self._unemitted, []
        for each in unemitted:
            length = each.length
            text = self._detokenize(each.token_id, length)
            if self.finish_reason is None and length >= self._max_tokens:
                text += self._flush()
                # The last piece may complete a stop string, which then is the finish reason.
                self.finish_reason = self.finish_reason or FinishReason("length")
            self._emit(text, length, each)

    def is_ended_by(self, token_id: int) -> bool:
        """Return whether a token would end the sequence if it came next, except by its text."""
        length = len(self.output_token_ids) + 1
        return length >= self._max_tokens or (
            length >= self.sampling_params.min_tokens and self._is_stop_token(token_id)
        )

    def would_end(self, token_id: int) -> bool:
        """Return whether a token would end the sequence if it came next."""
        if self.is_ended_by(token_id):
            return True
        if not self._searches_text:
            return False
        fork = self.fork(_noop)
        fork.append(token_id, None)
        return fork.finish_reason is not None

    def fork(self, sink: Sink) -> Sequence:
        """Return a copy with the same output so far, without a slot."""
        fork = copy.copy(self)
        fork.output_token_ids = self.output_token_ids.copy()
        fork.slot = None
        fork._unemitted = self._unemitted.copy()
        fork._sink = sink
        fork._detokenizer = self._detokenizer.fork()
        fork._stop_strings = copy.copy(self._stop_strings)
        fork._stop_regex = copy.copy(self._stop_regex)
        fork._stop_regex_in_all = copy.copy(self._stop_regex_in_all)
        return fork

    def finish(self, reason: FinishReason) -> None:
        """End the sequence for a reason that no token gave."""
        self.emit()
        text = self._flush()
        self.finish_reason = reason
        self._emit(text, len(self.output_token_ids))

    @property
    def _searches_text(self) -> bool:
        """True if the text may end the sequence."""
        return bool(self.sampling_params.stop or self.sampling_params.stop_regex)

    def _detokenize(self, token_id: int, length: int) -> str:
        params = self.sampling_params
        may_stop = length >= params.min_tokens
        if may_stop and self._is_stop_token(token_id):
            text = self._flush()
            if self.finish_reason is None:
                self.finish_reason = FinishReason("stop", token_id)
                if params.include_stop_str_in_output:
                    text += self._detokenizer.push(token_id) + self._detokenizer.flush()
            return text
        piece = self._detokenizer.push(token_id)
        hidden = self._hidden_text(token_id)
        if length <= params.min_tokens and params.min_tokens > 0:
            # Stop strings and patterns are only searched for in the text after the first `min_tokens` tokens.
            if self._stop_regex is not None:
                self._stop_regex.skip(piece)
            return piece
        return self._search_stop(piece, hidden)

    def _hidden_text(self, token_id: int) -> str:
        """Return the text of a special token that the output does not show, if it is searched."""
        is_hidden = self.sampling_params.skip_special_tokens and self._searches_text
        return self._tokenizer.token_text(token_id) if is_hidden and self._tokenizer.is_special(token_id) else ""

    def _is_stop_token(self, token_id: int) -> bool:
        return self.sampling_params.is_end_token(token_id)

    def _search_stop(self, piece: str, hidden: str = "") -> str:
        """Search for stop strings and patterns in new text. Returns the text that is final now."""
        found = self._stop_strings.push(piece, hidden)
        if isinstance(found, StopMatch):
            self.finish_reason = FinishReason("stop", found.matched)
            return found.text
        pattern = self._search_patterns(piece, hidden)
        if pattern is None:
            return found
        self.finish_reason = FinishReason("stop", pattern)
        # The sequence keeps its text, as in SGLang: also what was held back.
        return found + self._stop_strings.flush() + self._detokenizer.flush()

    def _search_patterns(self, piece: str, hidden: str) -> str | None:
        """Search for patterns in the text with special tokens and without them."""
        if self._stop_regex is None:
            return None
        if hidden and self._stop_regex_in_all is None:
            self._stop_regex_in_all = copy.copy(self._stop_regex)
        found = self._stop_regex.push(piece)
        in_all = None if self._stop_regex_in_all is None else self._stop_regex_in_all.push(piece + hidden)
        return found if in_all is None else in_all

    def _flush(self) -> str:
        """Return the text that the detokenizer and the stop strings held back."""
        text = self._search_stop(self._detokenizer.flush())
        return text if self.finish_reason and self.finish_reason.kind == "stop" else text + self._stop_strings.flush()

    def _emit(self, text: str, completion_tokens: int, new: _Unemitted | None = None) -> None:
        finished = self.finish_reason is not None
        prompt_logprobs = [] if self._has_emitted else self.prompt_logprobs.copy()
        self._has_emitted = True
        self._sink(
            GenerationChunk(
                index=self.index,
                text=text,
                token_ids=[] if new is None else [new.token_id],
                logprobs=[] if new is None or new.logprobs is None else [new.logprobs],
                traces=[] if new is None or new.trace is None else [new.trace],
                masks=[] if new is None or new.mask is None else [new.mask],
                prompt_logprobs=prompt_logprobs,
                finish_reason=self.finish_reason,
                prompt_tokens=self.num_prompt,
                cached_tokens=self.num_copied,
                completion_tokens=completion_tokens,
                receipts=tuple(use.receipt for use in uses_of(self.sampling_params)) if finished else (),
            )
        )


@dataclass(frozen=True)
class StopMatch:
    """A stop string that was found.

    Attributes:
        matched: the stop string.
        text: the rest of the sequence's text.
    """

    matched: str
    text: str


class StopStrings:
    """Finds stop strings in text that arrives in pieces.

    Text that could be the start of a stop string is held back until that is decided. The match is the stop string that
    ends first, and the longest of those, so that it does not depend on where the pieces end.

    Special tokens that the text does not show count, too, as in SGLang: a stop string may match the text with them and
    the text without them.

    The time of a piece grows with its length and that of the held text, not with the number of stop strings.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool) -> None:
        self._stop = _without_redundant(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include = include
        self._held = ""
        self._shown: tuple[bool, ...] = ()
        """For each character that is held back, whether the text shows it."""
        self._whole_from = 0
        """Index from which on it has all hidden characters, which may begin a stop string there."""

    def push(self, piece: str, hidden: str = "") -> str | StopMatch:
        """Add text.

        Args:
            piece: text of the output.
            hidden: text of a special token after it, which the output does not show.

        Returns:
            The text that is final now, or the match that ends the sequence.
        """
        if not self._stop:
            return piece
        text = self._held + piece + hidden
        shown = (*self._shown, *(True for _ in piece), *(False for _ in hidden))
        found, whole_from = self._search(text, range(self._whole_from, len(text)))
        held_from = whole_from
        if self._whole_from or not all(shown):
            without, without_from = self._search(text, [index for index, each in enumerate(shown) if each])
            found = min((each for each in (found, without) if each is not None), default=None)
            held_from = min(held_from, without_from)
        if found is not None:
            _, begin, matched = found
            self._held, self._shown, self._whole_from = "", (), 0
            before = "".join(itertools.compress(text[:begin], shown))
            return StopMatch(matched, before + matched if self._include else before)
        final = "".join(itertools.compress(text[:held_from], shown))
        kept = [index for index in range(held_from, len(text)) if shown[index] or index >= whole_from]
        self._held = "".join(text[index] for index in kept)
        self._shown = tuple(shown[index] for index in kept)
        self._whole_from = sum(index < whole_from for index in kept)
        return final

    def flush(self) -> str:
        """Return the text that was held back: it became no stop string."""
        held = "".join(itertools.compress(self._held, self._shown))
        self._held, self._shown, self._whole_from = "", (), 0
        return held

    def _search(self, text: str, places: IndexSequence[int]) -> tuple[tuple[int, int, str] | None, int]:
        """Search in some characters of a text.

        Args:
            text: the text.
            places: the characters' indices, ascending.

        Returns:
            The match's end, begin and text, if there is one; and the index from which on the text is held back.
        """
        searched = "".join(text[place] for place in places)
        found: tuple[int, int] | None = None
        held_from = len(searched)
        for begin in range(len(searched)):
            if found is not None and begin >= found[0]:
                break
            rest = searched[begin : begin + self._longest]
            above = bisect_right(self._stop, rest)
            if above and rest.startswith(self._stop[above - 1]):
                match = (begin + len(self._stop[above - 1]), begin)
                found = match if found is None else min(found, match)
            elif begin < held_from and above < len(self._stop) and self._is_beginning(rest, begin, searched, above):
                held_from = begin
        held_place = places[held_from] if held_from < len(searched) else len(text)
        if found is None:
            return None, held_place
        end, begin = found
        return (places[end - 1] + 1, places[begin], searched[begin:end]), held_place

    def _is_beginning(self, rest: str, begin: int, text: str, above: int) -> bool:
        """Return whether the text from `begin` on is the beginning of a stop string."""
        return begin + len(rest) == len(text) and self._stop[above].startswith(rest)


def _noop(chunk: GenerationChunk) -> None:
    pass


@lru_cache(maxsize=32)  # the sequences of a request have the same
def _without_redundant(stop: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stop strings, sorted, without those that begin with another: the other one ends first.

    Of the remaining ones, a text can only begin with the last that is not above it in the order, and only the first
    above it can begin with the text.
    """
    kept: list[str] = []
    for each in sorted(stop):
        if not (kept and each.startswith(kept[-1])):
            kept.append(each)
    return tuple(kept)
