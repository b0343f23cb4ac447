from __future__ import annotations

from types import SimpleNamespace

import pytest

from logitship.server.model.reasoning_markers import resolve_reasoning_config
from logitship.server.reasoning_config import ReasoningStrings
from logitship.server.refusals import StartError
from logitship.server.tokenizer import Tokenizer


def test_markers_as_tokens(tokenizer: Tokenizer) -> None:
    strings = ReasoningStrings("qwen3", "<think>", "end</think>", "</think>")
    resolved = resolve_reasoning_config(strings, tokenizer, 260)
    assert resolved.reasoning_start_token_ids == [2]
    assert resolved.reasoning_end_token_ids == [*tokenizer.encode("end"), 3]
    assert resolved.natural_reasoning_end_token_ids == [3]
    assert (resolved.reasoning_parser, resolved.reasoning_start_str) == ("qwen3", "<think>")
    assert (resolved.reasoning_end_str, resolved.enabled) == ("end</think>", True)


def test_markers_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    strings = ReasoningStrings("", "<think>", "zzz", "zzz")
    with pytest.raises(StartError, match="reasoning_config: the model has no tokens for the end 'zzz'"):
        resolve_reasoning_config(strings, tokenizer, max(tokenizer.encode("zzz")))
    few_tokens = Tokenizer(SimpleNamespace(unk_token_id=0, encode=lambda text, **_: [0] if text == "<think>" else [5]))
    with pytest.raises(StartError, match="no tokens for the start '<think>'"):
        resolve_reasoning_config(strings, few_tokens, 10)
    no_tokens = Tokenizer(SimpleNamespace(unk_token_id=None, encode=lambda text, **_: []))
    with pytest.raises(StartError, match="no tokens for the start ' '"):
        resolve_reasoning_config(ReasoningStrings("", " ", "b", "b"), no_tokens, 10)
