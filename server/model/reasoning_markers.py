"""Tokens that mark the start and the end of the model's thinking."""

from __future__ import annotations

from logitship.sampler.batch_processors.vllm_config import ReasoningConfig
from logitship.server.reasoning_config import ReasoningStrings
from logitship.server.refusals import StartError
from logitship.server.tokenizer import Tokenizer


def resolve_reasoning_config(strings: ReasoningStrings, tokenizer: Tokenizer, vocab_size: int) -> ReasoningConfig:
    """Return the markers as token ids, in vLLM's class.

    Args:
        strings: the markers as text.
        tokenizer: the model's.
        vocab_size: columns of the logits.

    Raises:
        StartError: the model's vocabulary cannot express a marker.
    """

    def token_ids(name: str, text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        unknown = tokenizer.hf_tokenizer.unk_token_id
        if not ids or any(token == unknown or token >= vocab_size for token in ids):
            raise StartError(f"reasoning_config: the model has no tokens for the {name} {text!r}: give what it writes")
        return ids

    return ReasoningConfig(
        reasoning_parser=strings.parser,
        reasoning_start_str=strings.start,
        reasoning_end_str=strings.end,
        reasoning_start_token_ids=token_ids("start", strings.start),
        reasoning_end_token_ids=token_ids("end", strings.end),
        natural_reasoning_end_token_ids=token_ids("end", strings.natural_end),
    )
