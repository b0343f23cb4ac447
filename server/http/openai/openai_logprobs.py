"""Log-probabilities in OpenAI's two formats, and in vLLM's format for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from logitship.server.http.json_responses import finite
from logitship.server.requests.messages import TokenLogprobs
from logitship.server.requests.sequence import CONTEXT_TOKENS
from logitship.server.schemas.openai_response_schemas import (
    ChatLogprobs,
    ChatLogprobsContent,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
)
from logitship.server.tokenizer import IncrementalDetokenizer, Tokenizer


class TextOffsets:
    """Finds where the tokens of a completion begin in its text, as they arrive.

    A token that continues a character begins where the character does. One that the text does not show begins where the
    next one does.

    Args:
        tokenizer: the model's.
        prompt: the tokens of the prompt.
        prompt_text: text of the prompt, if the completion begins with it.
        skip_special_tokens: as in the request.
        spaces_between_special_tokens: as in the request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        prompt_text: str | None,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._length = 0 if prompt_text is None else len(prompt_text)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            list(prompt[-CONTEXT_TOKENS:]),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def of_prompt(self) -> list[int]:
        """Return the offsets of the prompt's tokens."""
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=True
        )
        ends = [0, *itertools.accumulate(len(detokenizer.push(token_id)) for token_id in self._prompt)]
        # The tokens may have more text than the prompt: special tokens that were added at its beginning.
        added = ends[-1] + len(detokenizer.flush()) - self._length
        return [max(0, end - added) for end in ends[:-1]]

    def push(self, token_id: int) -> int:
        """Return the offset of the next token of the output."""
        offset = self._length
        self._length += len(self._detokenizer.push(token_id))
        return offset


def completion_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], top: int, offsets: list[int]
) -> CompletionLogprobs:
    """Build the `logprobs` of a completions choice.

    Args:
        tokenizer: gives the tokens' texts.
        positions: one per token.
        top: number of most likely tokens per position.
        offsets: offsets of the tokens in the choice's text, in characters.
    """
    return {
        "tokens": [tokenizer.token_text(position.token_id) for position in positions],
        "token_logprobs": [finite(position.logprob) for position in positions],
        "top_logprobs": [_most_likely(tokenizer, position, top) for position in positions],
        "text_offset": offsets,
    }


def _most_likely(tokenizer: Tokenizer, position: TokenLogprobs, top: int) -> dict[str, float] | None:
    """Return the most likely tokens and the actual one, which has its text as its key. Others may have their id."""
    if position.logprob is None:
        return None
    keys = {position.token_id: tokenizer.token_text(position.token_id)}
    for token_id, _ in position.top[:top]:
        if token_id not in keys:
            key = tokenizer.token_text(token_id)
            keys[token_id] = f"token_id:{token_id}" if key in keys.values() else key
    own = (position.token_id, position.logprob)
    return {keys[token_id]: finite(logprob) for token_id, logprob in (*position.top[:top], own)}


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Build the `logprobs` of a chat choice."""
    return {"content": [_chat_position(tokenizer, position) for position in positions], "refusal": None}


def _chat_position(tokenizer: Tokenizer, position: TokenLogprobs) -> ChatLogprobsContent:
    assert position.logprob is not None  # only the first token of a prompt has none
    return {
        **_chat_token(tokenizer, position.token_id, position.logprob),
        "top_logprobs": [_chat_token(tokenizer, *top) for top in position.top],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> ChatTokenLogprob:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], top: int
) -> list[dict[str, PromptLogprob] | None]:
    """Build vLLM's `prompt_logprobs`: per position an object with token ids as keys; null for the first."""
    return [None if position.logprob is None else _by_token_id(tokenizer, position, top) for position in positions]


def _by_token_id(tokenizer: Tokenizer, position: TokenLogprobs, top: int) -> dict[str, PromptLogprob]:
    assert position.logprob is not None
    assert position.rank is not None
    own = (position.token_id, position.logprob, position.rank)
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top[:top], start=1)]
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, logprob, rank in (own, *ranked)
    }
