"""Log-probabilities as the servers spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logitship.client.records import TokenLogprob


def sglang_logprobs(meta: Mapping[str, Any], side: str) -> tuple[TokenLogprob, ...] | None:
    """Out of `meta_info`: `side` is `input` (the prompt) or `output`; None if none were asked for.

    SGLang writes a position as `[logprob, token id, text or null]`, and its most likely tokens as a list of the same.
    """
    entries = meta.get(f"{side}_token_logprobs")
    if entries is None:
        return None
    tops: Sequence[Any] = meta.get(f"{side}_top_logprobs") or [None] * len(entries)
    return tuple(
        TokenLogprob(logprob, token_id, token, tuple(TokenLogprob(*each) for each in top or ()))
        for (logprob, token_id, token), top in zip(entries, tops, strict=True)
    )


def openai_logprobs(logprobs: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...] | None:
    """Out of a choice: the chat format (`content`) or the completions format (`tokens`, `token_logprobs`)."""
    if logprobs is None:
        return None
    if logprobs.get("content") is not None:
        return tuple(
            TokenLogprob(entry["logprob"], token=entry["token"], top=_chat_top(entry.get("top_logprobs")))
            for entry in logprobs["content"]
        )
    tokens = logprobs.get("tokens") or ()
    tops: Sequence[Any] = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(logprob, token=token, top=_completions_top(top))
        for token, logprob, top in zip(tokens, logprobs.get("token_logprobs") or (), tops, strict=True)
    )


def _chat_top(entries: Sequence[Mapping[str, Any]] | None) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(entry["logprob"], token=entry["token"]) for entry in entries or ())


def _completions_top(entries: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    ordered = sorted((entries or {}).items(), key=lambda entry: -entry[1])
    return tuple(TokenLogprob(logprob, token=token) for token, logprob in ordered)
