"""Log-probabilities in OpenAI's two formats, and in vLLM's format for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from logitship.server.http.json_responses import finite
from logitship.server.requests.messages import TokenLogprobs
from logitship.server.schemas.openai_response_schemas import (
    ChatLogprobs,
    ChatLogprobsContent,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
)
from logitship.server.tokenizer import Tokenizer


def completion_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], top: int, text_offset: int
) -> CompletionLogprobs:
    """Build the `logprobs` of a completions choice.

    Args:
        tokenizer: gives the tokens' texts.
        positions: one per token.
        top: number of most likely tokens per position.
        text_offset: offset of the first token in the choice's text, in characters.
    """
    tokens = [tokenizer.token_text(position.token_id) for position in positions]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(position.logprob) for position in positions],
        "top_logprobs": [_most_likely(tokenizer, position, top) for position in positions],
        "text_offset": offsets,
    }


def _most_likely(tokenizer: Tokenizer, position: TokenLogprobs, top: int) -> dict[str, float] | None:
    """Return the most likely tokens and the actual one. Of two with the same text, the more likely counts."""
    if position.logprob is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in (*position.top[:top], (position.token_id, position.logprob)):
        found.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return found


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
